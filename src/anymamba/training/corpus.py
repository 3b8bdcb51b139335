"""Documents: where the text comes from, and which of it is held out.

A document is a file, a line of a JSONL file, or stdin. It is named by its path below its source, so that the split does
not depend on where a corpus lies.
"""

from __future__ import annotations

import glob
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
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

    Raises:
        ValueError: a source does not exist, has no files, or is no JSONL where its name says so.
    """
    found: dict[str, Document] = {}
    for source in sources:
        documents = list(_of_source(source, jsonl_field))
        if not documents:
            raise ValueError(f"{source}: no text files there")
        found.update({f"{source}:{document.name}": document for document in documents})
    return list(found.values())


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
        ValueError: not UTF-8, which every tokenizer but that of bytes needs.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return torch.tensor(bytearray(content), dtype=torch.uint8)
    try:
        return torch.tensor(tokenizer.encode(content.decode("utf-8")) + tokenizer.end[:1], dtype=torch.int32)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _of_source(source: str, jsonl_field: str) -> Iterator[Document]:
    path = Path(source)
    if source == "-":
        yield Document("stdin", None)
    elif source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        yield from (d for d in _files(root, "*.py") if not d.name.startswith(("site-packages/", "dist-packages/")))
    elif path.is_dir():
        for document in _files(path, "*"):
            yield from _of_file(document, jsonl_field)
    elif path.is_file():
        yield from _of_file(Document(path.name, path), jsonl_field)
    elif any(letter in source for letter in "*?["):
        for name in sorted(glob.glob(source, recursive=True)):  # noqa: PTH207
            if Path(name).is_file():
                yield from _of_file(Document(name, Path(name)), jsonl_field)
    else:
        raise ValueError(f"{source}: no such file, directory or pattern")


def _files(root: Path, pattern: str) -> Iterator[Document]:
    """Non-empty files below a directory by their paths in it; hidden ones are left out."""
    for path in sorted(root.rglob(pattern)):
        name = path.relative_to(root)
        if path.is_file() and path.stat().st_size and not any(part.startswith(".") for part in name.parts):
            yield Document(name.as_posix(), path)


def _of_file(document: Document, field: str) -> Iterator[Document]:
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
