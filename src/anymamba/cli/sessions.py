"""One text of `anymamba generate`: it grows turn by turn, as plain text or as a conversation."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, ClassVar

import torch

from anymamba.cli.common import system_message
from anymamba.generation import GenerationState, TokenStream, stream
from anymamba.generation.chat import ChatTemplate
from anymamba.generation.completion import UntilStop
from anymamba.generation.tokenizers import TextStream, Tokenizer
from anymamba.ground.interrupts import interrupts
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
        self.ends = [] if args.ignore_end else [i for i in tokenizer.end if i < model.config.vocab_size]
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
        with interrupts(*(() if own else (signal.SIGINT,))) as interrupted:
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
        text, output = TextStream(self.tokenizer), UntilStop(self.stops)
        ids: list[int] = []
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            print(piece, end="", flush=True)

        for (token,) in tokens:
            assert token is not None
            ids.append(token)
            self.written += 1
            if token not in self.ends:
                show(output.push(text.push(token)))
            if output.stopped:
                return ids, "".join(pieces)
            if interrupted():
                break
        show(output.push(text.finish()) + output.rest())
        return ids, "".join(pieces)

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
    tokenised differently, all of them are read again.
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
