"""Jobs and their continuations: what the engine is asked for, how tokens are chosen, and the events it emits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.generation.completion import CompletionBuilder, Reason
from anymamba.generation.sampling import Sampling, TokenScore, draw_uniform, sample_tokens, score_token
from anymamba.generation.state import GenerationState
from anymamba.generation.tokenizers import Tokenizer
from anymamba.models.cache import LMCache


class TokenText(NamedTuple):
    """A token and what it adds to the text.

    Attributes:
        token: Token id.
        text: Text that can no longer change, which may be empty.
        scores: Log-probabilities of the token and then of the most likely ones, if requested.
    """

    token: int
    text: str
    scores: list[TokenScore]


class PrefillStart(NamedTuple):
    """The beginning of a prefill.

    Attributes:
        state: Cached state to continue from, or None for an empty cache.
        ids: Tokens that are still to be read.
        cached_tokens: Number of tokens that the state has read.
    """

    state: GenerationState | None
    ids: list[int]
    cached_tokens: int


class PromptDone(NamedTuple):
    """The prompt of a job has been read.

    Attributes:
        new_tokens: Number of tokens that were read.
        cached_tokens: Number of tokens that a cached state had read before.
        prompt_scores: Scores of each token of the prompt, if requested.
        prompt_ids: Tokens of the prompt; filled in by the service.
    """

    new_tokens: int
    cached_tokens: int
    prompt_scores: list[list[TokenScore]]
    prompt_ids: Sequence[int] = ()


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
    """The options of a continuation.

    Attributes:
        sampling: Rule by which tokens are chosen, with its seed set.
        max_tokens: Largest number of tokens.
        end_tokens: Tokens that end the continuation.
        stop_texts: Texts before which the continuation ends.
        logprobs: Number of most likely tokens to score for each token, or None for no scores.
        feed_final_token: True if the final state has read every token, including one that ended the continuation.
    """

    sampling: Sampling
    max_tokens: int
    end_tokens: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    logprobs: int | None = None
    feed_final_token: bool = False


class Job:
    """One prompt and its continuations. The callbacks run in the engine's thread, except `emit`.

    Args:
        find_start: Returns where the prefill begins; called when the job is scheduled, so that it sees the states that
            other jobs have left until then.
        continuations: Options of each continuation.
        sampling_keys: Sampling key of each continuation, or None to continue with the key of the state.
        emit: Takes the events, in the thread of the engine's `deliver`.
        deadline: Time limit on the clock of `time.monotonic`.
        should_cache_at: Returns whether to cache the state after a number of new tokens, before the end.
        on_read: Takes those states and the one at the end of the prompt, each with its number of new tokens.
        on_end: Takes each continuation with its final state.
        prompt_logprobs: Number of most likely tokens to score for each token of the prompt, or None for no scores.
        estimated_len: Estimate of the tokens to read, so that short prompts do not wait for long ones.
    """

    def __init__(
        self,
        *,
        find_start: Callable[[], PrefillStart],
        continuations: list[ContinuationOptions],
        sampling_keys: list[int] | None,
        emit: Callable[[Event], None],
        deadline: float = float("inf"),
        should_cache_at: Callable[[int], bool] = lambda _: False,
        on_read: Callable[[int, GenerationState], None] | None = None,
        on_end: Callable[[Continuation, GenerationState], None] | None = None,
        prompt_logprobs: int | None = None,
        estimated_len: int = 0,
    ) -> None:
        """Describe a job; it does not run before it is submitted."""
        self.find_start = find_start
        self.continuations = continuations
        self.sampling_keys = sampling_keys
        self.emit = emit
        self.deadline = deadline
        self.should_cache_at = should_cache_at
        self.on_read = on_read
        self.on_end = on_end
        self.prompt_logprobs = prompt_logprobs
        self.estimated_len = estimated_len
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """End the job before its next token, without further events."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        """True once the job was cancelled or has failed."""
        return self._cancelled.is_set()


class PrefilledJob:
    """A job whose prompt was read.

    Attributes:
        job: The job.
        state: State at the end of the prompt.
        next_index: Index of the next continuation to admit.
    """

    def __init__(self, job: Job, state: GenerationState) -> None:
        """Begin with the first continuation."""
        self.job = job
        self.state = state
        self.next_index = 0


class Outbox:
    """The events of a round, until they are delivered. A cancelled job gets none.

    Args:
        deliver: Takes the events, in the engine's thread.
    """

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

    Attributes:
        options: Options of the continuation.
        completion: Text so far, and why it ended.
        pending_token: Token that was chosen and not yet read by the model, or None.
        sampling_group: Equal for continuations whose tokens are chosen by the same rule, apart from their seeds.
    """

    def __init__(
        self, options: ContinuationOptions, tokenizer: Tokenizer, vocab_size: int, state: GenerationState, key: int
    ) -> None:
        """Begin at the end of a prompt.

        Args:
            options: Options of the continuation.
            tokenizer: Tokenizer of the model.
            vocab_size: Number of tokens that may be chosen.
            state: State of one row.
            key: Sampling key of the continuation.
        """
        self.options = options
        self.completion = CompletionBuilder(
            tokenizer,
            end_tokens=options.end_tokens,
            stop_texts=options.stop_texts,
            max_tokens=options.max_tokens,
        )
        self.pending_token: int | None = None
        self.sampling_group = _sampling_group(options.sampling)
        self._vocab_size = vocab_size
        self._seen_v = state.seen[0].clone()
        self._key = key
        self._draws = int(state.counts[0])
        self._token_counts: Counter[int] = Counter()

    def add_token(self, token: int, logits_1v: Tensor) -> TokenText:
        """Add a token that was chosen from these logits."""
        if self.options.sampling.needs_token_counts:
            self._token_counts[token] += 1
        scores: list[TokenScore] = []
        if self.options.logprobs is not None:
            scores = score_token(logits_1v[0, : self._vocab_size], token, self.options.logprobs)
        self.pending_token = token
        return TokenText(token, self.completion.add(token), scores)

    def mark_fed(self) -> None:
        """Note that the model has read the pending token."""
        assert self.pending_token is not None
        self._seen_v[self.pending_token] = True
        self._draws += 1
        self.pending_token = None

    @property
    def needs_final_feed(self) -> bool:
        """True if the final state must read the pending token."""
        is_fed = self.options.feed_final_token or self.completion.reason == "length"
        return self.pending_token is not None and is_fed

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


def _sampling_group(sampling: Sampling) -> Hashable:
    fields = {**vars(sampling), "seed": None, "logit_bias": tuple((sampling.logit_bias or {}).items())}
    return tuple(fields.items())


def choose_tokens(rows: Sequence[Continuation], logits_bv: Tensor) -> list[int | ValueError]:
    """Choose the next token of each row; one call chooses for all rows with the same rule.

    Args:
        rows: Continuations that have not ended.
        logits_bv: Logits of each row.

    Returns:
        A token for each row, or the error of a row whose logits are not finite.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.sampling_group, []).append(i)
    tokens_by_row: dict[int, int | ValueError] = {}
    for group in groups.values():
        group_logits_bv = logits_bv if len(group) == len(rows) else logits_bv[group]
        try:
            tokens: list[int | ValueError] = [*_choose_in_group([rows[i] for i in group], group_logits_bv)]
        except ValueError:  # caused by one row, which must not fail the others
            tokens = [_choose_alone(rows[i], logits_bv[i : i + 1]) for i in group]
        tokens_by_row.update(zip(group, tokens, strict=True))
    return [tokens_by_row[i] for i in range(len(rows))]


def _choose_in_group(rows: list[Continuation], logits_bv: Tensor) -> list[int]:
    sampling = rows[0].options.sampling
    vocab_size = rows[0]._vocab_size
    seen_bv = None
    if sampling.repetition_penalty != 1:
        seen_bv = torch.stack([row._seen_v[:vocab_size] for row in rows])
    uniforms = [row.draw_uniform() for row in rows]
    counts = [row._token_counts for row in rows]
    return sample_tokens(logits_bv[:, :vocab_size], sampling, uniforms, seen_bv, counts).tolist()


def _choose_alone(row: Continuation, logits_1v: Tensor) -> int | ValueError:
    try:
        return _choose_in_group([row], logits_1v)[0]
    except ValueError as error:
        return error
