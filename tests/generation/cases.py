"""A text and tokenizers that several tests share."""

import pytest

TEXT = "héllo wörld 日本語 👍🏽 ẞ\nfoo  bar"


def bare(directory, *special, plain=()):
    """A tokenizer.json with these special tokens and nothing beside it."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {token: i for i, token in enumerate(["a", *plain])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"
