"""Events into the JSON of the API: whole answers, and the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from typing import Any

from anymamba.generation.tokenizers import ByteTokenizer
from anymamba.serving.api.requests import GenerationRequest
from anymamba.serving.scheduler.continuation import TokenScore
from anymamba.serving.scheduler.events import Event, PromptDone, SequenceDone, TokenEvent
from anymamba.serving.service import Service

_LEAST = -9999.0  # JSON has no infinity


class _Choice:
    """A continuation so far."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.scores: list[list[TokenScore]] = []
        self.reason: str | None = None


class ResponseBuilder:
    """The answer to a request; `add` takes its events and returns the chunks that a stream sends for them.

    Args:
        service: what answers.
        wanted: what was asked for.
    """

    def __init__(self, service: Service, wanted: GenerationRequest) -> None:
        """Nothing is known yet."""
        self._service, self._wanted, self._tokenizer = service, wanted, service.tokenizer
        self._chat = wanted.messages is not None
        self._choices = [_Choice() for _ in range(wanted.rows)]
        self._offsets = [0] * wanted.rows  # characters of tokens that a stream has sent
        self._read = self._reused = 0
        self._created = int(time.time())
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}"

    def add(self, prompt: int, event: Event) -> list[dict[str, Any]]:
        """Take an event of a prompt."""
        first, n = prompt * self._wanted.n, self._wanted.n
        if isinstance(event, PromptDone):
            self._read, self._reused = self._read + event.read, self._reused + event.reused
            return [chunk for i in range(first, first + n) if (chunk := self._begin(i, prompt, event))]
        if isinstance(event, TokenEvent):
            choice, piece = self._choices[first + event.row], event.piece
            choice.text += piece.text
            choice.tokens.append(piece.token)
            choice.scores.append(piece.scores)
            if not piece.text and self._wanted.logprobs is None and not self._wanted.return_token_ids:
                return []
            return [self._chunk(first + event.row, piece.text, [piece.token], [piece.scores])]
        if isinstance(event, SequenceDone):
            choice = self._choices[first + event.row]
            choice.text += event.rest
            choice.reason = "length" if event.reason == "length" else "stop"
            return [self._chunk(first + event.row, event.rest, [], [], choice.reason)]
        return []

    def _begin(self, i: int, prompt: int, event: PromptDone) -> dict[str, Any] | None:
        """What comes before the first token: the role of a message, or the prompt if it is echoed."""
        if self._chat:
            return self._chunk(i, "", [], [], role=True)
        if not self._wanted.echo:
            return None
        choice, given = self._choices[i], self._wanted.prompts[prompt]
        choice.text = given if isinstance(given, str) else self._tokenizer.decode(given)
        choice.tokens = self._tokenizer.encode(given) if isinstance(given, str) else list(given)
        choice.scores = list(event.prompt_scores)
        return self._chunk(i, choice.text, choice.tokens, choice.scores)

    def _chunk(
        self,
        i: int,
        text: str,
        tokens: list[int],
        scores: list[list[TokenScore]],
        reason: str | None = None,
        role: bool = False,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": i}
        if self._chat:
            choice["delta"] = ({"role": "assistant"} if role else {}) | ({"content": text} if text or role else {})
        else:
            choice["text"] = text
        wanted = self._wanted.logprobs is not None and bool(tokens)
        choice["logprobs"] = self._logprobs(i, tokens, scores) if wanted else None
        choice["finish_reason"] = reason
        if self._wanted.return_token_ids:
            choice["token_ids"] = tokens
        chunk = self._frame([choice], chunk=True)
        if self._wanted.include_usage:
            chunk["usage"] = None
        return chunk

    def last_chunk(self) -> dict[str, Any]:
        """The numbers of tokens, for the end of a stream."""
        return {**self._frame([], chunk=True), "usage": self._usage()}

    def whole(self) -> dict[str, Any]:
        """The answer, once all choices have ended."""
        choices = []
        self._offsets = [0] * len(self._choices)
        for i, made in enumerate(self._choices):
            choice: dict[str, Any] = {"index": i}
            if self._chat:
                choice["message"] = {"role": "assistant", "content": made.text, "refusal": None}
            else:
                choice["text"] = made.text
            wanted = self._wanted.logprobs is not None
            choice["logprobs"] = self._logprobs(i, made.tokens, made.scores) if wanted else None
            choice["finish_reason"] = made.reason
            if self._wanted.return_token_ids:
                choice["token_ids"] = made.tokens
            choices.append(choice)
        return {**self._frame(choices, chunk=False), "usage": self._usage()}

    def _frame(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self._chat else "text_completion"
        common = {"created": self._created, "model": self._service.name, "choices": choices}
        return {"id": self._id, "object": kind, **common}

    def _usage(self) -> dict[str, Any]:
        prompt = self._read + self._reused
        echoed = 0
        if self._wanted.echo:
            echoed = sum(
                len(p) if not isinstance(p, str) else len(self._tokenizer.encode(p)) for p in self._wanted.prompts
            )
        written = sum(len(choice.tokens) for choice in self._choices) - echoed * self._wanted.n
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": self._reused},
        }

    def _logprobs(self, i: int, tokens: list[int], scores: list[list[TokenScore]]) -> dict[str, Any]:
        if self._chat:
            return {"content": [self._chat_entry(found) for found in scores], "refusal": None}
        texts = [self._tokenizer.decode([token]) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[i])
            self._offsets[i] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_number(found[0]) if found else None for found in scores],
            "top_logprobs": [self._likeliest(found) if found else None for found in scores],
            "text_offset": offsets,
        }

    def _likeliest(self, scores: list[TokenScore]) -> dict[str, float]:
        """Log-probabilities by text; of two tokens with the same text, that of the likelier one."""
        return {self._tokenizer.decode([s.token]): _number(s) for s in reversed(scores[1:])}

    def _chat_entry(self, scores: list[TokenScore]) -> dict[str, Any]:
        return {**self._entry(scores[0]), "top_logprobs": [self._entry(other) for other in scores[1:]]}

    def _entry(self, scored: TokenScore) -> dict[str, Any]:
        text = self._tokenizer.decode([scored.token])
        is_byte = isinstance(self._tokenizer, ByteTokenizer) and scored.token < 256
        return {"token": text, "logprob": _number(scored), "bytes": [scored.token] if is_byte else list(text.encode())}


def _number(scored: TokenScore) -> float:
    return max(scored.logprob, _LEAST)
