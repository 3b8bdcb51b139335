"""A text and tokenizers that several tests share."""

import json

import pytest

from anymamba.generation import FileTokenizer

TEXT = "héllo wörld 日本語 👍🏽 ẞ\nfoo  bar"


def bare(directory, *special, plain=()):
    """Write a tokenizer.json with these special tokens, and no other file."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {token: i for i, token in enumerate(["a", *plain])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def with_beginning(directory, begin, *special, end):
    """Write a byte-level tokenizer whose post-processor puts a token before a text, and the end token after it."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 + len(special) + 1,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[begin, *special],
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begin} $A {end}", special_tokens=[(token, tokenizer.token_to_id(token)) for token in (begin, end)]
    )
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": begin, "eos_token": end}))
    return FileTokenizer(directory / "tokenizer.json")
