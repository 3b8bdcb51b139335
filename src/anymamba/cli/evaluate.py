"""`anymamba eval`: how well a model predicts a text."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from anymamba.cli.common import Progress, add_model_arguments, decode_text, load
from anymamba.generation.likelihood import Likelihood, likelihood
from anymamba.generation.tokenizers import Tokenizer

_BLOCK = 2**20  # bytes of text that are tokenised at once


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "eval",
        help="bits per byte and perplexity of a text",
        description="Bits per byte and perplexity of a text. The first token is read and not predicted, so its bytes "
        "do not count; if it is part of a character, that is one byte.",
    )
    add_model_arguments(parser)
    parser.add_argument("file", metavar="FILE", help="a text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Score the file as one text."""
    path = Path(args.file)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    model, tokenizer = load(args)
    size, first_bytes = path.stat().st_size, 0

    def pieces() -> Iterator[list[int]]:
        nonlocal first_bytes
        for text in _blocks(path, tokenizer):
            ids = tokenizer.encode(text)
            if not first_bytes and ids:
                # A part of a character decodes to a replacement, which has other bytes than the text.
                first_bytes = max(1, len(tokenizer.decode(ids[:1]).partition("\ufffd")[0].encode()))
            read[0] += len(text.encode("utf-8", errors="surrogateescape"))
            yield ids

    read = [0]
    score, progress, began = Likelihood(0.0, 0, 0), Progress(size), perf_counter()
    for score in likelihood(model, pieces()):
        progress.at(read[0], f"{_bits(score.nats, max(1, read[0])):.3f} bits per byte")
    progress.close()
    if not score.predicted:
        raise ValueError(f"{path}: a text of at least two tokens is needed, got {score.read}")
    seconds = perf_counter() - began
    counted = max(1, size - first_bytes)
    print(f"tokens          {score.read:,} ({size / score.read:.2f} bytes each)")
    print(f"bits per byte   {_bits(score.nats, counted):.4f}")
    print(f"perplexity      {math.exp(min(700.0, score.nats / score.predicted)):.4f} per token")
    print(f"{score.read / seconds:.1f} tokens/s", file=sys.stderr)


def _bits(nats: float, count: int) -> float:
    return nats / math.log(2) / count


def _blocks(path: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """The text in blocks that end behind a newline where there is one, so that hardly a token is cut."""
    rest = b""
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            block = rest + block
            cut = block.rfind(b"\n") + 1
            if cut == 0 and len(block) < 8 * _BLOCK:
                rest = block
                continue
            cut = cut or _character_end(block)
            rest = block[cut:]
            yield decode_text(str(path), block[:cut], tokenizer)
    if rest:
        yield decode_text(str(path), rest, tokenizer)


def _character_end(block: bytes) -> int:
    """The last place in the block where no UTF-8 character is cut."""
    for back in range(1, 5):
        if block[-back] & 0b1100_0000 != 0b1000_0000:
            return len(block) - back
    return len(block)
