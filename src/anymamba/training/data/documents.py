"""Documents: pieces of text that stand alone, which of them are held out, and their tokens.

A document is a file, a line of JSON lines, or stdin. It is named by its path below its source (below the directory
before the first wildcard of a pattern), so the split does not depend on where a corpus is.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.core.io import parse_json
from anymamba.generation.tokenizers import ByteTokenizer, Tokenizer

_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes that no UTF-8 character begins with


class Document(NamedTuple):
    """A piece of text that stands alone.

    Attributes:
        name: of the document, unique in its corpus.
        path: of its file; None for stdin.
        begin, end: which bytes of that text belong to it, after a split perhaps not all; end None: to the end.
        line: for a line of JSON, the bytes of its object in the file, and the field that holds the text.
    """

    name: str
    path: Path | None
    begin: int = 0
    end: int | None = None
    line: tuple[int, int, str] | None = None

    def read(self, stdin: bytes) -> bytes:
        """Its bytes; `stdin` is what was read from stdin."""
        if self.line is not None:
            begin, end, field = self.line
            content = self._bytes(stdin, begin, end)
            return line_text(content, field)[self.begin : self.end]
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


def split(documents: list[Document], share: float, stdin: bytes) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents; between half of `share` and `share` of all bytes are held out.

    In the order of a hash of their names, whole documents are held out while they fit. If those that fit are less than
    half, the end of the first that does not fit is cut off for the rest, between two characters.
    """
    sizes = {document: document.size(stdin) for document in documents}
    total = sum(sizes.values())
    room = most = min(max(2, int(share * total)), total - 2)  # at least a token and its successor on either side
    order = ranked(documents)
    chosen: dict[Document, None] = {}
    for document in order:
        if sizes[document] <= room:
            chosen[document] = None
            room -= sizes[document]
        elif 2 * room < most:
            break
    train, held_out = [document for document in documents if document not in chosen], list(chosen)
    if train and 2 * room >= most:
        whole = next(document for document in order if document not in chosen)
        before, after = _cut(whole, sizes[whole] - room, stdin)
        train[train.index(whole)] = before
        held_out.append(after)
    return train, held_out


def _cut(document: Document, place: int, stdin: bytes) -> tuple[Document, Document]:
    """A document before and after a place, or up to three bytes before that if a character would be cut."""
    first = document.begin + max(0, place - 3)
    place += document.begin
    around = document._replace(begin=first, end=place + 1).read(stdin)
    while place > first and around[place - first] in _CONTINUATION:
        place -= 1
    return document._replace(end=place), document._replace(name=f"{document.name} (end)", begin=place)


def encode(name: str, content: bytes, tokenizer: Tokenizer) -> Tensor:
    """The tokens (t,) of a document, and the end token after it if the tokenizer has one.

    Raises:
        ValueError: it is not UTF-8, which all tokenizers but bytes need, or an id is beyond the vocabulary.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return torch.tensor(bytearray(content), dtype=torch.uint8)
    try:
        ids = tokenizer.encode(content.decode("utf-8"), add_special_tokens=True) + tokenizer.end[:1]
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if (most := max(ids, default=0)) >= tokenizer.vocab_size:
        raise ValueError(
            f"{name}: expected token ids below {tokenizer.vocab_size}, the tokenizer's number of tokens, got {most}"
        )
    return torch.tensor(ids, dtype=torch.int32)


def line_text(line: bytes, field: str) -> bytes:
    """The text of a JSON line, as UTF-8."""
    value = parse_json(line)
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'expected an object with a text "{field}", got {str(value)[:60]}')
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f'"{field}" has half a character ({error.reason})') from error


def ranked(documents: list[Document]) -> list[Document]:
    """Documents in the order of a hash of their names: random, and the same wherever they are."""

    def rank(document: Document) -> bytes:
        return hashlib.blake2b(document.name.encode("utf-8", "surrogateescape"), digest_size=8).digest()

    return sorted(documents, key=rank)


def sample(documents: list[Document], stdin: bytes, most: int) -> list[bytes]:
    """Documents in a random order, `most` bytes of them."""
    parts: list[bytes] = []
    for document in ranked(documents):
        if most <= 0:
            break
        parts.append(document._replace(end=document.begin + min(most, document.size(stdin))).read(stdin))
        most -= len(parts[-1])
    return parts
