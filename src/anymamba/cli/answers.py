"""`anymamba generate --prompts`: a file of prompts in, a line of JSON out for each."""

from __future__ import annotations

import argparse
import json
import sys
from time import perf_counter
from typing import Any

from anymamba.cli.common import Progress, chat_template, decode_text, load, read_file, stdin_bytes, system_message
from anymamba.generation.completion import Completion
from anymamba.generation.text import Pipeline
from anymamba.generation.tokenizers import Tokenizer

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
