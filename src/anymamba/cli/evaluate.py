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
from anymamba.core.registry import describe_device
from anymamba.generation.scoring import TextScore, score_text
from anymamba.generation.tokenizers import ByteTokenizer, Tokenizer
from anymamba.models.lm import MambaLM
from anymamba.training.config.sections import ParallelSection
from anymamba.training.data.documents import Document
from anymamba.training.data.sources import check_unpacked, check_utf8, list_files, shorten_list
from anymamba.training.distributed.process_group import World, init_distributed

_BLOCK = 2**20  # bytes of text that are tokenized at once
_DAY = 24 * 60 * 60  # seconds


class _FileScore(NamedTuple):
    """The score of a file, or of several."""

    tokens: int  # read
    predicted: int  # tokens
    size: int  # bytes of the text
    counted: int  # bytes that were predicted
    nats: float  # negative log-likelihood

    def cells(self) -> tuple[str, str, str]:
        """Return tokens, bits per byte and perplexity as text."""
        if not self.predicted:
            return f"{self.tokens:,}", "too short", ""
        return f"{self.tokens:,}", f"{_bits(self.nats, self.counted):.4f}", f"{_perplexity(self):.4f}"


class _Text(NamedTuple):
    """A text to score."""

    path: str  # or "-" for stdin
    size: int  # bytes, 0 for stdin


def run(args: argparse.Namespace) -> None:
    """Score every file as a separate text, and all together."""
    world = init_distributed()
    with world.translate_comm_errors():
        _run(args, world)


def _run(args: argparse.Namespace, world: World) -> None:
    # 1) One rank lists the texts, and every rank loads the model.
    listing = world.run_on_main(lambda: json.dumps(_list_texts(args.files, world.size > 1)))
    texts = [_Text(*text) for text in json.loads(listing)]
    model, tokenizer = _load_on_ranks(args, world)
    if len(texts) > 1 and not isinstance(tokenizer, ByteTokenizer):
        paths = [text.path for text in texts if Path(text.path).is_file()]
        world.run_on_main(lambda: _check_files(paths, check_utf8))
    # 2) Score them.
    start_time = perf_counter()
    scores = _score_texts(texts, model, tokenizer, args.special_tokens, world)
    total = _FileScore(*(sum(values) for values in zip(*scores, strict=True)))
    world.run_checked(lambda: _check_predicted(texts[0], scores[0], total))
    # 3) One rank prints the scores.
    if not world.is_main:
        return
    if len(texts) == 1:
        print(f"tokens          {total.tokens:,} ({total.size / total.tokens:.2f} bytes each)")
        print(f"bits per byte   {_bits(total.nats, total.counted):.4f}")
        print(f"perplexity      {_perplexity(total):.4f} per token")
    else:
        rows = [(_display_name(text.path), score) for text, score in zip(texts, scores, strict=True)]
        _print_table([*rows, (f"all {len(texts)} texts", total)])
    speed = total.tokens / (perf_counter() - start_time)
    print(f"{speed:.1f} tokens/s, on {describe_device(model.device)}", file=sys.stderr)


def _load_on_ranks(args: argparse.Namespace, world: World) -> tuple[MambaLM, Tokenizer]:
    """Load the model and tokenizer on every rank; the main one downloads them and prints."""
    if world.size == 1:
        return load(args)
    source = world.run_on_main(lambda: str(resolve_source(args.model)))
    device = world.local_device(args.device)
    with nullcontext() if world.is_main else redirect_stderr(io.StringIO()):
        local_args = argparse.Namespace(**{**vars(args), "model": source, "device": device})
        model, tokenizer = world.run_checked(lambda: load(local_args))
    # Ranks wait for each other as long as a text lasts; a lost one closes its connections, which is noticed at once.
    world.set_mesh(ParallelSection(context=world.size, timeout=_DAY), model.device)
    return model, tokenizer


def _score_texts(
    texts: list[_Text], model: MambaLM, tokenizer: Tokenizer, special: bool, world: World
) -> list[_FileScore]:
    """Score each text. Ranks score whole texts, and share texts that are larger than a rank's part of all."""
    if world.size > 1:
        digests = world.run_on_main(lambda: json.dumps([digest_file(text.path) for text in texts]))
        world.run_checked(lambda: _check_same(texts, json.loads(digests)))
    ranks = _assign_texts([text.size for text in texts], world.size)
    local = [number for number, rank in enumerate(ranks) if rank == world.rank]
    shared = [number for number, rank in enumerate(ranks) if rank is None]
    sizes = [texts[number].size for number in (*local, *shared)]
    progress = Progress(sum(sizes) if all(sizes) and world.is_main else 0)
    done = 0
    scores = torch.zeros(len(texts), len(_FileScore._fields), dtype=torch.float64)

    def score_all(numbers: list[int], cp_group: ContextParallelGroup | None) -> None:
        nonlocal done
        for number in numbers:
            path, size = texts[number]
            with nullcontext(stdin_bytes("pass a file")) if path == "-" else open_file(path) as file:
                score = _score_file(_display_name(path), file, model, tokenizer, special, progress, done, cp_group)
            done += size
            # All ranks count the tokens and bytes of a shared text; one of them adds its counts to the sum.
            weight = 1 if cp_group is None or world.is_main else 0
            scores[number] = torch.tensor([*(weight * count for count in score[:-1]), score.nats], dtype=torch.float64)

    world.run_checked(lambda: score_all(local, None))
    world.run_checked(lambda: score_all(shared, world.cp_group))
    progress.close()
    rows = world.all_reduce_sum(scores, "to add up the scores of the texts").tolist()
    return [_FileScore._make([*map(int, counts), nats]) for *counts, nats in rows]


def _check_same(texts: list[_Text], digests: list[str]) -> None:
    """Raise ValueError unless this rank has the same texts as the main one, so that ranks can divide them."""
    for text, expected in zip(texts, digests, strict=True):
        if (digest := digest_file(text.path)) != expected:
            raise ValueError(
                f"{text.path}: every rank must see the same text: expected the checksum {expected}, got {digest}"
            )


def _assign_texts(sizes: list[int], world_size: int) -> list[int | None]:
    """Assign texts to ranks, largest first, always to the least loaded; None means all ranks share the text."""
    loads = [0] * world_size
    ranks = list[int | None]([None] * len(sizes))
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        if world_size == 1 or sizes[number] * world_size <= sum(sizes):
            rank = loads.index(min(loads))
            ranks[number] = rank
            loads[rank] += sizes[number]
    return ranks


def _check_predicted(text: _Text, score: _FileScore, total: _FileScore) -> None:
    if not total.predicted:
        raise ValueError(f"{_display_name(text.path)}: expected a text of at least two tokens, got {score.tokens}")


def _display_name(path: str) -> str:
    return "stdin" if path == "-" else path


def _list_texts(paths: list[str], is_distributed: bool) -> list[_Text]:
    """Return the texts of files and directories; raise ValueError if several ranks cannot all read one of them."""
    files = [file for path in paths for file in _list_files(path)]
    for path in files if is_distributed else ():
        if path == "-" or not Path(path).is_file():
            raise ValueError(f"{_display_name(path)}: not a file, which several ranks could read; use one process")
    return [_Text(path, 0 if path == "-" else Path(path).stat().st_size) for path in files]


def _list_files(path: str) -> list[str]:
    """Return a file itself, or the files in a directory; raise ValueError if one of those cannot be text."""
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
    _check_files(files, check_unpacked)
    return files


def _check_files(files: list[str], check: Callable[[Document, bytes], None]) -> str:
    """Check files, and raise one error that names every file with a problem; return an empty message otherwise."""
    problems = []
    for path in files:
        try:
            check(Document(path, Path(path)), b"")
        except ValueError as error:  # noqa: PERF203
            problems.append(f"{path}: {error}")
    if problems:
        raise ValueError("; ".join(shorten_list(problems)))
    return ""


def _print_table(rows: list[tuple[str, _FileScore]]) -> None:
    """Print one line per text, with its name at the end."""
    table = [("tokens", "bits per byte", "perplexity", ""), *((*score.cells(), name) for name, score in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for row in table:
        print("  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip())


def _score_file(
    name: str,
    file: Any,
    model: MambaLM,
    tokenizer: Tokenizer,
    special: bool,
    progress: Progress,
    done: int,
    cp_group: ContextParallelGroup | None = None,
) -> _FileScore:
    """Score a file, before which `done` bytes of others were scored.

    If the ranks of `cp_group` share the text, the likelihood is that of this rank's part.
    """
    size = 0
    first_bytes = 0  # of the first token, which is not predicted
    is_begin = True
    # A special token before the text is then the one that is not predicted, and has no bytes.
    has_special = special and bool(tokenizer.encode("", add_special_tokens=True))

    def encode_blocks() -> Iterator[list[int]]:
        nonlocal first_bytes, size, is_begin
        for text in _read_blocks(name, file, tokenizer):
            ids = tokenizer.encode(text, add_special_tokens=is_begin and special)
            if is_begin and ids and not has_special:
                # A part of a character decodes to a replacement, which has other bytes than the text.
                first_bytes = max(1, len(tokenizer.decode(ids[:1]).partition("\ufffd")[0].encode()))
            size += len(text.encode("utf-8", errors="surrogateescape"))
            is_begin = is_begin and not ids
            yield ids

    score = TextScore(0.0, 0, 0)
    for score in score_text(model, encode_blocks(), cp_group=cp_group):
        progress.at(done + size, f"{_bits(score.nats, max(1, size)):.3f} bits per byte")
    counted = max(1, size - first_bytes) if score.predicted else 0
    return _FileScore(score.read, score.predicted, size, counted, score.nats)


def _perplexity(score: _FileScore) -> float:
    return math.exp(min(700.0, score.nats / score.predicted))


def _bits(nats: float, count: int) -> float:
    return nats / math.log(2) / count


def _read_blocks(name: str, file: Any, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text in blocks that end after a newline if there is one, so that tokens are rarely cut."""
    rest = b""
    while block := file.read(_BLOCK):
        block = rest + block
        cut = block.rfind(b"\n") + 1
        if cut == 0 and len(block) < 8 * _BLOCK:
            rest = block
            continue
        cut = cut or _find_character_end(block)
        rest = block[cut:]
        yield decode_text(name, block[:cut], tokenizer)
    if rest:
        yield decode_text(name, rest, tokenizer)


def _find_character_end(block: bytes) -> int:
    """Return the last offset in the block that cuts no UTF-8 character."""
    for back in range(1, 5):
        if block[-back] & 0b1100_0000 != 0b1000_0000:
            return len(block) - back
    return len(block)
