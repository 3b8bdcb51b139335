"""`anymamba generate`: a prompt in, text out as it is made; or a file of prompts in, JSON lines out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from anymamba.cli.answers import answer_file
from anymamba.cli.common import chat_template, decode_text, load, read_file, stdin_bytes
from anymamba.cli.sessions import Conversation, Session
from anymamba.generation import GenerationState
from anymamba.generation.text import expect_texts
from anymamba.generation.tokenizers import Tokenizer


def run(args: argparse.Namespace) -> None:
    """Load, generate, print; at the end save the state if asked to."""
    expect_texts("--stop", args.stop)
    if args.prompts is not None:
        answer_file(args)
        return
    if args.save_state and not Path(args.save_state).absolute().parent.is_dir():
        raise ValueError(f"--save-state {args.save_state}: there is no such directory")
    if sys.stdout is None:
        raise ValueError("stdout is closed: there is nowhere to write to")
    model, tokenizer = load(args)
    template = chat_template(args, tokenizer)
    state = GenerationState.load(args.load_state, model) if args.load_state else None
    if state is not None and state.batch_size != 1:
        raise ValueError(f"{args.load_state}: expected the state of one sequence, got {state.batch_size}")
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    if template is None:
        session = Session(args, model, tokenizer, state)
    else:
        session = Conversation(args, model, tokenizer, template)
    try:
        for prompt in _prompts(args, tokenizer, session.HELP):
            session.turn(prompt)
            if session.interrupted and not args.interactive:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        if session.whole:
            session.report()
        raise
    finally:
        if args.save_state and session.state is not None:
            session.state.save(args.save_state, model)
    session.report()


def _prompts(args: argparse.Namespace, tokenizer: Tokenizer, help: str) -> Iterator[str]:
    if args.interactive:
        is_terminal = stdin_bytes().isatty()
        if is_terminal:
            print(help, file=sys.stderr)
        while True:
            if is_terminal:
                print("> ", end="", file=sys.stderr, flush=True)
            line = stdin_bytes().readline()
            if not line:
                return
            yield decode_text("stdin", _without_newline(line), tokenizer)
    elif args.prompt is not None:
        yield decode_text("--prompt", args.prompt.encode("utf-8", errors="surrogateescape"), tokenizer)
    elif args.file is not None:
        yield decode_text(args.file, read_file(args.file), tokenizer)
    elif args.load_state and stdin_bytes().isatty():
        yield ""
    else:
        yield decode_text("stdin", _without_newline(stdin_bytes().read()), tokenizer)


def _without_newline(text: bytes) -> bytes:
    """The text as it was meant: terminals and `echo` end it with a newline."""
    return text.removesuffix(b"\n").removesuffix(b"\r") if text.endswith(b"\n") else text
