import bz2
import gzip
import io
import json
import lzma
import os
import sys

import pytest

from anymamba.generation.tokenizers import ByteTokenizer
from anymamba.training.data.documents import split
from anymamba.training.data.shards import prepare
from anymamba.training.data.sources import UnusableTextError, find_documents, find_text
from tests.training.cases import LENGTHS, tiny, write_corpus


def usable_documents(*sources, field="text", format="auto", stdin=b""):
    """Return the documents, all of which can be used."""
    documents, problems = find_documents(tuple(map(str, sources)), field, format, stdin)
    assert problems == []
    return documents


@pytest.mark.parametrize("first", ["c", "c/*.txt", "c/../c"])
def test_a_file_of_several_sources_is_read_once(tmp_path, monkeypatch, first):
    write_corpus(tmp_path / "c")
    (tmp_path / "c" / "link.txt").symlink_to("document0.txt")
    (tmp_path / "c" / "lines.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    monkeypatch.chdir(tmp_path)
    sources = (first, "c", "c/*.txt", str(tmp_path / "c" / "document3.txt"), str(tmp_path / "**" / "*.txt"))
    documents = usable_documents(*sources)
    names = [f"document{i}.txt" for i in range(len(LENGTHS))]
    assert sorted(d.name for d in documents) == [*names, "lines.jsonl:1", "lines.jsonl:2"]
    train, held_out = split(documents, 0.3, b"")
    assert {d.read(b"") for d in train}.isdisjoint(d.read(b"") for d in held_out)


def test_names_under_a_pattern_do_not_depend_on_where_it_lies(tmp_path, monkeypatch):
    near, far = tmp_path / "here", tmp_path / "further" / "away"
    for directory in (near, far):
        write_corpus(directory / "deep")
    monkeypatch.chdir(near)
    for pattern, below in (("**/*.txt", "deep/"), ("*/document?.txt", "deep/"), ("deep/doc*", "")):
        for root in ("", "../here/", f"{near}/", f"{far}/"):
            names = [d.name for d in usable_documents(root + pattern)]
            assert names == [f"{below}document{i}.txt" for i in range(len(LENGTHS))]


def test_jsonl_globs_and_stdin_are_read(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": f"text {i}"}) for i in range(30)) + "\n\n")
    documents = usable_documents(tmp_path / "*.jsonl", field="body")
    assert [d.read(b"") for d in documents] == [f"text {i}".encode() for i in range(30)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe " * 100)))
    corpus = prepare(tiny("-").data, tmp_path / "data", ByteTokenizer())
    assert bytes(corpus.train.read(0, 12).tolist()) == b"from a pipe "


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson"])
def test_json_lines_are_known_by_name(tmp_path, name):
    (tmp_path / name).write_text('{"text": "one"}\n{"text": "two"}\n')
    assert [d.read(b"") for d in usable_documents(tmp_path)] == [b"one", b"two"]
    (whole,) = usable_documents(tmp_path, format="text")
    assert whole.read(b"") == (tmp_path / name).read_bytes()


def test_json_lines_of_other_names_and_of_stdin_are_read_if_asked(tmp_path):
    text = b'{"text": "one"}\n\n{"text": "two"}\n'
    (tmp_path / "a.json").write_bytes(text)
    documents = usable_documents("-", tmp_path, format="jsonl", stdin=text)
    assert [d.read(text) for d in documents] == [b"one", b"two"] * 2
    assert [d.read(text) for d in usable_documents("-", tmp_path, stdin=text)] == [text, text]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, lambda text: b"PAR1" + text])
@pytest.mark.parametrize("where", ["books", "books/*", "books/text.txt", "-"])
def test_packed_text_is_rejected_whatever_its_name(tmp_path, monkeypatch, pack, where):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "text.txt").write_bytes(packed := pack(b"text " * 100))
    monkeypatch.chdir(tmp_path)
    documents, (problem,) = find_documents((where,), "text", "auto", packed)
    assert documents == []
    assert problem.startswith(f"{'stdin' if where == '-' else 'books/text.txt'}: compressed or binary, not text")
    assert [d.read(packed) for d in usable_documents(where, format="text", stdin=packed)] == [packed]


@pytest.mark.parametrize("name", ["a.txt.GZ", "a.zst", "a.zip", "a.parquet"])
def test_packed_text_is_rejected_by_its_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"some of it")
    with pytest.raises(UnusableTextError, match="compressed or binary, not text; unpack it"):
        find_text(tiny(tmp_path).data)


class TestBadFiles:
    @pytest.fixture
    def mixed(self, tmp_path):
        """Write a folder of texts, with one file of each kind that cannot be used."""
        folder = write_corpus(tmp_path / "folder")
        (folder / "packed.txt").write_bytes(gzip.compress(b"text"))
        (folder / "deep").mkdir()
        (folder / "deep" / "latin.txt").write_bytes(
            b"x" * (2**20 - 1) + "ä".encode() + "Gr\u00fc\u00dfe".encode("latin-1")
        )
        (folder / "deep" / "cut.txt").write_bytes("ä".encode()[:1])
        (folder / "lines.jsonl").write_bytes(b'{"text": "fine"}\n{]\n{"body": "x"}\n[1]\n"\xff"\n{"text": "\\ud800"}\n')
        return folder

    bad = ("deep/cut.txt", "deep/latin.txt", *(f"lines.jsonl:{n}" for n in range(2, 7)), "packed.txt")

    def config(self, folder, **options):
        return tiny(folder, data={"tokenizer": "some.json", **options}).data

    def test_all_are_named_at_once_with_what_to_do(self, mixed):
        with pytest.raises(UnusableTextError) as error:
            find_text(self.config(mixed))
        assert [problem.split(": ")[0] for problem in error.value.problems] == [str(mixed / name) for name in self.bad]
        problems = dict(zip(self.bad, error.value.problems, strict=True))
        assert "not UTF-8 text (invalid start byte at byte 1048579)" in problems["deep/latin.txt"]
        assert "not UTF-8 text (unexpected end of data at byte 0)" in problems["deep/cut.txt"]
        assert 'expected an object with a text "text", got' in problems["lines.jsonl:3"]
        assert '"text" has half a character' in problems["lines.jsonl:6"]
        assert error.value.lines[-1] == (
            "8 in all: fix them, leave them out with --data.exclude PATTERN, or skip what is not text with "
            "--data.on_error skip"
        )
        assert all(name in str(error.value) for name in self.bad)

    def test_bytes_need_no_characters(self, mixed):
        with pytest.raises(UnusableTextError) as error:
            find_text(self.config(mixed, tokenizer="bytes"))
        assert not any("UTF-8" in problem for problem in error.value.problems)

    def test_they_are_skipped_if_asked_and_listed(self, mixed, tmp_path):
        told = []
        text = find_text(self.config(mixed, on_error="skip"), told.append)
        assert len(text.documents) == len(LENGTHS) + 1
        assert sorted(d.name for d in text.documents)[-1] == "lines.jsonl:1"
        assert [line.split(": ")[1] for line in told] == [str(mixed / name) for name in self.bad]
        config = self.config(mixed, on_error="skip", tokenizer="bytes")
        prepare(config, tmp_path / "data", ByteTokenizer())
        assert (tmp_path / "data" / "skipped.txt").read_text().splitlines() == find_text(config).skipped

    def test_where_nothing_is_left_there_is_nothing_to_skip(self, tmp_path):
        (tmp_path / "a.gz").write_bytes(b"x")
        with pytest.raises(UnusableTextError, match=r"a\.gz: compressed or binary, not text.*; fix it, leave it out"):
            find_text(self.config(tmp_path, on_error="skip"))

    def test_very_many_are_counted(self, tmp_path):
        (tmp_path / "a.jsonl").write_text("{]\n" * 1500)
        with pytest.raises(UnusableTextError) as error:
            find_text(self.config(tmp_path))
        assert (len(error.value.problems), len(error.value.lines)) == (1500, 22)
        assert error.value.lines[-2] == "and 1,480 more"

    @pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="everything can be read here")
    def test_what_may_not_be_read_is_named(self, mixed):
        (mixed / "document0.txt").chmod(0)
        with pytest.raises(UnusableTextError, match=r"document0\.txt: cannot be read \(Permission denied\)"):
            find_text(self.config(mixed, exclude=["deep", "*.jsonl", "packed.*"]))

    @pytest.mark.parametrize(
        "patterns",
        [
            ["deep", "lines.jsonl", "packed.txt"],
            ["deep/", "*.jsonl", "p*.txt"],
            ["deep/*", "[lp]*"],
            ["*/deep/*.txt", "*.jsonl", "{folder}/packed.txt"],
            ["latin.txt", "cut.txt", "lines.*", "packed.*"],
        ],
        ids=str,
    )
    def test_what_is_excluded_is_not_looked_at(self, mixed, patterns):
        patterns = [pattern.format(folder=mixed.as_posix()) for pattern in patterns]
        text = find_text(self.config(mixed, exclude=patterns))
        assert sorted(d.name for d in text.documents) == [f"document{i}.txt" for i in range(len(LENGTHS))]
        assert text.skipped == []

    def test_excluding_everything_is_rejected(self, mixed):
        with pytest.raises(ValueError, match="folder: no text files there that are not excluded"):
            find_text(self.config(mixed, exclude=["*"]))

    def test_all_missing_sources_are_named(self, mixed):
        with pytest.raises(ValueError, match=r"^nowhere, no/where: no such file, directory or pattern"):
            find_text(self.config(mixed, sources=["nowhere", str(mixed), "no/where"]))


def test_the_standard_library_is_there():
    documents = usable_documents("stdlib")
    assert len(documents) > 500
    assert "argparse.py" in {d.name for d in documents}
    train, held_out = split(documents, 0.02, b"")
    assert 0 < len(held_out) < 0.1 * len(train)
