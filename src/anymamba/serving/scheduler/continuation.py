"""Jobs and their continuations: what the engine is asked for, how tokens are chosen, and the events it emits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.generation.completion import CompletionBuilder, Reason
from anymamba.generation.grammar import CompiledGrammar
from anymamba.generation.sampling import Sampling, TokenScore, draw_uniform, sample_tokens, score_token
from anymamba.generation.state import GenerationState
from anymamba.generation.tokenizers import Tokenizer
from anymamba.models.cache import LMCache


class TokenText(NamedTuple):
    """A token and what it adds to the text."""

    token: int
    text: str  # that can no longer change; may be empty
    scores: list[TokenScore]  # of the token and then of the most likely ones, if requested


class PrefillStart(NamedTuple):
    """The beginning of a prefill."""

    state: GenerationState | None  # to continue from, or None for an empty cache
    ids: list[int]  # that are still to be read
    cached_tokens: int  # that the state has read


class PromptDone(NamedTuple):
    """The prompt of a job has been read."""

    new_tokens: int
    cached_tokens: int  # that a cached state had read before
    prompt_scores: list[list[TokenScore]]  # of each token of the prompt, if requested
    prompt_ids: Sequence[int] = ()  # filled in by the service


class TokenEvent(NamedTuple):
    """A continuation, numbered within its job, has a new token."""

    choice: int
    token_text: TokenText


class SequenceDone(NamedTuple):
    """A continuation, numbered within its job, has ended with the rest of its text; it has no further events."""

    choice: int
    reason: Reason
    rest: str


class JobFailed(NamedTuple):
    """The job has failed; it has no further events."""

    error: BaseException


class ShuttingDown(RuntimeError):  # noqa: N818
    """The engine was closed before a job was done."""


Event = PromptDone | TokenEvent | SequenceDone | JobFailed


@dataclass(frozen=True, kw_only=True)
class ContinuationOptions:
    """The options of a continuation."""

    sampling: Sampling  # with its seed set
    max_tokens: int
    end_tokens: frozenset[int] = frozenset()  # they end the continuation
    stop_texts: tuple[str, ...] = ()  # the continuation ends before them
    grammar: CompiledGrammar | None = None  # the text follows it, and ends where no more is possible
    logprobs: int | None = None  # most likely tokens to score for each token, or None for no scores
    feed_final_token: bool = False  # the final state has read every token, including one that ended the continuation


@dataclass(eq=False, kw_only=True)
class Job:
    """One prompt and its continuations. The callbacks run in the engine's thread, except `emit`."""

    find_start: Callable[[], PrefillStart]  # called when the job is scheduled, so it sees what other jobs have left
    continuations: list[ContinuationOptions]
    sampling_keys: list[int] | None  # one per continuation, or None to continue with the key of the state
    emit: Callable[[Event], None]  # called in the thread of the engine's `deliver`
    deadline: float = float("inf")  # on the clock of `time.monotonic`
    should_cache_at: Callable[[int], bool] = lambda _: False  # after a number of new tokens, before the end
    on_read: Callable[[int, GenerationState], None] | None = None  # takes those states and that of the whole prompt
    on_end: Callable[[Continuation, GenerationState], None] | None = None  # takes each final state
    prompt_logprobs: int | None = None  # most likely tokens to score for each token of the prompt, or None
    estimated_len: int = 0  # tokens to read, so that short prompts do not wait for long ones
    _cancelled: threading.Event = field(default_factory=threading.Event, init=False)

    def cancel(self) -> None:
        """End the job before its next token, without further events."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        """True once the job was cancelled or has failed."""
        return self._cancelled.is_set()


@dataclass(eq=False)
class PrefilledJob:
    """A job whose prompt was read."""

    job: Job
    state: GenerationState  # at the end of the prompt
    next_index: int = 0  # of the next continuation to admit


class Outbox:
    """The events of a round, until `deliver` takes them in the engine's thread. A cancelled job gets none."""

    def __init__(self, deliver: Callable[[list[tuple[Job, Event]]], None]) -> None:
        """Begin with no events."""
        self._deliver = deliver
        self._events: list[tuple[Job, Event]] = []

    def add(self, job: Job, event: Event) -> None:
        """Add an event of a job."""
        if not job.is_cancelled:
            self._events.append((job, event))

    def fail(self, job: Job, error: BaseException) -> None:
        """Fail a job; its other continuations leave before their next token."""
        self.add(job, JobFailed(error))
        job.cancel()

    def flush(self) -> None:
        """Deliver the events."""
        events = self._events
        self._events = []
        if events:
            self._deliver(events)


class Continuation:
    """A continuation that is being decoded.

    `add_token` takes a token that `choose_tokens` has chosen, the model reads that token, `mark_fed` notes it, and so
    on until `completion.reason` is set.
    """

    def __init__(
        self, options: ContinuationOptions, tokenizer: Tokenizer, vocab_size: int, state: GenerationState, key: int
    ) -> None:
        """Begin with the state of one row at the end of a prompt, and a sampling key."""
        self.options = options
        self.completion = CompletionBuilder(
            tokenizer, end_tokens=options.end_tokens, stop_texts=options.stop_texts, max_tokens=options.max_tokens
        )
        self.pending_token: int | None = None  # chosen, and not yet read by the model
        # Equal for continuations whose tokens are chosen by the same rule, apart from their seeds.
        logit_bias = tuple((options.sampling.logit_bias or {}).items())
        rule = {**vars(options.sampling), "seed": None, "logit_bias": logit_bias}
        self.sampling_group: Hashable = tuple(rule.items())
        self._vocab_size = vocab_size
        self._seen_v = state.seen[0].clone()
        self._key = key
        self._draws = int(state.counts[0])
        self._token_counts: Counter[int] = Counter()
        grammar = options.grammar
        self._matcher = None if grammar is None else grammar.start(vocab_size)

    def add_token(self, token: int, logits_1v: Tensor) -> TokenText:
        """Add a token that was chosen from these logits."""
        if self.options.sampling.needs_token_counts:
            self._token_counts[token] += 1
        scores: list[TokenScore] = []
        if self.options.logprobs is not None:
            scores = score_token(logits_1v[0, : self._vocab_size], token, self.options.logprobs)
        self.pending_token = token
        is_last = False
        if self._matcher is not None:
            self._matcher.add(token)
            is_last = self._matcher.is_complete
        return TokenText(token, self.completion.add(token, is_last=is_last), scores)

    def mark_fed(self) -> None:
        """Note that the model has read the pending token."""
        assert self.pending_token is not None
        self._seen_v[self.pending_token] = True
        self._draws += 1
        self.pending_token = None

    @property
    def needs_final_feed(self) -> bool:
        """True if the final state must read the pending token."""
        is_text = self.completion.reason != "stop" and self.pending_token not in self.options.end_tokens
        return self.pending_token is not None and (self.options.feed_final_token or is_text)

    def make_state(self, cache: LMCache, logits_1v: Tensor) -> GenerationState:
        """Return the state with these tensors, which are not copied."""
        keys = torch.tensor([self._key])
        counts = torch.tensor([self._draws])
        return GenerationState(cache, logits_1v, self._seen_v.unsqueeze(0), keys, counts)

    def draw_uniform(self) -> float:
        """Return the random number that chooses the next token."""
        sampling = self.options.sampling
        assert sampling.seed is not None
        return draw_uniform(sampling.seed, self._key, self._draws) if sampling.temperature else 0.0


def choose_tokens(rows: Sequence[Continuation], logits_bv: Tensor) -> list[int | ValueError]:
    """Return the next token of each row, or its error if its logits are not finite.

    One call of the sampler chooses for all rows with the same rule.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.sampling_group, []).append(i)
    tokens_by_row: dict[int, int | ValueError] = {}
    for group in groups.values():
        group_logits_bv = select_rows(logits_bv, group)
        try:
            tokens: list[int | ValueError] = [*_choose_in_group([rows[i] for i in group], group_logits_bv)]
        except ValueError:  # caused by one row, which must not fail the others
            tokens = [_choose_alone(rows[i], logits_bv[i : i + 1]) for i in group]
        tokens_by_row.update(zip(group, tokens, strict=True))
    return [tokens_by_row[i] for i in range(len(rows))]


def select_rows(x: Tensor, rows: list[int]) -> Tensor:
    """Return some rows of a tensor, without a copy if they are all of them."""
    return x if len(rows) == x.shape[0] else x[rows]


def _choose_in_group(rows: list[Continuation], logits_bv: Tensor) -> list[int]:
    sampling = rows[0].options.sampling
    vocab_size = rows[0]._vocab_size
    seen_bv = None
    if sampling.repetition_penalty != 1:
        seen_bv = torch.stack([row._seen_v[:vocab_size] for row in rows])
    uniforms = [row.draw_uniform() for row in rows]
    counts = [row._token_counts for row in rows]
    allowed = [None if row._matcher is None else row._matcher.allowed for row in rows]
    return sample_tokens(logits_bv[:, :vocab_size], sampling, uniforms, seen_bv, counts, allowed).tolist()


def _choose_alone(row: Continuation, logits_1v: Tensor) -> int | ValueError:
    try:
        return _choose_in_group([row], logits_1v)[0]
    except ValueError as error:
        return error
