"""Documents: where the text comes from, and which of it is held out.

A document is a file, a line of JSON lines, or stdin. It is named by its path below its source (below the directory
before the first wildcard of a pattern), so that the split does not depend on where a corpus lies.
"""

from __future__ import annotations

import glob
import hashlib
import io
import sys
import sysconfig
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.generation.tokenizers import ByteTokenizer, Tokenizer
from anymamba.ground.files import parse_json

_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes that no UTF-8 character begins with
_LINES = (".jsonl", ".ndjson")
_PACKED = (".gz", ".tgz", ".bz2", ".xz", ".lzma", ".zst", ".lz4", ".br", ".zip", ".7z", ".tar", ".parquet", ".arrow")
_BEGINNINGS = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"7z\xbc\xaf", b"PAR1", b"ARROW1")


class Document(NamedTuple):
    """A piece of text that stands alone.

    Attributes:
        name: of the document, unique in its corpus.
        path: of its file; None for stdin.
        begin, end: its bytes of that text, or the share of them that a split took; end None: to the end.
        line: the bytes of the file that are a JSON object with the text, if it is one, and the field that holds it.
    """

    name: str
    path: Path | None
    begin: int = 0
    end: int | None = None
    line: tuple[int, int, str] | None = None

    def read(self, stdin: bytes) -> bytes:
        """Its bytes; `stdin` is what came from there."""
        if self.line is not None:
            begin, end, field = self.line
            content = self._bytes(stdin, begin, end)
            return _line_text(self.name, content, field)[self.begin : self.end]
        return self._bytes(stdin, self.begin, self.end)

    def size(self, stdin: bytes) -> int:
        """How many bytes it has."""
        if self.end is not None:
            return self.end - self.begin
        return (len(stdin) if self.path is None else self.path.stat().st_size) - self.begin

    def _bytes(self, stdin: bytes, begin: int, end: int | None) -> bytes:
        if self.path is None:
            return stdin[begin:end]
        with self.path.open("rb") as file:
            file.seek(begin)
            return file.read() if end is None else file.read(end - begin)


def find_documents(sources: tuple[str, ...], field: str, format: str = "auto", stdin: bytes = b"") -> list[Document]:
    """The documents of files, directories, glob patterns, stdin ("-") and "stdlib", ordered by source.

    A file that is found again, through another source or a link, is taken once, under the first name.

    Args:
        sources: where the text is.
        field: of a JSON object that holds the text.
        format: "text": each file is a document, as it is; "jsonl": each line of each; "auto": as its name says.
        stdin: what came from there.

    Raises:
        ValueError: a source does not exist, has no files, or is not what it should be: JSON lines, or unpacked text.
    """
    found: dict[Path | None, list[Document]] = {}
    for source in sources:
        paths = []
        for file in _files_of(source):
            paths.append(path := None if file.path is None else file.path.resolve())
            if path not in found:
                if format != "text":
                    _expect_unpacked(file, stdin)
                has_lines = format == "jsonl" or (format == "auto" and Path(file.name).suffix.lower() in _LINES)
                found[path] = list(_lines_of(file, field, stdin)) if has_lines else [file]
        if not any(found[path] for path in paths):
            raise ValueError(f"{source}: no text files there")
    return [document for documents in found.values() for document in documents]


def split(documents: list[Document], share: float, stdin: bytes) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents; of all bytes between half of `share` and `share` are held out.

    In the order of a hash of their names, documents are held out as a whole while they fit. Where those that fit are
    less than half, the end of the first that does not is cut off for the rest, between two characters.
    """
    sizes = {document: document.size(stdin) for document in documents}
    total = sum(sizes.values())
    room = most = min(max(2, int(share * total)), total - 2)  # no less than a token and its successor on either side
    ranked = sorted(documents, key=lambda document: _hash(document.name))
    chosen: dict[Document, None] = {}
    for document in ranked:
        if sizes[document] <= room:
            chosen[document] = None
            room -= sizes[document]
        elif 2 * room < most:
            break
    train, held_out = [document for document in documents if document not in chosen], list(chosen)
    if train and 2 * room >= most:
        whole = next(document for document in ranked if document not in chosen)
        before, behind = _cut(whole, sizes[whole] - room, stdin)
        train[train.index(whole)] = before
        held_out.append(behind)
    return train, held_out


def _cut(document: Document, place: int, stdin: bytes) -> tuple[Document, Document]:
    """A document before and behind a place, or up to three bytes before it where a character would be cut."""
    first = document.begin + max(0, place - 3)
    place += document.begin
    behind = document._replace(begin=first, end=place + 1).read(stdin)
    while place > first and behind[place - first] in _CONTINUATION:
        place -= 1
    return document._replace(end=place), document._replace(name=f"{document.name} (end)", begin=place)


def encode(name: str, content: bytes, tokenizer: Tokenizer) -> Tensor:
    """The tokens (t,) of a document, and the end token behind it if the tokenizer has one.

    Raises:
        ValueError: not UTF-8, which every tokenizer but that of bytes needs, or ids beyond its vocabulary.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return torch.tensor(bytearray(content), dtype=torch.uint8)
    try:
        ids = tokenizer.encode(content.decode("utf-8")) + tokenizer.end[:1]
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if (most := max(ids, default=0)) >= tokenizer.vocab_size:
        raise ValueError(
            f"{name}: expected token ids below {tokenizer.vocab_size}, the tokenizer's number of tokens, got {most}"
        )
    return torch.tensor(ids, dtype=torch.int32)


def _files_of(source: str) -> Iterator[Document]:
    """The files of a source, each as one document."""
    path = Path(source)
    if source == "-":
        yield Document("stdin", None)
    elif source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        yield from (d for d in _files(root, "*.py") if not d.name.startswith(("site-packages/", "dist-packages/")))
    elif path.is_dir():
        yield from _files(path, "*")
    elif path.is_file():
        yield Document(path.name, path)
    elif _is_pattern(source):
        root = Path(*takewhile(lambda part: not _is_pattern(part), path.parts))
        for name in sorted(glob.glob(source, recursive=True)):  # noqa: PTH207
            if Path(name).is_file():
                yield Document(Path(name).relative_to(root).as_posix(), Path(name))
    else:
        raise ValueError(f"{source}: no such file, directory or pattern")


def _is_pattern(text: str) -> bool:
    return any(letter in text for letter in "*?[")


def _files(root: Path, pattern: str) -> Iterator[Document]:
    """Non-empty files below a directory by their paths in it; hidden ones are left out."""
    for path in sorted(root.rglob(pattern)):
        name = path.relative_to(root)
        if path.is_file() and path.stat().st_size and not any(part.startswith(".") for part in name.parts):
            yield Document(name.as_posix(), path)


def _expect_unpacked(document: Document, stdin: bytes) -> None:
    """Refuse what is compressed, an archive or a table, by its name or its first bytes."""
    if Path(document.name).suffix.lower() in _PACKED or document._bytes(stdin, 0, 16).startswith(_BEGINNINGS):
        raise ValueError(
            f"{document.path or 'stdin'}: compressed or binary, not text; unpack it or leave it out "
            '(data.format = "text" would learn its bytes as they are)'
        )


def _lines_of(document: Document, field: str, stdin: bytes) -> Iterator[Document]:
    begin = 0
    with io.BytesIO(stdin) if document.path is None else document.path.open("rb") as file:
        for number, line in enumerate(file, 1):
            name, end = f"{document.name}:{number}", begin + len(line)
            if line.strip() and (text := _line_text(name, line, field)):
                yield Document(name, document.path, 0, len(text), (begin, end, field))
            begin = end


def _line_text(name: str, line: bytes, field: str) -> bytes:
    value = parse_json(line, name)
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'{name}: expected an object with a text "{field}", got {str(value)[:60]}')
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: not Unicode text ({error.reason} at character {error.start})") from error


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")


def read_stdin() -> bytes:
    """All of stdin.

    Raises:
        ValueError: there is none.
    """
    if sys.stdin is None:
        raise ValueError('data.sources: "-" means stdin, which is closed')
    return sys.stdin.buffer.read()
