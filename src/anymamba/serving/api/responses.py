"""Responses: the events of a request as the JSON of the API, complete or in the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from anymamba.generation.sampling import TokenScore
from anymamba.generation.tokenizers import ByteTokenizer, Tokenizer
from anymamba.generation.tool_calls import ToolCall, ToolCallParser, ToolFormat
from anymamba.serving.api.requests import GenerationRequest
from anymamba.serving.scheduler.continuation import Event, PromptDone, SequenceDone, TokenEvent

_MIN_LOGPROB = -9999.0  # JSON has no infinity


@dataclass
class _Choice:
    """One continuation so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scores: list[list[TokenScore]] = field(default_factory=list)
    finish_reason: str | None = None
    parser: ToolCallParser | None = None  # of the text, if tools may be called
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    streamed_chars: int = 0  # characters of tokens whose log-probabilities a stream has sent


class ResponseBuilder:
    """The response to a request: `add` takes its events and returns the chunks that a stream sends for them."""

    def __init__(
        self, request: GenerationRequest, model: str, tokenizer: Tokenizer, tool_format: ToolFormat | None = None
    ) -> None:
        """Begin with no events."""
        self._request = request
        self._model = model
        self._tokenizer = tokenizer
        self._is_chat = request.messages is not None
        self._choices = [_Choice() for _ in range(request.continuations)]
        if request.tools is not None and tool_format is not None:
            for choice in self._choices:
                choice.parser = ToolCallParser(tool_format, request.tools.functions, request.tools.most)
        self._new_tokens = 0
        self._cached_tokens = 0
        self._echoed_tokens = 0
        self._created = int(time.time())
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"

    def add(self, prompt: int, event: Event) -> list[dict[str, Any]]:
        """Add an event of the prompt with this index; return the chunks for it."""
        n = self._request.n
        first = prompt * n
        if isinstance(event, PromptDone):
            self._new_tokens += event.new_tokens
            self._cached_tokens += event.cached_tokens
            return [chunk for i in range(first, first + n) if (chunk := self._begin_choice(i, prompt, event))]
        if isinstance(event, TokenEvent):
            choice = self._choices[first + event.choice]
            token_text = event.token_text
            text, calls = self._read_text(choice, token_text.text)
            choice.tokens.append(token_text.token)
            choice.scores.append(token_text.scores)
            if not text and not calls and self._request.logprobs is None and not self._request.return_token_ids:
                return []
            tokens, scores = [token_text.token], [token_text.scores]
            return [self._make_chunk(first + event.choice, text, tokens, scores, calls=calls)]
        if isinstance(event, SequenceDone):
            choice = self._choices[first + event.choice]
            text, calls = self._read_text(choice, event.rest, is_end=True)
            choice.finish_reason = (
                "length" if event.reason == "length" else "tool_calls" if choice.tool_calls else "stop"
            )
            return [self._make_chunk(first + event.choice, text, [], [], choice.finish_reason, calls=calls)]
        return []

    def _read_text(self, choice: _Choice, text: str, *, is_end: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Add text to a choice; return the content and the calls that it completes."""
        calls: list[ToolCall] = []
        if choice.parser is not None:
            text, calls = choice.parser.push(text)
            if is_end:
                rest, more = choice.parser.finish()
                text, calls = text + rest, calls + more
        first = len(choice.tool_calls)
        new = [{"index": first + i, **_format_call(call)} for i, call in enumerate(calls)]
        choice.text += text
        choice.tool_calls += new
        return text, new

    def _begin_choice(self, i: int, prompt: int, event: PromptDone) -> dict[str, Any] | None:
        """Return the chunk before the first token: the role of a message, or the prompt if it is echoed."""
        if self._is_chat:
            return self._make_chunk(i, "", [], [], has_role=True)
        if not self._request.echo:
            return None
        choice = self._choices[i]
        text_or_ids = self._request.prompts[prompt]
        choice.tokens = list(event.prompt_ids)
        choice.text = text_or_ids if isinstance(text_or_ids, str) else self._tokenizer.decode(choice.tokens)
        choice.scores = list(event.prompt_scores)
        self._echoed_tokens += len(choice.tokens)
        return self._make_chunk(i, choice.text, choice.tokens, choice.scores)

    def _make_chunk(
        self,
        i: int,
        text: str,
        tokens: list[int],
        scores: list[list[TokenScore]],
        finish_reason: str | None = None,
        has_role: bool = False,
        calls: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if self._is_chat:
            delta: dict[str, Any] = {"role": "assistant"} if has_role else {}
            delta |= {"content": text} if text or has_role else {}
            content = {"delta": delta | ({"tool_calls": calls} if calls else {})}
        logprobs = None
        if self._request.logprobs is not None and tokens:
            state = self._choices[i]
            logprobs, state.streamed_chars = self._format_logprobs(tokens, scores, state.streamed_chars)
        chunk = self._make_frame([self._make_choice(i, content, logprobs, finish_reason, tokens)], is_chunk=True)
        return chunk | ({"usage": None} if self._request.include_usage else {})

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream, with the token counts."""
        return {**self._make_frame([], is_chunk=True), "usage": self._count_usage()}

    def complete(self) -> dict[str, Any]:
        """Return the complete response, once all continuations have ended."""
        choices = []
        for i, state in enumerate(self._choices):
            content: dict[str, Any] = {"text": state.text}
            if self._is_chat:
                message: dict[str, Any] = {"role": "assistant", "content": state.text, "refusal": None}
                if state.tool_calls:
                    calls = [{name: x for name, x in call.items() if name != "index"} for call in state.tool_calls]
                    message |= {"content": state.text or None, "tool_calls": calls}
                content = {"message": message}
            logprobs = None
            if self._request.logprobs is not None:
                logprobs, _ = self._format_logprobs(state.tokens, state.scores, 0)
            choices.append(self._make_choice(i, content, logprobs, state.finish_reason, state.tokens))
        return {**self._make_frame(choices, is_chunk=False), "usage": self._count_usage()}

    def _make_choice(
        self, i: int, content: dict[str, Any], logprobs: Any, finish_reason: str | None, tokens: list[int]
    ) -> dict[str, Any]:
        token_ids = {"token_ids": tokens} if self._request.return_token_ids else {}
        return {"index": i, **content, "logprobs": logprobs, "finish_reason": finish_reason, **token_ids}

    def _make_frame(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if self._is_chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _count_usage(self) -> dict[str, Any]:
        prompt_tokens = self._new_tokens + self._cached_tokens
        completion_tokens = sum(len(choice.tokens) for choice in self._choices) - self._echoed_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def _format_logprobs(
        self, tokens: list[int], scores: list[list[TokenScore]], offset: int
    ) -> tuple[dict[str, Any], int]:
        """Format log-probabilities; return them and the character offset after the last token."""
        if self._is_chat:
            content = [
                {**self._format_score(best), "top_logprobs": [self._format_score(other) for other in others]}
                for best, *others in scores
            ]
            return {"content": content, "refusal": None}, 0
        texts = [self._tokenizer.decode([token]) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        logprobs = {
            "tokens": texts,
            "token_logprobs": [_finite_logprob(ranked[0]) if ranked else None for ranked in scores],
            "top_logprobs": [self._top_logprobs(ranked) if ranked else None for ranked in scores],
            "text_offset": offsets,
        }
        return logprobs, offset

    def _top_logprobs(self, scores: list[TokenScore]) -> dict[str, float]:
        """Return log-probabilities by text; of two tokens with the same text, that of the likelier one."""
        return {self._tokenizer.decode([score.token]): _finite_logprob(score) for score in reversed(scores[1:])}

    def _format_score(self, score: TokenScore) -> dict[str, Any]:
        text = self._tokenizer.decode([score.token])
        is_byte = isinstance(self._tokenizer, ByteTokenizer) and score.token < 256
        encoded = [score.token] if is_byte else list(text.encode())
        return {"token": text, "logprob": _finite_logprob(score), "bytes": encoded}


def _format_call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    # Nine letters and digits: the templates of Mistral's models reject other ids.
    call_id = secrets.token_hex(5)[:9]
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _finite_logprob(score: TokenScore) -> float:
    return max(score.logprob, _MIN_LOGPROB)
