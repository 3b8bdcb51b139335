"""Documents: where the text comes from, and which of it is held out.

A document is a file, a line of a JSONL file, or stdin. It is named by its path below its source (below the directory
before the first wildcard of a pattern), so that the split does not depend on where a corpus lies.
"""

from __future__ import annotations

import glob
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.generation.tokenizers import ByteTokenizer, Tokenizer

_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes that no UTF-8 character begins with


class Document(NamedTuple):
    """A piece of text that stands alone.

    Attributes:
        name: of the document, unique in its corpus.
        path: of its file; None for stdin.
        begin, end: its bytes in the file, or share of them that a split took; end None: all.
        field: of the JSON object that holds the text, if it is one.
    """

    name: str
    path: Path | None
    begin: int = 0
    end: int | None = None
    field: str | None = None

    def read(self, stdin: bytes) -> bytes:
        """Its bytes; `stdin` is what came from there."""
        if self.path is None:
            return stdin[self.begin : self.end]
        with self.path.open("rb") as file:
            file.seek(self.begin)
            content = file.read() if self.end is None else file.read(self.end - self.begin)
        return content if self.field is None else _line_text(self.name, content, self.field).encode()

    def size(self, stdin: bytes) -> int:
        """Bytes that it takes where it lies."""
        if self.end is not None:
            return self.end - self.begin
        return (len(stdin) if self.path is None else self.path.stat().st_size) - self.begin


def find_documents(sources: tuple[str, ...], jsonl_field: str) -> list[Document]:
    """The documents of files, directories, glob patterns, JSONL files, stdin ("-") and "stdlib", ordered by source.

    A file that is found again, through another source or a link, is taken once, under the first name.

    Raises:
        ValueError: a source does not exist, has no files, or is no JSONL where its name says so.
    """
    found: dict[Path | None, list[Document]] = {}
    for source in sources:
        paths = []
        for file in _files_of(source):
            paths.append(path := None if file.path is None else file.path.resolve())
            if path not in found:
                found[path] = list(_documents_of(file, jsonl_field))
        if not any(found[path] for path in paths):
            raise ValueError(f"{source}: no text files there")
    return [document for documents in found.values() for document in documents]


def split(documents: list[Document], share: float, stdin: bytes) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, by a hash of their names; at least one each.

    A single document is cut: its last `share` is held out.
    """
    if len(documents) == 1 and documents[0].field is None:
        only = documents[0]
        cut = only.begin + int(only.size(stdin) * (1 - share))
        behind = only._replace(begin=cut, end=cut + 3).read(stdin)
        cut += len(behind) - len(behind.lstrip(_CONTINUATION))
        return [only._replace(end=cut)], [only._replace(name=f"{only.name} (end)", begin=cut)]
    if len(documents) < 2:
        raise ValueError(f"{documents[0].name}: at least two documents are needed, one to be held out, got 1")
    ranked = sorted(documents, key=lambda document: _hash(document.name))
    count = sum(_hash(document.name) < share * 2**64 for document in documents)
    held_out = set(ranked[: min(max(1, count), len(documents) - 1)])
    return [d for d in documents if d not in held_out], [d for d in ranked if d in held_out]


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


def _documents_of(document: Document, field: str) -> Iterator[Document]:
    if document.path is None or document.path.suffix != ".jsonl":
        yield document
        return
    begin = 0
    with document.path.open("rb") as file:
        for number, line in enumerate(file, 1):
            name, end = f"{document.name}:{number}", begin + len(line)
            if line.strip() and _line_text(name, line, field):
                yield Document(name, document.path, begin, end, field)
            begin = end


def _line_text(name: str, line: bytes, field: str) -> str:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: not readable JSON ({error})") from error
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'{name}: expected an object with a text "{field}", got {str(value)[:60]}')
    return text


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
