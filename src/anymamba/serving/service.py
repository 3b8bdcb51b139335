"""The service between requests and the engine: it prepares prompts, submits jobs and returns their events."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from anymamba.generation.grammar import CompiledGrammar, GrammarError
from anymamba.generation.sampling import split_keys
from anymamba.generation.tokenizers import Tokenizer, select_end_tokens
from anymamba.generation.tool_calls import ToolFormat
from anymamba.models.lm import MambaLM
from anymamba.serving.api.fields import ApiError, internal_error, invalid_value, too_many_requests
from anymamba.serving.api.requests import GenerationRequest, Limits
from anymamba.serving.grammars import GrammarCache
from anymamba.serving.metrics import Metrics
from anymamba.serving.prompts import ChatPrompt, Prompt, ScoredPrompt, SessionPrompt, tokenize_prompt
from anymamba.serving.scheduler.continuation import (
    ContinuationOptions,
    Event,
    Job,
    JobFailed,
    PromptDone,
    SequenceDone,
    ShuttingDown,
    TokenEvent,
)
from anymamba.serving.scheduler.engine import Engine, prompt_key
from anymamba.serving.sessions import SessionLease, SessionStore
from anymamba.serving.state_cache import StateCache

_LONG_PROMPT = 2**16  # characters


@runtime_checkable
class Template(Protocol):
    """A chat template."""

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = ..., **values: Any) -> str:
        """Return a conversation as text, up to where the next reply begins."""


class Service:
    """A model that generates text for requests.

    Args:
        name: Name of the model for clients.
        stop_texts: Texts that end a reply in a chat, unless the request sets others.
        tool_format: How the model writes tool calls; None if the template does not describe tools to it.
        engine: Options of `Engine`.
    """

    def __init__(
        self,
        model: MambaLM,
        tokenizer: Tokenizer,
        template: Template,
        *,
        name: str,
        cache: StateCache,
        sessions: SessionStore,
        limits: Limits,
        stop_texts: tuple[str, ...] = (),
        tool_format: ToolFormat | None = None,
        engine: dict[str, Any] | None = None,
    ) -> None:
        """Prepare the service; nothing runs before `start`."""
        self.model = model
        self.tokenizer = tokenizer
        self.template = template
        self.name = name
        self.cache = cache
        self.sessions = sessions
        self.limits = limits
        self.tool_format = tool_format
        self.metrics = Metrics()
        self.created = int(time.time())
        self.open = 0  # number of open requests
        cache_of_row = model.init_cache(1)
        self.state_bytes = cache_of_row.nbytes + model.config.padded_vocab_size * (model.dtype.itemsize + 1) + 16
        self.state_bytes_per_token = cache_of_row.bytes_per_step
        self._chat_stop_texts = stop_texts
        self._end_tokens = frozenset(select_end_tokens(tokenizer, model.config.vocab_size))
        self._engine_options = engine or {}
        self._engine: Engine | None = None
        # Few threads, so that many long prompts at once neither fill the memory nor delay short ones.
        self._short_executor = ThreadPoolExecutor(2, "prompts")
        self._long_executor = ThreadPoolExecutor(1, "long-prompts")
        self._grammar_executor = ThreadPoolExecutor(1, "grammars")  # a grammar that takes long delays only others
        self._grammars = GrammarCache(tokenizer)

    @property
    def engine(self) -> Engine:
        """Return the engine of a started service."""
        assert self._engine is not None, "the service has been started"
        return self._engine

    @property
    def unfinished_files(self) -> int:
        """Number of temporary files of killed servers that were removed."""
        return sum(files.unfinished_files for files in (self.cache.files, self.sessions.files) if files is not None)

    def start(self) -> None:
        """Start the engine, whose events are delivered to the running event loop."""
        loop = asyncio.get_running_loop()

        def emit(events: list[tuple[Job, Event]]) -> None:
            for job, event in events:
                job.emit(event)

        def deliver(events: list[tuple[Job, Event]]) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(emit, events)

        self._engine = Engine(self.model, self.tokenizer, deliver, **self._engine_options)

    def set_deadline(self, deadline: float) -> None:
        """Let no request run beyond this time on the clock of `time.monotonic`."""
        self.engine.set_deadline(deadline)

    def close(self, seconds: float = float("inf")) -> None:
        """Stop the engine, and write cached states to disk for at most `seconds`."""
        if self._engine is not None:
            self._engine.close()
        self._short_executor.shutdown(cancel_futures=True)
        self._long_executor.shutdown(cancel_futures=True)
        self._grammar_executor.shutdown(cancel_futures=True)
        self.cache.close(seconds)

    async def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, outside of the event loop."""
        executor = self._long_executor if len(text) > _LONG_PROMPT else self._short_executor
        return await asyncio.get_running_loop().run_in_executor(executor, self._tokenize, text, "prompt")

    async def handle(self, request: GenerationRequest) -> AsyncGenerator[tuple[int, Event], None]:
        """Yield the events of a request, each with the index of its prompt; closing the iterator cancels it."""
        start_time = time.monotonic()
        if self.open >= self.limits.max_requests:
            raise too_many_requests(self.open)
        self.open += 1
        lease: SessionLease | None = None
        jobs: list[Job] = []
        try:
            # 1) Compile the grammar, outside of the event loop.
            loop = asyncio.get_running_loop()
            grammar = await loop.run_in_executor(self._grammar_executor, self._compile_grammar, request)
            # 2) Lease the session, so that no other request of this server uses it.
            if request.session is not None:
                lease = self.sessions.acquire(request.session)
            # 3) Tokenize the prompts and look up their states, outside of the event loop.
            executor = self._long_executor if _count_chars(request) > _LONG_PROMPT else self._short_executor
            prompts, lengths = await loop.run_in_executor(executor, self._prepare_prompts, request, lease)
            # 4) Submit one job per prompt.
            queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
            deadline = start_time + self.limits.request_seconds
            jobs = self._make_jobs(request, grammar, prompts, lengths, queue, deadline)
            for job in jobs:
                self.engine.submit(job)
            # 5) Yield their events until every continuation has ended.
            async for item in self._collect_events(prompts, queue, request.continuations, start_time):
                yield item
        finally:
            for job in jobs:
                job.cancel()
            self.open -= 1
            if lease is not None:
                self.sessions.release(lease)

    async def _collect_events(
        self, prompts: list[Prompt], queue: asyncio.Queue[tuple[int, Event]], unfinished: int, start_time: float
    ) -> AsyncIterator[tuple[int, Event]]:
        token_times: dict[tuple[int, int], float] = {}
        while unfinished:
            i, event = await queue.get()
            if isinstance(event, JobFailed):
                raise _job_error(event.error)
            if isinstance(event, PromptDone):
                self.metrics.count("anymamba_reused_tokens_total", event.cached_tokens)
                event = event._replace(prompt_ids=prompts[i].ids)
            elif isinstance(event, TokenEvent):
                now = time.monotonic()
                row = (i, event.choice)
                self.metrics.observe("next" if row in token_times else "first", now - token_times.get(row, start_time))
                token_times[row] = now
            elif isinstance(event, SequenceDone):
                unfinished -= 1
                if prompts[i].caches_final_state:
                    await asyncio.to_thread(_finalize, prompts[i])
            yield i, event

    def _compile_grammar(self, request: GenerationRequest) -> CompiledGrammar | None:
        """Return the grammar that a reply follows: that of the request, or of the tool calls that it requires."""
        tools = request.tools
        if tools is not None and self.tool_format is None:
            message = "the model's chat template does not describe tools to the model"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        if tools is not None and self.tool_format is not None and tools.choice != "auto":
            chosen = [f for name, f in tools.functions.items() if tools.choice in ("required", name)]
            return self._grammars.compile(self.tool_format.make_grammar(chosen, most=tools.most), "tools")
        return None if request.grammar is None else self._grammars.compile(request.grammar, request.grammar_field)

    def _prepare_prompts(
        self, request: GenerationRequest, lease: SessionLease | None
    ) -> tuple[list[Prompt], list[int]]:
        """Return the prompts of a request, and estimates of their lengths; this may take a while."""
        prompts = self._make_prompts(request, lease)
        return prompts, [prompt.estimate_len() for prompt in prompts]

    def _make_prompts(self, request: GenerationRequest, lease: SessionLease | None) -> list[Prompt]:
        """Tokenize the prompts of a request, and load its session."""
        segment_len = self.engine.segment_len
        if lease is not None:
            # A chat carries the whole conversation, so a damaged session can be read again.
            self.sessions.load(lease, ignore_damage=request.messages is not None)
        if request.messages is not None:
            messages = request.messages
            values = request.template_values | ({} if request.tools is None else {"tools": request.tools.tools})
            text = self._render(messages, values)
            ids = self._tokenize(text, "messages")
            if lease is not None:  # the text is the whole conversation
                self.sessions.reserve(lease, len(ids) + request.max_tokens)

            def render_reply(reply: str) -> str:
                conversation = [*messages, {"role": "assistant", "content": reply}]
                return self.template.render(conversation, add_generation_prompt=False, **values)

            return [ChatPrompt(ids, self.cache, segment_len, text, self.tokenizer, render_reply, self.sessions, lease)]
        if lease is not None:
            (text_or_ids,) = request.prompts
            ids = self._tokenize(text_or_ids, "prompt", may_be_empty=lease.session is not None)
            tokens_before = 0 if lease.session is None else lease.session.tokens
            self.sessions.reserve(lease, tokens_before + len(ids) + request.max_tokens)
            return [SessionPrompt(ids, self.cache, segment_len, self.sessions, lease)]
        prompt_class = ScoredPrompt if request.echo and request.logprobs is not None else Prompt
        return [prompt_class(self._tokenize(p, "prompt"), self.cache, segment_len) for p in request.prompts]

    def _render(self, messages: list[dict[str, Any]], values: dict[str, Any]) -> str:
        try:
            return self.template.render(messages, add_generation_prompt=True, **values)
        except (ValueError, TypeError) as error:
            message = f"the model's chat template does not accept these messages: {' '.join(str(error).split())[:300]}"
            raise invalid_value("messages", message) from error

    def _tokenize(self, prompt: str | list[int], param: str, *, may_be_empty: bool = False) -> list[int]:
        max_tokens = self.limits.max_prompt_tokens
        return tokenize_prompt(self.tokenizer, prompt, param, max_tokens, may_be_empty=may_be_empty)

    def _make_jobs(
        self,
        request: GenerationRequest,
        grammar: CompiledGrammar | None,
        prompts: list[Prompt],
        lengths: list[int],
        queue: asyncio.Queue[tuple[int, Event]],
        deadline: float,
    ) -> list[Job]:
        """Return one job per prompt; continuations of equal prompts draw different tokens."""
        n = request.n
        prompt_keys = [prompt_key(prompt.ids) if prompt.seeds_sampling_from_prompt else 0 for prompt in prompts]
        keys = split_keys([key for key in prompt_keys for _ in range(n)], [0] * (n * len(prompts)))
        stop_texts = request.stop_texts or (self._chat_stop_texts if request.messages is not None else ())
        jobs = []
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            options = ContinuationOptions(
                sampling=request.sampling,
                max_tokens=request.max_tokens,
                end_tokens=frozenset() if request.ignore_eos else self._end_tokens,
                stop_texts=stop_texts,
                grammar=grammar,
                logprobs=request.logprobs,
                feed_final_token=prompt.feeds_final_token,
            )
            job = Job(
                continuations=[options] * n,
                sampling_keys=keys[i * n : (i + 1) * n] if prompt.seeds_sampling_from_prompt else None,
                emit=_emitter(queue, i),
                deadline=deadline,
                prompt_logprobs=request.logprobs if request.echo else None,
                estimated_len=length,
                **prompt.job_options(),
            )
            jobs.append(job)
        return jobs


def _count_chars(request: GenerationRequest) -> int:
    texts = request.prompts if request.messages is None else [str(message) for message in request.messages]
    return sum(map(len, texts))


def _emitter(queue: asyncio.Queue[tuple[int, Event]], prompt: int) -> Callable[[Event], None]:
    return lambda event: queue.put_nowait((prompt, event))


def _finalize(prompt: Prompt) -> None:
    try:
        prompt.finalize()
    except OSError as error:
        print(f"anymamba: could not write a session: {error}", file=sys.stderr, flush=True)
        message = "the session's state could not be written to disk; the session is as it was before this request"
        raise ApiError(507, message, param="session", code="session_not_written") from error


def _job_error(error: BaseException) -> BaseException:
    if isinstance(error, TimeoutError):
        return ApiError(408, str(error), code="timeout")
    if isinstance(error, ShuttingDown):
        return ApiError(503, str(error), code="shutting_down", headers={"Retry-After": "5"})
    if isinstance(error, GrammarError):
        return ApiError(400, str(error), code="grammar_too_complex")
    # Not a bug here, but caused by data (logits that are not finite, tokens without text) or by a native library.
    if isinstance(error, ValueError) or not isinstance(error, Exception):
        print(f"anymamba: {' '.join(repr(error).split())[:300]}", file=sys.stderr, flush=True)
        return internal_error()
    return error
