"""Documents: texts that stand alone, which of them are held out, their tokens, and byte pairs trained on them.

A document is a file, a line of JSON lines, or stdin. It is named by its path below its source (below the directory
before the first wildcard of a pattern), so that the split does not depend on where a corpus is stored.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.core.io import atomic_write, parse_json
from anymamba.generation.tokenizers import ByteTokenizer, Tokenizer

_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes that no UTF-8 character begins with
_BPE_PREFIX = "bpe:"
_BPE_END_TOKEN = "<|endoftext|>"
_BPE_MIN_VOCAB_SIZE = 257  # all bytes, and the end token
_BPE_TRAINING_BYTES = 2**23  # of the text, at most


class Document(NamedTuple):
    """A text that stands alone, or after a split the part of one from byte `begin` to byte `end`.

    A line of JSON lines has a `line`: begin and end of its object in the file, and the field that holds the text.
    """

    name: str  # unique in its corpus
    path: Path | None  # None for stdin
    begin: int = 0
    end: int | None = None  # None for the end of the text
    line: tuple[int, int, str] | None = None

    def read(self, stdin: bytes) -> bytes:
        """Return its bytes; `stdin` is what was read from stdin."""
        if self.line is not None:
            begin, end, field = self.line
            content = self.read_range(stdin, begin, end)
            return line_text(content, field)[self.begin : self.end]
        return self.read_range(stdin, self.begin, self.end)

    def size(self, stdin: bytes) -> int:
        """Return the number of its bytes."""
        if self.end is not None:
            return self.end - self.begin
        return (len(stdin) if self.path is None else self.path.stat().st_size) - self.begin

    def read_range(self, stdin: bytes, begin: int, end: int | None) -> bytes:
        """Return some bytes of its file, or of stdin; `end` None: to the end."""
        with self.open(stdin) as file:
            file.seek(begin)
            return file.read() if end is None else file.read(end - begin)

    def open(self, stdin: bytes) -> io.BufferedReader | io.BytesIO:
        """Open its file, or stdin."""
        return io.BytesIO(stdin) if self.path is None else self.path.open("rb")


class Text(NamedTuple):
    """The documents of a run."""

    documents: list[Document]  # all documents, in the order of the sources
    train: list[Document]
    held_out: list[Document]
    stdin: bytes  # what was read from it
    skipped: list[str]  # a sentence for each file, or line of JSON lines, that cannot be used


def split(documents: list[Document], fraction: float, stdin: bytes) -> tuple[list[Document], list[Document]]:
    """Split documents into those to train on and held-out ones: between half of `fraction` and `fraction` of all bytes.

    In the order of a hash of their names, whole documents are held out while they fit. If those that fit are less than
    half, the end of the first that does not fit is cut off for the rest, between two characters.
    """
    sizes = {document: document.size(stdin) for document in documents}
    total = sum(sizes.values())
    # On either side there is at least a token and its successor.
    remaining = budget = min(max(2, int(fraction * total)), total - 2)
    order = sort_by_name_hash(documents)
    chosen: dict[Document, None] = {}
    for document in order:
        if sizes[document] <= remaining:
            chosen[document] = None
            remaining -= sizes[document]
        elif 2 * remaining < budget:
            break
    train, held_out = [document for document in documents if document not in chosen], list(chosen)
    if train and 2 * remaining >= budget:
        whole = next(document for document in order if document not in chosen)
        before, after = _cut(whole, sizes[whole] - remaining, stdin)
        train[train.index(whole)] = before
        held_out.append(after)
    return train, held_out


def _cut(document: Document, offset: int, stdin: bytes) -> tuple[Document, Document]:
    """Cut a document in two at an offset, or up to three bytes before it so that no character is cut."""
    first = document.begin + max(0, offset - 3)
    offset += document.begin
    around = document._replace(begin=first, end=offset + 1).read(stdin)
    while offset > first and around[offset - first] in _CONTINUATION:
        offset -= 1
    return document._replace(end=offset), document._replace(name=f"{document.name} (end)", begin=offset)


def encode(name: str, content: bytes, tokenizer: Tokenizer) -> Tensor:
    """Return the tokens (t,) of a document, with the end token after it if the tokenizer has one.

    Raise `ValueError` if it is not UTF-8, which all tokenizers but bytes need, or an id is beyond the vocabulary.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return torch.tensor(bytearray(content), dtype=torch.uint8)
    try:
        ids = tokenizer.encode(content.decode("utf-8"), add_special_tokens=True) + tokenizer.end[:1]
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if (largest := max(ids, default=0)) >= tokenizer.vocab_size:
        raise ValueError(
            f"{name}: expected token ids below {tokenizer.vocab_size}, the tokenizer's number of tokens, got {largest}"
        )
    return torch.tensor(ids, dtype=torch.int32)


def line_text(line: bytes, field: str) -> bytes:
    """Return the text in a field of a JSON line, as UTF-8; raise `ValueError` if there is none."""
    value = parse_json(line)
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'expected an object with a text "{field}", got {str(value)[:60]}')
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f'"{field}" has half a character ({error.reason})') from error


def sort_by_name_hash(documents: list[Document]) -> list[Document]:
    """Return documents in the order of a hash of their names: random, and the same wherever they are stored."""

    def rank(document: Document) -> bytes:
        return hashlib.blake2b(document.name.encode("utf-8", "surrogateescape"), digest_size=8).digest()

    return sorted(documents, key=rank)


def sample(documents: list[Document], stdin: bytes, max_bytes: int) -> list[bytes]:
    """Return documents in random order, up to `max_bytes` bytes of them."""
    parts: list[bytes] = []
    for document in sort_by_name_hash(documents):
        if max_bytes <= 0:
            break
        parts.append(document._replace(end=document.begin + min(max_bytes, document.size(stdin))).read(stdin))
        max_bytes -= len(parts[-1])
    return parts


def bpe_vocab_size(name: str) -> int | None:
    """Return the number of tokens in "bpe:1024"; None for the name of another tokenizer.

    Raise `ValueError` if it is not a number, or too small, or the library is not installed.
    """
    if not name.startswith(_BPE_PREFIX):
        return None
    text = name.removeprefix(_BPE_PREFIX)
    if not text.isdecimal() or int(text) < _BPE_MIN_VOCAB_SIZE:
        raise ValueError(
            f"data.tokenizer = {name}: expected a number of tokens, {_BPE_MIN_VOCAB_SIZE} or more, got {text!r}"
        )
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise ValueError(f"data.tokenizer = {name}: install tokenizers (pip install 'anymamba[hf]')") from error
    return int(text)


def train_bpe(text: Text, size: int, path: Path) -> None:
    """Write a tokenizer.json of `size` tokens, trained on a sample of the training text; the same every time."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[_BPE_END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = sample(text.train, text.stdin, _BPE_TRAINING_BYTES)
    tokenizer.train_from_iterator((part.decode("utf-8", "ignore") for part in texts), trainer)
    with atomic_write(path) as temporary:
        tokenizer.save(str(temporary))
