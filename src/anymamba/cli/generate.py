"""`anymamba generate`: a prompt in, text out as it is made; or a file of prompts in, JSON lines out."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import torch

from anymamba.cli.answers import answer_file
from anymamba.cli.common import decode_text, load, read_file, stdin_bytes
from anymamba.generation import GenerationState, TokenStream, stream
from anymamba.generation.text import UntilStop, expect_texts
from anymamba.generation.tokenizers import TextStream, Tokenizer
from anymamba.ground.interrupts import interrupts
from anymamba.models.lm import MambaLM

_HELP = "A line continues the text, an empty line lets the model continue alone. Ctrl-C ends a reply, Ctrl-D leaves."


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
    state = GenerationState.load(args.load_state, model) if args.load_state else None
    if state is not None and state.batch_size != 1:
        raise ValueError(f"{args.load_state}: expected the state of one sequence, got {state.batch_size}")
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    session = _Session(args, model, tokenizer, state)
    try:
        for prompt in _prompts(args, tokenizer):
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


def _prompts(args: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[str]:
    if args.interactive:
        is_terminal = stdin_bytes().isatty()
        if is_terminal:
            print(_HELP, file=sys.stderr)
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


class _Session:
    """A sequence that grows by turns: a prompt is read, a continuation printed.

    Attributes:
        state: after the last turn, if it is needed.
        interrupted: Ctrl-C ended the last turn.
        whole: no turn ended within a token.
    """

    def __init__(
        self, args: argparse.Namespace, model: MambaLM, tokenizer: Tokenizer, state: GenerationState | None
    ) -> None:
        self.args, self.model, self.tokenizer, self.state = args, model, tokenizer, state
        self.ends = [] if args.ignore_end else [i for i in tokenizer.end if i < model.config.vocab_size]
        self.read = self.written = 0
        self.reading = self.writing = 0.0
        self.interrupted, self.whole = False, True

    def turn(self, prompt: str) -> None:
        """Read the prompt and print the continuation; an interrupt ends the turn after a whole token."""
        ids = self.tokenizer.encode(prompt)
        if not ids and self.state is None:
            if self.args.interactive:
                return
            raise ValueError("the prompt is empty: pass --prompt, --file, or a text on stdin")
        began, self.whole = perf_counter(), False
        tokens = stream(
            self.model,
            torch.tensor([ids]) if ids else None,
            self.args.max_new_tokens,
            temperature=self.args.temperature,
            top_k=self.args.top_k,
            top_p=self.args.top_p,
            min_p=self.args.min_p,
            repetition_penalty=self.args.repetition_penalty,
            seed=self.args.seed,
            stop=self.ends,
            cache=self.state,
        )
        self.read += len(ids)
        self.reading += perf_counter() - began
        began = perf_counter()
        # A process that handles or ignores Ctrl-C in its own way is left alone.
        own = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        with interrupts(*(() if own else (signal.SIGINT,))) as interrupted:
            try:
                self._print(tokens, interrupted)
            except OSError:  # the reader of our output has closed it, but the state is complete
                self._keep(tokens)
                raise
            else:
                self._keep(tokens)
                self.whole = True
            finally:
                self.writing += perf_counter() - began
                print(flush=True)
            self.interrupted = interrupted()

    def _keep(self, tokens: TokenStream) -> None:
        if self.args.interactive or self.args.save_state:
            self.state = tokens.state

    def _print(self, tokens: TokenStream, interrupted: Callable[[], bool]) -> None:
        text, output = TextStream(self.tokenizer), UntilStop(self.args.stop)
        for (token,) in tokens:
            assert token is not None
            self.written += 1
            if token not in self.ends:
                print(output.push(text.push(token)), end="", flush=True)
            if output.stopped:
                return
            if interrupted():
                break
        print(output.push(text.finish()) + output.rest(), end="", flush=True)

    def report(self) -> None:
        """Tokens per second, to stderr."""
        print(
            f"read {self.read} tokens at {self.read / max(self.reading, 1e-9):.1f}/s, "
            f"wrote {self.written} at {self.written / max(self.writing, 1e-9):.1f} tokens/s",
            file=sys.stderr,
        )
