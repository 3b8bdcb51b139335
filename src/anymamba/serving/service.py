"""Between requests and the engine: prompts are rendered and tokenized, jobs are submitted, events come back."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from anymamba.generation.sampling import split_keys
from anymamba.generation.tokenizers import Tokenizer, select_end_tokens
from anymamba.models.lm import MambaLM
from anymamba.serving.api.errors import ApiError, invalid_value, too_many_requests
from anymamba.serving.api.requests import GenerationRequest, Limits
from anymamba.serving.metrics import Metrics
from anymamba.serving.prompts import ChatPrompt, Prompt, ScoredPrompt, SessionPrompt, cache_callbacks
from anymamba.serving.scheduler.continuation import ContinuationOptions
from anymamba.serving.scheduler.engine import Engine, prompt_key
from anymamba.serving.scheduler.events import Event, Failed, Job, PromptDone, SequenceDone, ShuttingDown, TokenEvent
from anymamba.serving.state_cache import Key, SessionLimitError, StateCache, session_key


@runtime_checkable
class Template(Protocol):
    """What the service asks of a chat template."""

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = ...) -> str:
        """A conversation as text, up to where the next reply begins."""


class Service:
    """A model that answers requests.

    Args:
        model: the language model.
        tokenizer: of its text.
        template: of its conversations.
        name: what clients call the model.
        store: of states.
        limits: on requests.
        engine: options of `Engine`.

    Attributes:
        engine: what computes, after `start`.
        open: how many requests are being answered or waiting.
    """

    def __init__(
        self,
        model: MambaLM,
        tokenizer: Tokenizer,
        template: Template,
        *,
        name: str,
        cache: StateCache,
        limits: Limits,
        stops: tuple[str, ...] = (),
        engine: dict[str, Any] | None = None,
    ) -> None:
        """Nothing runs yet."""
        self.model, self.tokenizer, self.template, self.name = model, tokenizer, template, name
        self.cache, self.limits, self.metrics, self.created = cache, limits, Metrics(), int(time.time())
        self.state_bytes = model.init_cache(1).nbytes + model.config.padded_vocab_size * (model.dtype.itemsize + 1) + 16
        self._chat_stops, self._options = stops, engine or {}
        self._ends = frozenset(select_end_tokens(tokenizer, model.config.vocab_size))
        self._busy: set[Key] = set()
        self._engine: Engine | None = None
        self.open = 0

    @property
    def engine(self) -> Engine:
        """The engine."""
        assert self._engine is not None, "the service has been started"
        return self._engine

    def start(self) -> None:
        """Start the engine; its events are delivered to the running loop."""
        loop = asyncio.get_running_loop()

        def deliver(events: list[tuple[Job, Event]]) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._dispatch, events)

        self._engine = Engine(self.model, self.tokenizer, deliver, **self._options)

    def set_deadline(self, deadline: float) -> None:
        """Let no request run beyond this moment, on the clock of `time.monotonic`."""
        self.engine.set_deadline(deadline)

    def close(self, seconds: float = float("inf")) -> None:
        """End the engine, and write kept states to disk for at most `seconds`."""
        if self._engine is not None:
            self._engine.close()
        self.cache.close(seconds)

    @staticmethod
    def _dispatch(events: list[tuple[Job, Event]]) -> None:
        for job, event in events:
            job.emit(event)

    async def handle(self, request: GenerationRequest) -> AsyncGenerator[tuple[int, Event], None]:
        """The events of a request, each with the number of its prompt; closing the iterator cancels the request.

        Raises:
            ApiError: a prompt cannot be read, a session is in use, too many requests are open, or the time ran out.
        """
        began = time.monotonic()
        if self.open >= self.limits.max_requests:
            raise too_many_requests(self.open)
        session = None if request.session is None else session_key(request.session)
        if session in self._busy:
            raise ApiError(409, "another request is using this session", param="session", code="session_in_use")
        self.open += 1
        if session is not None:
            self._busy.add(session)
        jobs: list[Job] = []
        try:
            prompts, lengths = await asyncio.to_thread(self._prepared, request, session)
            queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
            jobs = self._jobs(request, prompts, lengths, queue, began + self.limits.request_seconds)
            for job in jobs:
                self.engine.submit(job)
            async for item in self._events(prompts, queue, request.continuations, began):
                yield item
        finally:
            for job in jobs:
                job.cancel()
            self.open -= 1
            if session is not None:
                self._busy.discard(session)

    async def _events(
        self, prompts: list[Prompt], queue: asyncio.Queue[tuple[int, Event]], rows: int, began: float
    ) -> AsyncIterator[tuple[int, Event]]:
        last: dict[tuple[int, int], float] = {}
        while rows:
            i, event = await queue.get()
            if isinstance(event, Failed):
                raise _as_api_error(event.error)
            if isinstance(event, PromptDone):
                self.metrics.count("anymamba_reused_tokens_total", event.reused)
            elif isinstance(event, TokenEvent):
                now = time.monotonic()
                before = last.get((i, event.row))
                self.metrics.observe("first" if before is None else "next", now - (began if before is None else before))
                last[i, event.row] = now
            elif isinstance(event, SequenceDone):
                rows -= 1
                if prompts[i].caches_final_state:
                    await asyncio.to_thread(self._finalize, prompts[i])
            yield i, event

    @staticmethod
    def _finalize(prompt: Prompt) -> None:
        try:
            prompt.finalize()
        except OSError as error:
            print(f"anymamba: could not write a session: {error}", file=sys.stderr, flush=True)
            message = "the session's state could not be written to disk"
            raise ApiError(507, message, param="session", code="session_not_written") from error

    def _prepared(self, request: GenerationRequest, session: Key | None) -> tuple[list[Prompt], list[int]]:
        prompts = self.prepare(request, session)
        return prompts, [prompt.length() for prompt in prompts]

    def prepare(self, request: GenerationRequest, session: Key | None) -> list[Prompt]:
        """Prompts as tokens, with the states of their sessions.

        This may take a while, so it must not run in the loop's thread.

        Raises:
            ApiError: a prompt is empty or too long, or its session cannot be resumed.
        """
        earlier = None
        if session is not None:
            try:
                earlier = self.cache.get(session)
            except (OSError, ValueError) as error:
                if request.messages is None:
                    message = "the session's state is damaged and cannot be resumed; delete the session to start over"
                    raise ApiError(409, message, param="session", code="session_damaged") from error
        length = self.engine.segment_len
        if request.messages is not None:
            text = self.render(request.messages)
            ids = self._encode(text, "messages")
            return [ChatPrompt(ids, self.cache, length, text, session, self.tokenizer, self._after(request.messages))]
        prompts: list[Prompt] = []
        for prompt in request.prompts:
            ids = self._encode(prompt, "prompt", needed=earlier is None)
            if session is not None:
                prompts.append(SessionPrompt(ids, self.cache, length, session, earlier))
            else:
                scored = request.echo and request.logprobs is not None
                prompts.append((ScoredPrompt if scored else Prompt)(ids, self.cache, length))
        return prompts

    def render(self, messages: list[dict[str, str]]) -> str:
        """A conversation as text.

        Raises:
            ApiError: the model's template does not accept it.
        """
        try:
            return self.template.render(messages, add_generation_prompt=True)
        except (ValueError, TypeError) as error:
            message = f"the model's chat template does not accept these messages: {' '.join(str(error).split())[:300]}"
            raise invalid_value("messages", message) from error

    def _after(self, messages: list[dict[str, str]]) -> Callable[[str], str]:
        """A conversation with a reply, as text."""
        return lambda reply: self.template.render(
            [*messages, {"role": "assistant", "content": reply}], add_generation_prompt=False
        )

    def _encode(self, prompt: str | list[int], param: str, needed: bool = True) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids and needed:
            raise invalid_value(param, f"{param} must have at least one token, got none")
        if len(ids) > self.limits.max_prompt_tokens:
            message = f"{param} may have at most {self.limits.max_prompt_tokens} tokens, got {len(ids)}"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return ids

    def _jobs(
        self,
        request: GenerationRequest,
        prompts: list[Prompt],
        lengths: list[int],
        queue: asyncio.Queue[tuple[int, Event]],
        deadline: float,
    ) -> list[Job]:
        """A job for each prompt; rows with the same start draw different tokens."""
        keys = [prompt_key(p.ids) if p.fixed_key else 0 for p in prompts for _ in range(request.n)]
        keys = split_keys(keys, [0] * len(keys))
        scored = request.logprobs if request.echo else None
        jobs = []
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            plan = ContinuationOptions(
                sampling=request.sampling,
                max_tokens=request.max_tokens,
                ends=frozenset() if request.ignore_eos else self._ends,
                stops=request.stop_texts or (self._chat_stops if request.messages is not None else ()),
                logprobs=request.logprobs,
                feed_final_token=prompt.feeds_final_token,
            )
            job = Job(
                plans=[plan] * request.n,
                keys=keys[i * request.n : (i + 1) * request.n] if prompt.fixed_key else None,
                emit=lambda event, i=i: queue.put_nowait((i, event)),  # type: ignore[misc]
                deadline=deadline,
                score_prompt=scored,
                length=length,
                **cache_callbacks(prompt),
            )
            jobs.append(job)
        return jobs


def _as_api_error(error: BaseException) -> BaseException:
    if isinstance(error, TimeoutError):
        return ApiError(408, str(error), code="timeout")
    if isinstance(error, SessionLimitError):
        message = "there is no room for another session; delete one"
        return ApiError(429, message, param="session", code="no_room", headers={"Retry-After": "60"})
    if isinstance(error, ShuttingDown):
        return ApiError(503, str(error), code="shutting_down", headers={"Retry-After": "5"})
    return error
