"""Files in UTF-16 and binary files are named and rejected, for every tokenizer and format, instead of trained on."""

import io
import json
import sys
from types import SimpleNamespace

import pytest

from anymamba.cli.main import main
from anymamba.training import TrainingConfig
from anymamba.training.api import create_run
from anymamba.training.data.sources import UnusableTextError, find_text
from anymamba.training.data.tables import read_tables
from tests.training.cases import silent, tiny, write_corpus

WORDS = "a text of some words\n" * 40
LINE = json.dumps({"text": WORDS}) + "\n"
FILES = {
    "little.txt": (WORDS.encode("utf-16"), "UTF-16 text; convert it to UTF-8: iconv -f UTF-16 -t UTF-8"),
    "big.txt": (b"\xfe\xff" + WORDS.encode("utf-16-be"), "UTF-16 text; convert it to UTF-8"),
    "wide.txt": (WORDS.encode("utf-32"), "UTF-32 text; convert it to UTF-8"),
    "lines.jsonl": ((LINE * 3).encode("utf-16"), "UTF-16 text; convert it to UTF-8"),
    "no mark.txt": (WORDS.encode("utf-16-le"), "binary, not text (a NUL byte at byte 1)"),
    "picture.png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)), "binary, not text (a NUL byte at byte 8)"),
}


def config_of(*sources, **data):
    data = {"tokenizer": "bytes", "held_out": 0.1, **data}
    return TrainingConfig.from_dict({"data": {"sources": [str(source) for source in sources], **data}}).data


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
@pytest.mark.parametrize("name", FILES)
def test_they_are_rejected_by_name(tmp_path, name, tokenizer):
    content, message = FILES[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_text(WORDS)
    with pytest.raises(UnusableTextError) as error:
        find_text(config_of(tmp_path, tokenizer=tokenizer))
    (problem,) = error.value.problems
    assert f"{name}: {message}" in problem
    told = []
    text = find_text(config_of(tmp_path, tokenizer=tokenizer, on_error="skip"), told.append)
    assert {document.name.removesuffix(" (end)") for document in text.documents} == {"good.txt"}
    assert len(told) == 1


def test_bytes_of_another_encoding_are_learned_and_reported(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 " * 20)
    lines = []
    assert len(find_text(config_of(tmp_path), lines.append).documents) == 1
    (line,) = lines
    assert line.startswith(f"1 file is not UTF-8 text (first {tmp_path / 'a.txt'}: byte 3), and learned as bytes")
    (tmp_path / "b.txt").write_bytes(b"x" * (2**16 - 1) + "é".encode())  # a character across the end of the head
    (tmp_path / "c.txt").write_bytes(b"\xff" * 20)
    find_text(config_of(tmp_path), lines.append)
    assert lines[1].startswith("2 files are not UTF-8 text")
    find_text(config_of(tmp_path, format="text"), lines.append)  # "the bytes of any file as they are"
    assert len(lines) == 2
    with pytest.raises(UnusableTextError, match="2 in all"):
        find_text(config_of(tmp_path, tokenizer="bpe:300"))


def test_stdin_is_judged_like_a_file(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(WORDS.encode("utf-16"))))
    with pytest.raises(UnusableTextError, match="stdin: UTF-16 text"):
        find_text(config_of("-"))


def test_the_command_ends_with_an_error_and_leaves_nothing(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(FILES["little.txt"][0])
    arguments = ["--data.sources", str(tmp_path / "a.txt"), "--out", str(tmp_path / "run")]
    assert main(["train", *arguments]) == 2
    assert "a.txt: UTF-16 text; convert it to UTF-8" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_model_of_bytes_may_learn_any_file_if_asked(tmp_path):
    write_corpus(tmp_path / "corpus")
    (tmp_path / "corpus" / "a.png").write_bytes(FILES["picture.png"][0])
    config = tiny(tmp_path / "corpus", data={"format": "text"})
    trainer = create_run(config, tmp_path / "run", silent)
    assert 0 in trainer.task.corpus.train.read(0, trainer.task.corpus.train.total)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_tables_in_utf16_are_named_too(tmp_path, name):
    (tmp_path / name).write_bytes("a,b\n1,2\n".encode("utf-16"))
    with pytest.raises(ValueError, match=rf"{name}: UTF-16 text; convert it to UTF-8"):
        read_tables([str(tmp_path / name)])
