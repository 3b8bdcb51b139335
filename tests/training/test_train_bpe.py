import sys

import pytest

from anymamba.generation.tokenizers import FileTokenizer
from anymamba.training.data.documents import Document
from anymamba.training.data.sources import Text
from anymamba.training.data.train_bpe import byte_pair_size, make_byte_pairs


def test_a_name_says_how_many(monkeypatch):
    assert byte_pair_size("bpe:1024") == 1024
    assert byte_pair_size("bytes") is byte_pair_size("bpe.json") is None
    for name in ("bpe:", "bpe:256", "bpe:-3", "bpe:1e3"):
        with pytest.raises(ValueError, match="expected a number of tokens, 257 or more"):
            byte_pair_size(name)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"install tokenizers \(pip install 'anymamba\[hf\]'\)"):
        byte_pair_size("bpe:1024")


def test_pairs_are_those_of_the_training_text_alone(tmp_path):
    stdin = b"zq" * 40 + b"wv" * 400
    train, held_out = Document("train", None, 0, 80), Document("held out", None, 80)
    make_byte_pairs(Text([train, held_out], [train], [held_out], stdin, []), 260, tmp_path / "tokenizer.json")
    made = FileTokenizer(tmp_path / "tokenizer.json")
    assert (made.vocab_size, made.end) == (260, [0])
    assert len(made.encode("zq" * 8)) < 8
    assert len(made.encode("wv" * 8)) == 16
    assert made.decode(made.encode("zqä \n\U0001f600  \x00")) == "zqä \n\U0001f600  \x00"
