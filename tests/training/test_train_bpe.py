import sys

import pytest

from anymamba.generation.tokenizers import FileTokenizer
from anymamba.training.data.documents import Document, Text, bpe_vocab_size, train_bpe


def test_a_name_says_how_many(monkeypatch):
    assert bpe_vocab_size("bpe:1024") == 1024
    assert bpe_vocab_size("bytes") is bpe_vocab_size("bpe.json") is None
    for name in ("bpe:", "bpe:256", "bpe:-3", "bpe:1e3"):
        with pytest.raises(ValueError, match="expected a number of tokens, 257 or more"):
            bpe_vocab_size(name)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"install tokenizers \(pip install 'anymamba\[hf\]'\)"):
        bpe_vocab_size("bpe:1024")


def test_pairs_are_those_of_the_training_text_alone(tmp_path):
    stdin = b"zq" * 40 + b"wv" * 400
    train, held_out = Document("train", None, 0, 80), Document("held out", None, 80)
    train_bpe(Text([train, held_out], [train], [held_out], stdin, []), 260, tmp_path / "tokenizer.json")
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.vocab_size, tokenizer.end) == (260, [0])
    assert len(tokenizer.encode("zq" * 8)) < 8
    assert len(tokenizer.encode("wv" * 8)) == 16
    assert tokenizer.decode(tokenizer.encode("zqä \n\U0001f600  \x00")) == "zqä \n\U0001f600  \x00"
