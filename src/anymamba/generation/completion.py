"""A continuation in the making: tokens come in, text goes out, until a stop text or the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from anymamba.generation.tokenizers import IncrementalDecoder, Tokenizer


class Choice(NamedTuple):
    """A token that was, or could have been, chosen.

    Attributes:
        token: its id.
        text: its own text, U+FFFD for part of a character.
        logprob: its log-probability in the model, before temperature and filters.
    """

    token: int
    text: str
    logprob: float


class Completion(NamedTuple):
    """What follows a prompt.

    Attributes:
        text: without the prompt, the stop text or the end token.
        tokens: the ids, including those that ended it.
        reason: why it ended: at the "end" of a text, before a "stop" text, or at the "length" asked for.
        choices: the tokens with their log-probabilities, if asked for.
        alternatives: for each token, the most likely ones at its place, likeliest first, if asked for.
    """

    text: str
    tokens: list[int]
    reason: Literal["end", "stop", "length"]
    choices: list[Choice] | None
    alternatives: list[list[Choice]] | None


class CompletionBuilder:
    """A continuation in the making.

    Attributes:
        reason: why it ended; "length" until something else ends it.
    """

    def __init__(self, tokenizer: Tokenizer, ends: list[int], stops: list[str]) -> None:
        """Begin with no token; `ends` are the tokens, and `stops` the texts, that end it."""
        self._text, self._until, self._ends = IncrementalDecoder(tokenizer), StopFilter(stops), ends
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._choices: list[list[Choice]] = []  # of each token: itself, and the most likely ones
        self.reason: Literal["end", "stop", "length"] = "length"

    def add(self, token: int, choices: Sequence[Choice] = ()) -> str:
        """Add a token; returns the text that is now certain."""
        self._tokens.append(token)
        self._choices.append(list(choices))
        if token in self._ends:
            self.reason = "end"
            return ""
        self._pieces.append(piece := self._until.push(self._text.push(token)))
        if self._until.stopped:
            self.reason = "stop"
        return piece

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        if self.reason == "stop":
            return ""
        rest = self._until.push(self._text.finish())
        if self._until.stopped:
            self.reason = "stop"
        self._pieces.append(rest := rest + self._until.rest())
        return rest

    def completion(self, logprobs: int | None) -> Completion:
        """The completion so far."""
        self.finish()
        choices = None if logprobs is None else [found[0] for found in self._choices]
        alternatives = [found[1:] for found in self._choices] if logprobs else None
        return Completion("".join(self._pieces), self._tokens, self.reason, choices, alternatives)


class StopFilter:
    """Passes text on until one of the stop texts; holds back what may be the start of one."""

    def __init__(self, stops: list[str]) -> None:
        """Remember the texts; `stopped` says whether one has been found."""
        self._stops, self._held, self.stopped = stops, "", False

    def push(self, text: str) -> str:
        """Add text; returns what can be passed on, including text held back before."""
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            passed, self._held = self._held[: min(found)], ""
            return passed
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        keep = next(
            (
                n
                for n in range(min(longest, len(self._held)), 0, -1)
                if any(stop.startswith(self._held[-n:]) for stop in self._stops)
            ),
            0,
        )
        passed, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return passed

    def rest(self) -> str:
        """The text held back, after the last of it has come."""
        rest, self._held = self._held, ""
        return rest
