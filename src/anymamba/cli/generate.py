"""`anymamba generate`: a prompt in, text out as it is written; or a file of prompts in, JSON lines out.

One text is a `GrowingText`, or a `Conversation` in a chat template: it grows turn by turn. A file of prompts goes
through `Pipeline.batches`, one line of JSON per completion.
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

from anymamba.cli.common import (
    Progress,
    decode_text,
    load,
    load_chat_template,
    load_draft,
    read_file,
    read_system_message,
    read_text,
    stdin_bytes,
    strip_newline,
)
from anymamba.cli.options import check_at_least
from anymamba.core.process import catch_signals
from anymamba.core.registry import describe_device
from anymamba.generation import (
    ChatTemplate,
    Completion,
    GenerationState,
    Pipeline,
    Sampling,
    Tokenizer,
    TokenStream,
    stream,
)
from anymamba.generation.completion import CompletionBuilder
from anymamba.generation.grammar import compile_grammar, read_grammar
from anymamba.generation.pipeline import check_texts
from anymamba.generation.tokenizers import select_end_tokens
from anymamba.models.lm import MambaLM

_JSON_SUFFIXES = (".jsonl", ".ndjson")


def run(args: argparse.Namespace) -> None:
    """Load the model, generate, print; at the end save the state if requested."""
    # 1) Check the arguments before the model is loaded.
    _check_options(args)
    if args.prompts is not None:
        _complete_file(args)
        return
    if args.save_state and not Path(args.save_state).absolute().parent.is_dir():
        raise ValueError(f"--save-state {args.save_state}: there is no such directory")
    # 2) Load the model, and the state from which to continue.
    grammar_options = _read_grammar_options(args)
    model, tokenizer = load(args)
    grammar = read_grammar(**grammar_options)
    args.compiled_grammar = None if grammar is None else compile_grammar(grammar, tokenizer)
    template = load_chat_template(args, tokenizer)
    state = GenerationState.load(args.load_state, model) if args.load_state else None
    if state is not None and state.batch_size != 1:
        raise ValueError(f"{args.load_state}: expected the state of one sequence, got {state.batch_size}")
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    if template is None:
        text = GrowingText(args, model, tokenizer, state)
    else:
        text = Conversation(args, model, tokenizer, template)
    # 3) One turn per prompt. Ctrl-C ends a turn after a whole token; without further turns, it ends the command.
    try:
        for prompt in _read_prompts(args, tokenizer, text.HELP):
            text.take_turn(prompt)
            if text.was_interrupted and not args.interactive:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        if text.is_intact:
            text.report()
        raise
    finally:
        if args.save_state and text.state is not None:
            text.state.save(args.save_state, model)
    text.report()


def _check_options(args: argparse.Namespace) -> None:
    if sys.stdout is None:
        raise ValueError("stdout is closed: there is nowhere to write to")
    check_texts("--stop", args.stop)
    check_at_least(args, 0, "max_new_tokens", "logprobs")
    check_at_least(args, 1, "samples", "batch_size")
    if args.prompts is None and (args.samples > 1 or args.logprobs is not None):
        raise ValueError(f"--{'samples' if args.samples > 1 else 'logprobs'} can only be used with --prompts")
    try:
        Sampling(**_sampling_options(args))
    except ValueError as error:
        name, _, problem = str(error).partition(" ")
        raise ValueError(f"--{name.replace('_', '-')} {problem}") from error


def _sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return {name: getattr(args, name) for name in names}


def _read_grammar_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `read_grammar`."""
    files = {"schema": args.schema, "grammar": args.grammar}
    texts = {name: read_file(file).decode() for name, file in files.items() if file is not None}
    return {**texts, "regex": args.regex, "choices": args.choice or None}


class GrowingText:
    """A text that grows turn by turn: a prompt is read, a continuation printed."""

    HELP: ClassVar[str] = (
        "A line continues the text, an empty line lets the model continue alone. Ctrl-C ends a reply, Ctrl-D exits."
    )

    def __init__(
        self, args: argparse.Namespace, model: MambaLM, tokenizer: Tokenizer, state: GenerationState | None = None
    ) -> None:
        """Begin a text, or continue one from a state."""
        self.args = args
        self.model = model
        self.tokenizer = tokenizer
        self.state = state  # after the last turn, if it will be needed
        self.was_interrupted = False  # the last turn was ended by Ctrl-C
        self.is_intact = True  # no turn was cut off within a token
        self._draft = load_draft(args, model)
        self._history: list[int] = []  # the tokens of this text so far
        self._end_tokens = [] if args.ignore_end else select_end_tokens(tokenizer, model.config.vocab_size)
        self._stop_texts: list[str] = args.stop
        self._tokens_read = 0
        self._tokens_written = 0
        self._seconds_reading = 0.0
        self._seconds_writing = 0.0
        self._tokens_drafted = 0
        self._tokens_accepted = 0

    def take_turn(self, prompt: str) -> None:
        """Read the prompt and print the continuation; an interrupt ends the turn after a whole token."""
        is_first = self.state is None
        ids = self.tokenizer.encode(prompt, add_special_tokens=is_first and self.args.special_tokens)
        if not ids and is_first:
            if self.args.interactive:
                return
            raise ValueError("the prompt is empty: pass --prompt, --file, or a text on stdin")
        self._continue_with(ids)

    def _continue_with(self, ids: list[int]) -> CompletionBuilder:
        """Read tokens after the state, and print the continuation."""
        # 1) Read the prompt.
        start_time = perf_counter()
        self.is_intact = False
        if self.state is None:
            self._history = []
        tokens = stream(
            self.model,
            torch.tensor([ids]) if ids else None,
            self.args.max_new_tokens,
            stop=self._end_tokens,
            cache=self.state,
            exact=self.args.exact,
            speculate=self._draft,
            history=[self._history],
            grammar=self.args.compiled_grammar,
            **_sampling_options(self.args),
        )
        self._tokens_read += len(ids)
        self._history += ids
        self._seconds_reading += perf_counter() - start_time
        # 2) Write. A process that handles or ignores Ctrl-C in its own way keeps doing so.
        start_time = perf_counter()
        builder = CompletionBuilder(self.tokenizer, end_tokens=self._end_tokens, stop_texts=self._stop_texts)
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with catch_signals(*((signal.SIGINT,) if is_default else ())) as was_interrupted:
            try:
                self._print(tokens, builder, was_interrupted)
            except OSError:  # nobody reads our output any more, but the state is intact
                self._keep_state(tokens)
                raise
            else:
                self._keep_state(tokens)
                self.is_intact = True
            finally:
                self._seconds_writing += perf_counter() - start_time
                self._tokens_drafted += tokens.drafted
                self._tokens_accepted += tokens.accepted
                self._history += builder.tokens
                print(flush=True)
            self.was_interrupted = was_interrupted()
        return builder

    def _print(self, tokens: TokenStream, builder: CompletionBuilder, was_interrupted: Callable[[], bool]) -> None:
        for (token,) in tokens:
            assert token is not None
            self._tokens_written += 1
            print(builder.add(token, is_last=tokens.has_complete_grammar(0)), end="", flush=True)
            if builder.reason is not None or was_interrupted():
                break
        print(builder.finish(), end="", flush=True)

    def _keep_state(self, tokens: TokenStream) -> None:
        if self.args.interactive or self.args.save_state:
            self.state = tokens.state

    def report(self) -> None:
        """Print tokens per second to stderr."""
        read_speed = self._tokens_read / max(self._seconds_reading, 1e-9)
        write_speed = self._tokens_written / max(self._seconds_writing, 1e-9)
        drafted = f" ({self._tokens_accepted} of {self._tokens_drafted} drafted ones accepted)" if self._draft else ""
        print(
            f"read {self._tokens_read} tokens ({read_speed:.1f}/s), wrote {self._tokens_written} tokens "
            f"({write_speed:.1f}/s){drafted}, on {describe_device(self.model.device)}",
            file=sys.stderr,
        )


class Conversation(GrowingText):
    """Messages in a chat template.

    The model always reads the tokens of the whole conversation as the template writes it. If they begin with everything
    that the state has read, only the rest is read. Otherwise, because a template rewrites old messages or a reply is
    tokenized differently, all of them are read again.
    """

    HELP: ClassVar[str] = "A line is a message to the model. Ctrl-C ends a reply, Ctrl-D exits."

    def __init__(self, args: argparse.Namespace, model: MambaLM, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Begin with the system's message, if there is one."""
        super().__init__(args, model, tokenizer)
        self.template = template
        self.messages: list[dict[str, Any]] = read_system_message(args)
        self._stop_texts = [*args.stop, *template.stop]
        self._read_ids: list[int] = []  # the tokens that the state has read

    def take_turn(self, prompt: str) -> None:
        """Answer a message."""
        if not prompt.strip():
            if self.args.interactive:
                return
            raise ValueError("the message is empty: pass --prompt, --file, or a text on stdin")
        self.messages.append({"role": "user", "content": prompt})
        ids = self.tokenizer.encode(self.template.render(self.messages))
        known = len(self._read_ids)
        if self.state is None or len(ids) <= known or ids[:known] != self._read_ids:
            self.state = None
            known = 0
        reply = self._continue_with(ids[known:])
        self._read_ids = [*ids, *reply.tokens]
        self.messages.append({"role": "assistant", "content": reply.text.strip()})


def _complete_file(args: argparse.Namespace) -> None:
    """Continue all prompts of a file, in batches; a prompt's line is printed when its batch is done, in order."""
    for name in ("load_state", "save_state"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} belongs to one text, and cannot be used with --prompts")
    grammar_options = _read_grammar_options(args)
    content = stdin_bytes("pass a file").read() if args.prompts == "-" else read_file(args.prompts)
    model, tokenizer = load(args)
    entries = _parse_entries("stdin" if args.prompts == "-" else args.prompts, content, tokenizer)
    # A lone surrogate, from bytes that are not text, stays what it is in JSON.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    prompts = [entry["prompt"] for entry in entries]
    template = load_chat_template(args, tokenizer)
    if template is not None:
        prompts = [template.render([*read_system_message(args), {"role": "user", "content": text}]) for text in prompts]
    printer = _CompletionPrinter(entries, model.device)
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
            exact=args.exact,
            speculate=load_draft(args, model),
            **grammar_options,
            **_sampling_options(args),
        ):
            printer.add(batch)
    except KeyboardInterrupt:
        printer.report()
        raise
    printer.report()


class _CompletionPrinter:
    """Prints completions in the order of the prompts."""

    def __init__(self, entries: list[dict[str, Any]], device: torch.device) -> None:
        self._entries = entries
        self._device = device
        self._waiting: dict[int, list[Completion]] = {}
        self._printed = 0
        self._progress = Progress(len(entries))
        self._start_time = perf_counter()
        self._tokens = 0

    def add(self, batch: list[tuple[int, list[Completion]]]) -> None:
        """Add a batch; print every prompt for which no earlier one is missing."""
        self._waiting.update(batch)
        self._tokens += sum(len(completion.tokens) for _, completions in batch for completion in completions)
        while self._printed in self._waiting:
            for completion in self._waiting.pop(self._printed):
                line = {**self._entries[self._printed], **_to_json(completion)}
                print(json.dumps(line, ensure_ascii=False), flush=True)
            self._printed += 1
        self._progress.at(self._printed)

    def report(self) -> None:
        """Print to stderr how many prompts were done, and how fast."""
        self._progress.close()
        speed = self._tokens / max(perf_counter() - self._start_time, 1e-9)
        prompts = f"{self._printed} of {len(self._entries)} prompts"
        print(f"{prompts}, {speed:.1f} new tokens/s, on {describe_device(self._device)}", file=sys.stderr)


def _parse_entries(where: str, content: bytes, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the prompts of a file: its lines that are not empty, or the objects of JSON lines.

    Raise one ValueError that names all lines that are not prompts.
    """
    lines = [line.removesuffix(b"\r") for line in content.split(b"\n")]
    is_json = where.endswith(_JSON_SUFFIXES) or (where == "stdin" and content.lstrip()[:1] == b"{")
    entries = []
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entries.append(
                _parse_object(line) if is_json else {"prompt": decode_text(f"line {number}", line, tokenizer)}
            )
        except ValueError as error:
            problems.append(f"line {number}: {error}" if is_json else str(error))
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems[:20])}" + ("; and more" if len(problems) > 20 else ""))
    if not entries:
        raise ValueError(f"{where}: expected one prompt per line, found none")
    return entries


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not readable JSON ({error})") from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'expected an object with a text "prompt", got {str(entry)[:60]}')
    return dict(entry)


def _to_json(completion: Completion) -> dict[str, Any]:
    fields = {name: value for name, value in completion._asdict().items() if value is not None}
    if completion.choices is not None:
        fields["choices"] = [choice._asdict() for choice in completion.choices]
    if completion.alternatives is not None:
        fields["alternatives"] = [[choice._asdict() for choice in choices] for choices in completion.alternatives]
    return fields


def _read_prompts(args: argparse.Namespace, tokenizer: Tokenizer, help: str) -> Iterator[str]:
    """Yield the prompt that the arguments give, or one per line of stdin."""
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
            yield decode_text("stdin", strip_newline(line), tokenizer)
    elif args.prompt is None and args.file is None and args.load_state and stdin_bytes().isatty():
        yield ""
    else:
        yield read_text(args, tokenizer, strips_newline=True)
