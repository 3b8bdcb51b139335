"""`anymamba eval`: how well a model predicts texts."""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from anymamba.checkpoints.open import resolve_source
from anymamba.cli.common import Progress, decode_text, load, open_file, stdin_bytes
from anymamba.core.context_parallel import ContextParallelGroup
from anymamba.core.io import digest_file
from anymamba.generation.scoring import Likelihood, likelihood
from anymamba.generation.tokenizers import ByteTokenizer, Tokenizer
from anymamba.models.lm import MambaLM
from anymamba.training.config.sections import ParallelSection
from anymamba.training.data.documents import Document
from anymamba.training.data.sources import check_unpacked, check_utf8, list_files, shorten_list
from anymamba.training.distributed.process_group import World, init_distributed

_BLOCK = 2**20  # bytes of text that are tokenized at once
_DAY = 24 * 60 * 60  # seconds


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


class _Text(NamedTuple):
    """A text to score.

    Attributes:
        path: of a file, or "-".
        size: bytes, as far as they are known beforehand.
    """

    path: str
    size: int


def run(args: argparse.Namespace) -> None:
    """Score every file as a text of its own, and all together."""
    world = init_distributed()
    with world.translate_comm_errors():
        _run(args, world)


def _run(args: argparse.Namespace, world: World) -> None:
    found = world.run_on_main(lambda: json.dumps(_texts(args.files, world.size > 1)))
    texts = [_Text(*text) for text in json.loads(found)]
    model, tokenizer = _load(args, world)
    if len(texts) > 1 and not isinstance(tokenizer, ByteTokenizer):
        paths = [text.path for text in texts if Path(text.path).is_file()]
        world.run_on_main(lambda: _expected(paths, check_utf8))
    began = perf_counter()
    scores = _scores(texts, model, tokenizer, args.special_tokens, world)
    total = _Score(*(sum(values) for values in zip(*scores, strict=True)))
    world.run_checked(lambda: _check_predicted(texts[0], scores[0], total))
    if not world.is_main:
        return
    if len(texts) == 1:
        print(f"tokens          {total.tokens:,} ({total.size / total.tokens:.2f} bytes each)")
        print(f"bits per byte   {_bits(total.nats, total.counted):.4f}")
        print(f"perplexity      {_perplexity(total):.4f} per token")
    else:
        named = [(_named(text.path), score) for text, score in zip(texts, scores, strict=True)]
        _print_table([*named, (f"all {len(texts)} texts", total)])
    print(f"{total.tokens / (perf_counter() - began):.1f} tokens/s", file=sys.stderr)


def _load(args: argparse.Namespace, world: World) -> tuple[MambaLM, Tokenizer]:
    """The model and tokenizer, on every worker; the first one fetches them and speaks."""
    if world.size == 1:
        return load(args)
    source, device = world.run_on_main(lambda: str(resolve_source(args.model))), world.local_device(args.device)
    with nullcontext() if world.is_main else redirect_stderr(io.StringIO()):
        found = world.run_checked(lambda: load(argparse.Namespace(**{**vars(args), "model": source, "device": device})))
    # Workers take as long as their texts: one that is lost closes its connections, and is noticed at once.
    world.set_mesh(ParallelSection(context=world.size, timeout=_DAY), found[0].device)
    return found


def _scores(texts: list[_Text], model: MambaLM, tokenizer: Tokenizer, special: bool, world: World) -> list[_Score]:
    """What each text costs. Workers take whole texts, and share those that are more than the part of one."""
    if world.size > 1:
        expected = world.run_on_main(lambda: json.dumps([digest_file(text.path) for text in texts]))
        world.run_checked(lambda: _check_same(texts, json.loads(expected)))
    places = _divided([text.size for text in texts], world.size)
    own = [number for number, place in enumerate(places) if place == world.rank]
    shared = [number for number, place in enumerate(places) if place is None]
    sizes = [texts[number].size for number in (*own, *shared)]
    progress, done = Progress(sum(sizes) if all(sizes) and world.is_main else 0), 0
    found = torch.zeros(len(texts), len(_Score._fields), dtype=torch.float64)

    def score(numbers: list[int], cp_group: ContextParallelGroup | None) -> None:
        nonlocal done
        for number in numbers:
            path, size = texts[number]
            with nullcontext(stdin_bytes("pass a file")) if path == "-" else open_file(path) as file:
                cost = _score(_named(path), file, model, tokenizer, special, progress, done, cp_group)
            done += size
            # What all workers count of a text that they share is counted once.
            once = 1 if cp_group is None or world.is_main else 0
            found[number] = torch.tensor([*(once * count for count in cost[:-1]), cost.nats], dtype=torch.float64)

    world.run_checked(lambda: score(own, None))
    world.run_checked(lambda: score(shared, world.cp_group))
    progress.close()
    rows = world.all_reduce_sum(found, "to add up what the texts cost").tolist()
    return [_Score(int(row[0]), int(row[1]), int(row[2]), int(row[3]), row[4]) for row in rows]


def _check_same(texts: list[_Text], digests: list[str]) -> None:
    """Refuse texts that are not those of the first worker: they could not be divided.

    Raises:
        ValueError: there are some.
    """
    for text, expected in zip(texts, digests, strict=True):
        if (found := digest_file(text.path)) != expected:
            raise ValueError(
                f"{text.path}: every worker must see the same text: expected the checksum {expected}, got {found}"
            )


def _divided(sizes: list[int], count: int) -> list[int | None]:
    """The worker that takes each text, the largest first to who has least; None: all share it."""
    loads, places = [0] * count, list[int | None]([None] * len(sizes))
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        if count == 1 or sizes[number] * count <= sum(sizes):
            places[number] = least = loads.index(min(loads))
            loads[least] += sizes[number]
    return places


def _check_predicted(text: _Text, score: _Score, total: _Score) -> None:
    if not total.predicted:
        raise ValueError(f"{_named(text.path)}: a text of at least two tokens is needed, got {score.tokens}")


def _named(path: str) -> str:
    return "stdin" if path == "-" else path


def _texts(paths: list[str], several: bool) -> list[_Text]:
    """The texts of files and directories.

    Raises:
        ValueError: there are none, or something that `several` workers cannot all read.
    """
    files = [file for path in paths for file in _files_of(path)]
    for path in files if several else ():
        if path == "-" or not Path(path).is_file():
            raise ValueError(f"{_named(path)}: several workers read files, and this is none; use one process")
    return [_Text(path, 0 if path == "-" else Path(path).stat().st_size) for path in files]


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
    files = [str(document.path) for document in list_files(path)]
    if not files:
        raise ValueError(f"{path}: no text files there")
    _expected(files, check_unpacked)
    return files


def _expected(files: list[str], check: Callable[[Document, bytes], None]) -> str:
    """Refuse files that a check refuses, all of them named; nothing to say where it refuses none."""
    problems = []
    for path in files:
        try:
            check(Document(path, Path(path)), b"")
        except ValueError as error:  # noqa: PERF203
            problems.append(f"{path}: {error}")
    if problems:
        raise ValueError("; ".join(shorten_list(problems)))
    return ""


def _print_table(rows: list[tuple[str, _Score]]) -> None:
    """Print a line for each text, with its name at the end."""
    table = [("tokens", "bits per byte", "perplexity", ""), *((*score.cells(), name) for name, score in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for row in table:
        print("  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip())


def _score(
    where: str,
    file: Any,
    model: MambaLM,
    tokenizer: Tokenizer,
    special: bool,
    progress: Progress,
    done: int,
    cp_group: ContextParallelGroup | None = None,
) -> _Score:
    """Score a text, after special tokens if asked for; `done` bytes of others have been scored before it.

    With `cp_group` who share it, the nats are those of the part here.
    """
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
    for found in likelihood(model, pieces(), cp_group=cp_group):
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
