"""From tokens to text: the one path that the pipeline, the command line and the server take.

A `CompletionBuilder` belongs to one row. It is given every token that the row chooses and returns the text that can
no longer change: `IncrementalDetokenizer` (tokenizers.py) holds back incomplete characters, `StopFilter` holds back
what may be the beginning of a stop text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from anymamba.generation.sampling import TokenScore
from anymamba.generation.tokenizers import IncrementalDetokenizer, Tokenizer

Reason = Literal["end", "stop", "length"]


class Choice(NamedTuple):
    """A token that was chosen, or could have been.

    Attributes:
        token: Token id.
        text: Text of this token alone, with U+FFFD for part of a character.
        logprob: Log-probability under the model, before temperature and filters.
    """

    token: int
    text: str
    logprob: float


class Completion(NamedTuple):
    """The text that follows a prompt.

    Attributes:
        text: Text without the prompt, the stop text and the end token.
        tokens: Token ids, including those of the stop text and the end token.
        reason: Why the text ended: the model or its grammar ended it ("end"), a stop text came ("stop"), or it reached
            the largest number of tokens ("length").
        choices: The tokens with their log-probabilities, if requested.
        alternatives: The most likely candidates for each token, likeliest first, if requested.
    """

    text: str
    tokens: list[int]
    reason: Reason
    choices: list[Choice] | None
    alternatives: list[list[Choice]] | None


class CompletionBuilder:
    """The text of one row while it is being generated: tokens in, text out.

    Attributes:
        tokens: Tokens so far, including one that ended the text.
        text: Text so far: everything that `add` and `finish` have returned.
        reason: Why the text ended; None while it continues.
        resumable_text: Text of the tokens that a model has read when the row ends: of all tokens after "end" and
            "length", of all but the last after "stop". None if that text ends within a character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        end_tokens: Collection[int] = (),
        stop_texts: Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> None:
        """Begin with no tokens; the text excludes end tokens and stop texts, and `max_tokens` of None is no limit."""
        self.tokens: list[int] = []
        self.text = ""
        self.reason: Reason | None = None
        self.resumable_text: str | None = ""
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._max_tokens = max_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop_filter = StopFilter(stop_texts)
        self._decoded = ""  # what the detokenizer returned: `text` with what the filter holds back
        self._logprobs: list[Sequence[TokenScore]] = []

    def add(self, token: int, logprobs: Sequence[TokenScore] = (), *, is_last: bool = False) -> str:
        """Add a token.

        Args:
            token: Token id.
            logprobs: Log-probabilities of this token and then of the most likely ones, for `build`.
            is_last: Whether the row's grammar allows no text after this token.

        Returns:
            The text that can no longer change; empty while a character or a possible stop text is incomplete.
        """
        assert self.reason is None, "the text has ended"
        self.tokens.append(token)
        self._logprobs.append(logprobs)
        # 1) An end token has no text; what was held back belongs to the text.
        if token in self._end_tokens:
            return self.finish("end")
        # 2) The model reads a token after it was added, so it has read the tokens before this one.
        self.resumable_text = self._decoded if self._detokenizer.is_at_boundary else None
        # 3) Tokens become whole characters, and characters become text once no stop text can begin with them.
        decoded = self._detokenizer.push(token)
        self._decoded += decoded
        text = self._stop_filter.push(decoded)
        self.text += text
        # 4) A stop text, a grammar or the number of tokens ends the text.
        if self._stop_filter.stopped:
            self.reason = "stop"
        elif is_last:
            text += self.finish("end")
        elif self._max_tokens is not None and len(self.tokens) >= self._max_tokens:
            text += self.finish()
        return text

    def finish(self, reason: Reason = "length") -> str:
        """End the text, unless it has ended; return what was held back."""
        if self.reason is not None:
            return ""
        rest = self._stop_filter.push(self._detokenizer.finish())
        stopped = self._stop_filter.stopped
        rest += self._stop_filter.finish()
        self.text += rest
        self.reason = "stop" if stopped else reason
        self.resumable_text = None if stopped else self.text
        return rest

    def build(self, logprobs: int | None = None) -> Completion:
        """Finish the text and return it; `logprobs` of 0 is for the tokens' own, above 0 for alternatives too."""
        self.finish()
        assert self.reason is not None
        choices = alternatives = None
        if logprobs is not None:
            decode = self._tokenizer.decode
            described = [[Choice(x, decode([x]), logprob) for x, logprob in scores] for scores in self._logprobs]
            choices = [row[0] for row in described]
            alternatives = [row[1:] for row in described] if logprobs else None
        return Completion(self.text, self.tokens, self.reason, choices, alternatives)


class StopFilter:
    """Passes text on up to the first stop text, after which `stopped` is True, and holds back what may begin one."""

    def __init__(self, stop_texts: Sequence[str]) -> None:
        """Begin with no text; no stop text may be empty."""
        self.stopped = False
        self._stop_texts = stop_texts
        self._held_back = ""

    def push(self, text: str) -> str:
        """Add text; return what is certain to come before any stop text."""
        text = self._held_back + text
        starts = [start for stop in self._stop_texts if (start := text.find(stop)) >= 0]
        if starts:
            self.stopped = True
            self._held_back = ""
            return text[: min(starts)]
        # What may be the beginning of a stop text is held back.
        longest = min(len(text), max((len(stop) - 1 for stop in self._stop_texts), default=0))
        beginnings = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stop_texts))
        cut = len(text) - next(beginnings, 0)
        self._held_back = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """Return what was held back: no more text follows."""
        rest = self._held_back
        self._held_back = ""
        return rest
