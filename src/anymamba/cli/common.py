"""Parts of several commands: loading a model, reading text, checking options, and a progress bar."""

from __future__ import annotations

import argparse
import dataclasses
import io
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal, cast

import torch

from anymamba.checkpoints.load import load_model
from anymamba.checkpoints.open import resolve_source
from anymamba.cli import options
from anymamba.cli.options import check_at_least
from anymamba.core.dtypes import parse_device
from anymamba.core.threads import configure_threads
from anymamba.generation.chat import ChatTemplate
from anymamba.generation.detect_activation import detect_activation
from anymamba.generation.speculation import parse_speculation
from anymamba.generation.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer
from anymamba.models.config import warn_if_ambiguous
from anymamba.models.lm import MambaLM

DTYPES = {name: getattr(torch, name) for name in options.DTYPES}


def load(args: argparse.Namespace) -> tuple[MambaLM, Tokenizer]:
    """Load the model and tokenizer that the arguments name."""
    set_threads(args)
    directory = resolve_source(args.model)
    device = parse_device(args.device, "--device")
    dtype = DTYPES.get(args.dtype)
    model = load_model(directory, dtype=dtype, device=device, weights=args.weights, ssm_cfg=dict(args.block))
    tokenizer = load_tokenizer(args.tokenizer, directory, model.config.padded_vocab_size)
    report_activation(model, tokenizer)
    return model, tokenizer


def load_draft(args: argparse.Namespace, model: MambaLM) -> Literal["lookup"] | MambaLM | None:
    """Return where --speculate takes drafts from; None for nowhere."""
    if args.speculate in ("off", "lookup"):
        return "lookup" if args.speculate == "lookup" else None
    dtype = DTYPES.get(args.dtype)
    draft = load_model(resolve_source(args.speculate), dtype=dtype, device=model.device, weights=args.weights)
    try:
        parse_speculation(draft, model)
    except ValueError as error:
        raise ValueError(f"--speculate {args.speculate}: {error}") from error
    return draft


def set_threads(args: argparse.Namespace) -> None:
    """Set the number of CPU threads to --threads, or to at most the cores that the process may use."""
    if args.threads is None:
        configure_threads()
    else:
        check_at_least(args, 1, "threads")
        torch.set_num_threads(args.threads)


def report_activation(model: MambaLM, tokenizer: Tokenizer | None) -> None:
    """Detect the activation that a Mamba-3 config does not name, and report it; without a tokenizer, warn."""
    if tokenizer is None:
        warn_if_ambiguous("no tokenizer to decide with", model.config, "--block a_activation=softplus")
    elif (detection := detect_activation(model, tokenizer)) is not None:
        print(f"anymamba: {'' if detection.activation else 'warning: '}{detection}", file=sys.stderr)


def load_chat_template(args: argparse.Namespace, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template that the arguments of `generate` ask for; None for plain text."""
    if args.chat and args.load_state:
        raise ValueError("--chat starts a conversation and cannot continue from --load-state")
    is_optional = args.chat is None and args.interactive and not args.load_state
    template = None
    if args.chat or is_optional:
        source = tokenizer.path if isinstance(tokenizer, FileTokenizer) else resolve_source(args.model)
        template = ChatTemplate.from_directory(source)
    if template is None or (template.is_plain and is_optional):
        if args.system is not None:
            raise ValueError("--system starts a conversation, so it needs --chat")
        return None
    return template


def read_system_message(args: argparse.Namespace) -> list[dict[str, str]]:
    """Return the text of --system as a list of messages."""
    return [] if args.system is None else [{"role": "system", "content": args.system}]


def add_eos_token_id(model: MambaLM, source: Path) -> None:
    """Name the token that ends a text in transformers' config; other formats leave it to the tokenizer's files."""
    theirs = model.config.extra.get("transformers", {})
    with suppress(ValueError):  # there is no tokenizer, or nothing to read it with
        ends = FileTokenizer(source / "tokenizer.json").end
        if ends and theirs.get("eos_token_id") is None:
            theirs = {**theirs, "eos_token_id": ends[0] if len(ends) == 1 else ends}
            model.config = dataclasses.replace(model.config, extra={**model.config.extra, "transformers": theirs})


def decode_text(where: str, content: bytes, tokenizer: Tokenizer) -> str:
    """Decode text from outside: UTF-8, or any bytes for the byte tokenizer; errors say `where` it comes from."""
    if isinstance(tokenizer, ByteTokenizer):
        return content.decode("utf-8", errors="surrogateescape")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_text(args: argparse.Namespace, tokenizer: Tokenizer, *, strips_newline: bool = False) -> str:
    """Return the text of --prompt, of --file or of stdin; `strips_newline` drops the newline that ends stdin."""
    if args.prompt is not None:
        return decode_text("--prompt", args.prompt.encode("utf-8", errors="surrogateescape"), tokenizer)
    if args.file is not None:
        return decode_text(args.file, read_file(args.file), tokenizer)
    content = stdin_bytes().read()
    return decode_text("stdin", strip_newline(content) if strips_newline else content, tokenizer)


def strip_newline(text: bytes) -> bytes:
    """Return the text without the newline with which terminals and `echo` end it."""
    return text.removesuffix(b"\n").removesuffix(b"\r") if text.endswith(b"\n") else text


def read_file(path: str) -> bytes:
    """Return the bytes of a file."""
    with open_file(path) as file:
        return file.read()


def open_file(path: str) -> io.BufferedIOBase:
    """Open a file, a pipe or a device for reading."""
    file = Path(path)
    if file.is_dir() or not file.exists():
        raise ValueError(f"{path}: {'expected a file, got a directory' if file.is_dir() else 'no such file'}")
    return file.open("rb")


def stdin_bytes(instead: str = "pass --prompt or --file") -> io.BufferedIOBase:
    """Return the standard input; the error if it is closed says what the user can do `instead`."""
    if sys.stdin is None:
        raise ValueError(f"stdin is closed: {instead}")
    return cast(io.BufferedIOBase, sys.stdin.buffer)


class Progress:
    """Progress bar on stderr, if that is a terminal."""

    def __init__(self, total: int) -> None:
        """Start at 0 of `total`; a total of 0 is unknown and shows no bar."""
        self._total = max(1, total)
        self._shown_percent = -1
        self._visible = sys.stderr.isatty() and total > 0

    def at(self, done: int, note: str = "") -> None:
        """Show how much is done."""
        percent = min(100, 100 * done // self._total)
        if self._visible and percent != self._shown_percent:
            self._shown_percent = percent
            bar = "#" * (percent * 30 // 100)
            print(f"\r[{bar:<30}] {percent:3d} % {note}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line."""
        if self._visible and self._shown_percent >= 0:
            print(file=sys.stderr)


def format_bytes(size: int) -> str:
    """Format a size with three digits or more: 987 B, 12.3 MiB."""
    value = float(size)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units = units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
