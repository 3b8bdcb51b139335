"""`anymamba eval`: how well a model predicts a text."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from time import perf_counter
from typing import Any

from anymamba.cli.common import Progress, decode_text, load, open_file, stdin_bytes
from anymamba.generation.likelihood import Likelihood, likelihood
from anymamba.generation.tokenizers import Tokenizer
from anymamba.models.lm import MambaLM

_BLOCK = 2**20  # bytes of text that are tokenised at once


def run(args: argparse.Namespace) -> None:
    """Score the file as one text."""
    where = "stdin" if args.file == "-" else args.file
    with nullcontext(stdin_bytes("pass a file")) if args.file == "-" else open_file(args.file) as file:
        model, tokenizer = load(args)
        _score(where, file, model, tokenizer)


def _score(where: str, file: Any, model: MambaLM, tokenizer: Tokenizer) -> None:
    size = first_bytes = 0

    def pieces() -> Iterator[list[int]]:
        nonlocal first_bytes, size
        for text in _blocks(where, file, tokenizer):
            ids = tokenizer.encode(text)
            if not first_bytes and ids:
                # A part of a character decodes to a replacement, which has other bytes than the text.
                first_bytes = max(1, len(tokenizer.decode(ids[:1]).partition("\ufffd")[0].encode()))
            size += len(text.encode("utf-8", errors="surrogateescape"))
            yield ids

    score, progress, began = Likelihood(0.0, 0, 0), Progress(_known_size(file)), perf_counter()
    for score in likelihood(model, pieces()):
        progress.at(size, f"{_bits(score.nats, max(1, size)):.3f} bits per byte")
    progress.close()
    if not score.predicted:
        raise ValueError(f"{where}: a text of at least two tokens is needed, got {score.read}")
    seconds = perf_counter() - began
    counted = max(1, size - first_bytes)
    print(f"tokens          {score.read:,} ({size / score.read:.2f} bytes each)")
    print(f"bits per byte   {_bits(score.nats, counted):.4f}")
    print(f"perplexity      {math.exp(min(700.0, score.nats / score.predicted)):.4f} per token")
    print(f"{score.read / seconds:.1f} tokens/s", file=sys.stderr)


def _bits(nats: float, count: int) -> float:
    return nats / math.log(2) / count


def _known_size(file: Any) -> int:
    """The bytes of a file, 0 for what has no size: a pipe, or a device."""
    try:
        return os.fstat(file.fileno()).st_size
    except OSError:
        return 0


def _blocks(where: str, file: Any, tokenizer: Tokenizer) -> Iterator[str]:
    """The text in blocks that end behind a newline where there is one, so that hardly a token is cut."""
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
