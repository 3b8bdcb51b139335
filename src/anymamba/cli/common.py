"""What several commands share: loading a model, reading text, and a progress bar."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from anymamba.checkpoints.load import load_model
from anymamba.checkpoints.open import resolve_source
from anymamba.cli import options
from anymamba.core.dtypes import parse_device
from anymamba.generation.chat import ChatTemplate
from anymamba.generation.detect_activation import detect_activation
from anymamba.generation.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer
from anymamba.models.lm import MambaLM
from anymamba.models.mamba3_activation import warn_if_ambiguous

DTYPES = {name: getattr(torch, name) for name in options.DTYPES}


def load(args: argparse.Namespace) -> tuple[MambaLM, Tokenizer]:
    """The model and tokenizer that the arguments name."""
    set_threads(args)
    directory, device = resolve_source(args.model), parse_device(args.device, "--device")
    options = {"weights": args.weights, "ssm_cfg": dict(args.block)}
    model = load_model(directory, dtype=DTYPES.get(args.dtype), device=device, **options)
    tokenizer = load_tokenizer(args.tokenizer, directory, model.config.padded_vocab_size)
    report_activation(model, tokenizer)
    return model, tokenizer


def set_threads(args: argparse.Namespace) -> None:
    """Compute with --threads.

    Raises:
        ValueError: there are none.
    """
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {args.threads}")
        torch.set_num_threads(args.threads)


def report_activation(model: MambaLM, tokenizer: Tokenizer | None) -> None:
    """Let a text decide what a Mamba-3 config leaves open, and report it; without a tokenizer, warn."""
    if tokenizer is None:
        warn_if_ambiguous("no tokenizer to decide with", model.config, "--block a_activation=softplus")
    elif (found := detect_activation(model, tokenizer)) is not None:
        print(f"anymamba: {'' if found.taken else 'warning: '}{found}", file=sys.stderr)


def chat_template(args: argparse.Namespace, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that the arguments of `generate` ask for, or that --interactive finds; None for plain text.

    Raises:
        ValueError: they contradict each other.
    """
    if args.chat and args.load_state:
        raise ValueError("--chat starts a conversation and cannot continue from --load-state")
    wanted = args.chat if args.chat is not None else None if args.interactive and not args.load_state else False
    template = None
    if wanted is not False:
        where = tokenizer.path if isinstance(tokenizer, FileTokenizer) else resolve_source(args.model)
        template = ChatTemplate.from_directory(where)
    if template is None or (template.is_plain and not wanted):
        if args.system is not None:
            raise ValueError("--system starts a conversation, so it needs --chat")
        return None
    return template


def system_message(args: argparse.Namespace) -> list[dict[str, str]]:
    """The text of --system, as a message."""
    return [] if args.system is None else [{"role": "system", "content": args.system}]


def name_end(model: MambaLM, source: Path) -> None:
    """Name the token that ends a text in transformers' config; our configs leave it to the tokenizer's files."""
    theirs = model.config.extra.get("transformers", {})
    with suppress(ValueError):  # there is no tokenizer, or nothing to read it with
        ends = FileTokenizer(source / "tokenizer.json").end
        if ends and theirs.get("eos_token_id") is None:
            theirs = {**theirs, "eos_token_id": ends[0] if len(ends) == 1 else ends}
            model.config = dataclasses.replace(model.config, extra={**model.config.extra, "transformers": theirs})


def decode_text(where: str, content: bytes, tokenizer: Tokenizer) -> str:
    """The text of bytes from outside; any bytes will do for the byte tokenizer, others need UTF-8."""
    if isinstance(tokenizer, ByteTokenizer):
        return content.decode("utf-8", errors="surrogateescape")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_file(path: str) -> bytes:
    """The bytes of a file."""
    with open_file(path) as file:
        content: bytes = file.read()
    return content


def open_file(path: str) -> Any:
    """A file, a pipe or a device, open for reading.

    Raises:
        ValueError: it is a directory, or does not exist.
    """
    file = Path(path)
    if file.is_dir() or not file.exists():
        raise ValueError(f"{path}: {'expected a file, got a directory' if file.is_dir() else 'no such file'}")
    return file.open("rb")


def stdin_bytes(instead: str = "pass --prompt or --file") -> Any:
    """The standard input; `instead` says what to do if it is closed.

    Raises:
        ValueError: it is closed.
    """
    if sys.stdin is None:
        raise ValueError(f"stdin is closed: {instead}")
    return sys.stdin.buffer


class Progress:
    """A bar on stderr, if that is a terminal."""

    def __init__(self, total: int) -> None:
        """Start at 0 of `total`; a total of 0 is unknown and shows no bar."""
        self._total, self._shown = max(1, total), -1
        self._visible = sys.stderr.isatty() and total > 0

    def at(self, done: int, note: str = "") -> None:
        """Show how much is done."""
        percent = min(100, 100 * done // self._total)
        if self._visible and percent != self._shown:
            self._shown = percent
            bar = "#" * (percent * 30 // 100)
            print(f"\r[{bar:<30}] {percent:3d} % {note}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line."""
        if self._visible and self._shown >= 0:
            print(file=sys.stderr)


def readable_bytes(size: int) -> str:
    """A size with three digits or more: 987 B, 12.3 MiB."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
