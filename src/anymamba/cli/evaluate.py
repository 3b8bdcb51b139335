"""`anymamba eval`: how well a model predicts texts."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from anymamba.cli.common import Progress, decode_text, load, open_file, stdin_bytes
from anymamba.generation.likelihood import Likelihood, likelihood
from anymamba.generation.tokenizers import ByteTokenizer, Tokenizer
from anymamba.models.lm import MambaLM
from anymamba.training.corpus import Document
from anymamba.training.sources import expect_unpacked, expect_utf8, files_of, shortened

_BLOCK = 2**20  # bytes of text that are tokenised at once


class _Score(NamedTuple):
    """What a text costs.

    Attributes:
        tokens: the number read.
        predicted: the number predicted.
        size: bytes.
        counted: bytes that were predicted.
        nats: negative log-likelihood.
    """

    tokens: int
    predicted: int
    size: int
    counted: int
    nats: float

    def cells(self) -> tuple[str, str, str]:
        """Tokens, bits per byte and perplexity, to print."""
        if not self.predicted:
            return f"{self.tokens:,}", "too short", ""
        return f"{self.tokens:,}", f"{_bits(self.nats, self.counted):.4f}", f"{_perplexity(self):.4f}"


def run(args: argparse.Namespace) -> None:
    """Score every file as a separate text, and all together."""
    files = [file for path in args.files for file in _files_of(path)]
    model, tokenizer = load(args)
    if len(files) > 1 and not isinstance(tokenizer, ByteTokenizer):
        _expect([path for path in files if Path(path).is_file()], expect_utf8)
    sizes = [0 if path == "-" else Path(path).stat().st_size for path in files]
    progress, began = Progress(sum(sizes) if all(sizes) else 0), perf_counter()
    scores: list[_Score] = []
    for path in files:
        with nullcontext(stdin_bytes("pass a file")) if path == "-" else open_file(path) as file:
            done = sum(sizes[: len(scores)])
            found = _score(_named(path), file, model, tokenizer, args.special_tokens, progress, done)
            scores.append(found)
    progress.close()
    total = _Score(*(sum(values) for values in zip(*scores, strict=True)))
    if not total.predicted:
        raise ValueError(f"{_named(files[0])}: a text of at least two tokens is needed, got {scores[0].tokens}")
    if len(files) == 1:
        print(f"tokens          {total.tokens:,} ({total.size / total.tokens:.2f} bytes each)")
        print(f"bits per byte   {_bits(total.nats, total.counted):.4f}")
        print(f"perplexity      {_perplexity(total):.4f} per token")
    else:
        named = list(zip(map(_named, files), scores, strict=True))
        _print_table([*named, (f"all {len(files)} texts", total)])
    print(f"{total.tokens / (perf_counter() - began):.1f} tokens/s", file=sys.stderr)


def _named(path: str) -> str:
    return "stdin" if path == "-" else path


def _files_of(path: str) -> list[str]:
    """A file itself, or the files in a directory.

    Raises:
        ValueError: it does not exist, or has a file that cannot be text.
    """
    if path == "-":
        stdin_bytes("pass a file")
        return [path]
    if not Path(path).exists():
        raise ValueError(f"{path}: no such file or directory")
    if not Path(path).is_dir():
        return [path]
    files = [str(document.path) for document in files_of(path)]
    if not files:
        raise ValueError(f"{path}: no text files there")
    _expect(files, expect_unpacked)
    return files


def _expect(files: list[str], check: Callable[[Document, bytes], None]) -> None:
    """Refuse files that a check refuses; the error names all of them."""
    problems = []
    for path in files:
        try:
            check(Document(path, Path(path)), b"")
        except ValueError as error:  # noqa: PERF203
            problems.append(f"{path}: {error}")
    if problems:
        raise ValueError("; ".join(shortened(problems)))


def _print_table(rows: list[tuple[str, _Score]]) -> None:
    """Print a line for each text, with its name at the end."""
    table = [("tokens", "bits per byte", "perplexity", ""), *((*score.cells(), name) for name, score in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for row in table:
        print("  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip())


def _score(
    where: str, file: Any, model: MambaLM, tokenizer: Tokenizer, special: bool, progress: Progress, done: int
) -> _Score:
    """Score a text, after special tokens if asked for; `done` bytes of others have been scored before it."""
    size, first_bytes, begin = 0, 0, True
    leads = special and bool(tokenizer.encode("", add_special_tokens=True))  # a token without bytes stands before it

    def pieces() -> Iterator[list[int]]:
        nonlocal first_bytes, size, begin
        for text in _blocks(where, file, tokenizer):
            ids = tokenizer.encode(text, add_special_tokens=begin and special)
            if begin and ids and not leads:
                # A part of a character decodes to a replacement, which has other bytes than the text.
                first_bytes = max(1, len(tokenizer.decode(ids[:1]).partition("\ufffd")[0].encode()))
            size, begin = size + len(text.encode("utf-8", errors="surrogateescape")), begin and not ids
            yield ids

    found = Likelihood(0.0, 0, 0)
    for found in likelihood(model, pieces()):
        progress.at(done + size, f"{_bits(found.nats, max(1, size)):.3f} bits per byte")
    return _Score(found.read, found.predicted, size, max(1, size - first_bytes) if found.predicted else 0, found.nats)


def _perplexity(score: _Score) -> float:
    return math.exp(min(700.0, score.nats / score.predicted))


def _bits(nats: float, count: int) -> float:
    return nats / math.log(2) / count


def _blocks(where: str, file: Any, tokenizer: Tokenizer) -> Iterator[str]:
    """The text in blocks that end after a newline if there is one, so that tokens are rarely cut."""
    rest = b""
    while block := file.read(_BLOCK):
        block = rest + block
        cut = block.rfind(b"\n") + 1
        if cut == 0 and len(block) < 8 * _BLOCK:
            rest = block
            continue
        cut = cut or _character_end(block)
        rest = block[cut:]
        yield decode_text(where, block[:cut], tokenizer)
    if rest:
        yield decode_text(where, rest, tokenizer)


def _character_end(block: bytes) -> int:
    """The last place in the block where no UTF-8 character is cut."""
    for back in range(1, 5):
        if block[-back] & 0b1100_0000 != 0b1000_0000:
            return len(block) - back
    return len(block)
