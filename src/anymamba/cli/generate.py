"""`anymamba generate`: a prompt in, text out as it is made; or a file of prompts in, JSON lines out.

§ One text of `anymamba generate`: it grows turn by turn, as plain text or as a conversation.

§ `anymamba generate --prompts`: a file of prompts in, a line of JSON out for each.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import torch

from anymamba.cli.common import Progress, chat_template, decode_text, load, read_file, stdin_bytes, system_message
from anymamba.core.process import catch_signals
from anymamba.generation import GenerationState, TokenStream, stream
from anymamba.generation.chat import ChatTemplate
from anymamba.generation.completion import Completion, CompletionBuilder
from anymamba.generation.pipeline import Pipeline, check_texts
from anymamba.generation.tokenizers import Tokenizer, select_end_tokens
from anymamba.models.lm import MambaLM


class Session:
    """A text that grows turn by turn: a prompt is read, a continuation printed.

    Attributes:
        state: after the last turn, if it is needed.
        interrupted: Ctrl-C ended the last turn.
        whole: no turn was cut off within a token.
    """

    HELP: ClassVar[str] = (
        "A line continues the text, an empty line lets the model continue alone. Ctrl-C ends a reply, Ctrl-D exits."
    )

    def __init__(
        self, args: argparse.Namespace, model: MambaLM, tokenizer: Tokenizer, state: GenerationState | None = None
    ) -> None:
        """Begin, or continue from a state."""
        self.args, self.model, self.tokenizer, self.state = args, model, tokenizer, state
        self.ends = [] if args.ignore_end else select_end_tokens(tokenizer, model.config.vocab_size)
        self.stops: list[str] = args.stop
        self.read = self.written = 0
        self.reading = self.writing = 0.0
        self.interrupted, self.whole = False, True

    def turn(self, prompt: str) -> None:
        """Read the prompt and print the continuation; an interrupt ends the turn after a whole token."""
        first = self.state is None
        ids = self.tokenizer.encode(prompt, add_special_tokens=first and self.args.special_tokens)
        if not ids and first:
            if self.args.interactive:
                return
            raise ValueError("the prompt is empty: pass --prompt, --file, or a text on stdin")
        self._continue(ids)

    def _continue(self, ids: list[int]) -> tuple[list[int], str]:
        """Read tokens after the state and print the continuation; it is returned as tokens and as text."""
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
        with catch_signals(*(() if own else (signal.SIGINT,))) as interrupted:
            try:
                written = self._print(tokens, interrupted)
            except OSError:  # the reader of our output has gone, but the state is whole
                self._keep(tokens)
                raise
            else:
                self._keep(tokens)
                self.whole = True
            finally:
                self.writing += perf_counter() - began
                print(flush=True)
            self.interrupted = interrupted()
        return written

    def _keep(self, tokens: TokenStream) -> None:
        if self.args.interactive or self.args.save_state:
            self.state = tokens.state

    def _print(self, tokens: TokenStream, interrupted: Callable[[], bool]) -> tuple[list[int], str]:
        builder = CompletionBuilder(self.tokenizer, end_tokens=self.ends, stop_texts=self.stops)
        for (token,) in tokens:
            assert token is not None
            self.written += 1
            print(builder.add(token), end="", flush=True)
            if builder.reason is not None or interrupted():
                break
        print(builder.finish(), end="", flush=True)
        return builder.tokens, builder.text

    def report(self) -> None:
        """Tokens per second, to stderr."""
        print(
            f"read {self.read} tokens at {self.read / max(self.reading, 1e-9):.1f}/s, "
            f"wrote {self.written} at {self.written / max(self.writing, 1e-9):.1f} tokens/s",
            file=sys.stderr,
        )


class Conversation(Session):
    """Messages in a chat template.

    The model always reads the tokens of the whole conversation as the template writes it. If they begin with everything
    that the state has seen, only the rest is read. If not, because a template rewrites old messages or a reply is
    tokenized differently, all of them are read again.
    """

    HELP: ClassVar[str] = "A line is a message to the model. Ctrl-C ends a reply, Ctrl-D exits."

    def __init__(self, args: argparse.Namespace, model: MambaLM, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Begin with the system's message, if there is one."""
        super().__init__(args, model, tokenizer)
        self.template, self.stops = template, [*args.stop, *template.stop]
        self.messages: list[dict[str, Any]] = system_message(args)
        self._seen: list[int] = []  # the tokens that the state has read

    def turn(self, prompt: str) -> None:
        """Answer a message."""
        if not prompt.strip():
            if self.args.interactive:
                return
            raise ValueError("the message is empty: pass --prompt, --file, or a text on stdin")
        self.messages.append({"role": "user", "content": prompt})
        ids = self.tokenizer.encode(self.template.render(self.messages))
        known = len(self._seen)
        if self.state is None or len(ids) <= known or ids[:known] != self._seen:
            self.state, known = None, 0
        new, text = self._continue(ids[known:])
        self._seen = [*ids, *new]
        self.messages.append({"role": "assistant", "content": text.strip()})


_LINES = (".jsonl", ".ndjson")


def answer_file(args: argparse.Namespace) -> None:
    """Continue all prompts of a file, in batches; a prompt's line is printed when its batch is done, in order."""
    for name in ("load_state", "save_state"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} belongs to one text, and cannot be used with --prompts")
    if sys.stdout is None:
        raise ValueError("stdout is closed: there is nowhere to write to")
    content = stdin_bytes("pass a file").read() if args.prompts == "-" else read_file(args.prompts)
    model, tokenizer = load(args)
    entries = _entries("stdin" if args.prompts == "-" else args.prompts, content, tokenizer)
    # A lone surrogate, from bytes that are not text, stays what it is in JSON.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    prompts, template = [entry["prompt"] for entry in entries], chat_template(args, tokenizer)
    if template is not None:
        prompts = [template.render([*system_message(args), {"role": "user", "content": text}]) for text in prompts]
    printed = _Answers(entries)
    try:
        for batch in Pipeline(model, tokenizer).batches(
            prompts,
            args.max_new_tokens,
            n=args.samples,
            stop=[*args.stop, *(template.stop if template else ())],
            logprobs=args.logprobs,
            ignore_end=args.ignore_end,
            add_special_tokens=args.special_tokens and template is None,
            batch_size=args.batch_size,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            seed=args.seed,
        ):
            printed.add(batch)
    except KeyboardInterrupt:
        printed.report()
        raise
    printed.report()


class _Answers:
    """Prints completions in the order of the prompts."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self._entries, self._waiting, self._printed = entries, dict[int, list[Completion]](), 0
        self._progress, self._began, self._tokens = Progress(len(entries)), perf_counter(), 0

    def add(self, batch: list[tuple[int, list[Completion]]]) -> None:
        """Print the completions whose turn it is: a prompt waits for those before it."""
        self._waiting.update(batch)
        self._tokens += sum(len(completion.tokens) for _, found in batch for completion in found)
        while self._printed in self._waiting:
            for completion in self._waiting.pop(self._printed):
                values = {**self._entries[self._printed], **_described(completion)}
                print(json.dumps(values, ensure_ascii=False), flush=True)
            self._printed += 1
        self._progress.at(self._printed)

    def report(self) -> None:
        """Print how many prompts were done, and how fast, to stderr."""
        self._progress.close()
        speed = self._tokens / max(perf_counter() - self._began, 1e-9)
        print(f"{self._printed} of {len(self._entries)} prompts, {speed:.1f} new tokens/s", file=sys.stderr)


def _entries(where: str, content: bytes, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The prompts of a file: its lines that are not empty, or the objects of JSON lines.

    Raises:
        ValueError: lines that are not prompts; all of them are named.
    """
    lines = [line.removesuffix(b"\r") for line in content.split(b"\n")]
    is_json = where.endswith(_LINES) or (where == "stdin" and content.lstrip()[:1] == b"{")
    entries, problems = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entries.append(_entry(line) if is_json else {"prompt": decode_text(f"line {number}", line, tokenizer)})
        except ValueError as error:
            problems.append(f"line {number}: {error}" if is_json else str(error))
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems[:20])}" + ("; and more" if len(problems) > 20 else ""))
    if not entries:
        raise ValueError(f"{where}: expected one prompt per line, found none")
    return entries


def _entry(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not readable JSON ({error})") from error
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'expected an object with a text "prompt", got {str(value)[:60]}')
    return dict(value)


def _described(completion: Completion) -> dict[str, Any]:
    """A completion as JSON."""
    values = completion._asdict()
    for name in ("choices", "alternatives"):
        if values[name] is None:
            del values[name]
    if "choices" in values:
        values["choices"] = [choice._asdict() for choice in values["choices"]]
    if "alternatives" in values:
        values["alternatives"] = [[choice._asdict() for choice in found] for found in values["alternatives"]]
    return values


def run(args: argparse.Namespace) -> None:
    """Load, generate, print; at the end save the state if asked to."""
    check_texts("--stop", args.stop)
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
