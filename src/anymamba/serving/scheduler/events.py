"""What the engine is asked to do, and what it answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from anymamba.generation.completion import Reason
from anymamba.generation.sampling import TokenScore
from anymamba.generation.state import GenerationState
from anymamba.serving.scheduler.continuation import Continuation, ContinuationOptions, TokenText


class PrefillStart(NamedTuple):
    """Where reading starts.

    Attributes:
        state: what was read before, None for a fresh start.
        ids: what is still to be read.
        reused: tokens that the state has read.
    """

    state: GenerationState | None
    ids: list[int]
    reused: int


class PromptDone(NamedTuple):
    """The prompt was read: `read` tokens, after `reused` ones that a kept state had read; scores if asked for."""

    read: int
    reused: int
    prompt_scores: list[list[TokenScore]]


class TokenEvent(NamedTuple):
    """A row has a new token."""

    row: int
    piece: TokenText


class SequenceDone(NamedTuple):
    """A row has ended, with the rest of its text; it has no further events."""

    row: int
    reason: Reason
    rest: str


class Failed(NamedTuple):
    """The job was given up; it has no further events."""

    error: BaseException


class ShuttingDown(RuntimeError):  # noqa: N818
    """The engine was closed before a job was done."""


Event = PromptDone | TokenEvent | SequenceDone | Failed


class Job:
    """One prompt and its continuations. The callbacks run in the engine's thread, except `emit`.

    Args:
        find: where reading starts; called when the job's turn has come, so that it sees the latest states.
        plans: of the continuations.
        keys: each continuation's identity for sampling; None to continue as the state has it.
        emit: takes the events, in the thread of the engine's `deliver`.
        deadline: on the clock of `time.monotonic`.
        should_cache_at: whether the state after a number of new tokens, before the end, is wanted.
        on_read: takes the states that are wanted and the one at the prompt's end, each with its number of new tokens.
        on_end: takes a row and its last state.
        score_prompt: how many most likely tokens are scored beside each token of the prompt; None for no scores.
        length: an estimate of the tokens to read, so that short prompts do not wait for long ones.
    """

    def __init__(
        self,
        *,
        find: Callable[[], PrefillStart],
        plans: list[ContinuationOptions],
        keys: list[int] | None,
        emit: Callable[[Event], None],
        deadline: float = float("inf"),
        should_cache_at: Callable[[int], bool] = lambda _: False,
        on_read: Callable[[int, GenerationState], None] | None = None,
        on_end: Callable[[Continuation, GenerationState], None] | None = None,
        score_prompt: int | None = None,
        length: int = 0,
    ) -> None:
        """Nothing is read or written yet."""
        self.find, self.plans, self.keys, self.emit, self.deadline = find, plans, keys, emit, deadline
        self.should_cache_at, self.on_read, self.on_end, self.score_prompt = (
            should_cache_at,
            on_read,
            on_end,
            score_prompt,
        )
        self.length = length
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Give up the job at the next token."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether it was given up."""
        return self._cancelled.is_set()


class PrefilledJob:
    """A job whose prompt was read, and the number of its next continuation without a place."""

    def __init__(self, job: Job, state: GenerationState) -> None:
        """The first continuation is next."""
        self.job, self.state, self.next = job, state, 0


Deliver = Callable[[list[tuple[Job, Event]]], None]


class Outbox:
    """Events of a round, until they are delivered. A job that was given up gets none.

    Args:
        deliver: takes the events, in the engine's thread.
    """

    def __init__(self, deliver: Deliver) -> None:
        """Hold no events."""
        self._deliver = deliver
        self._events: list[tuple[Job, Event]] = []

    def add(self, job: Job, event: Event) -> None:
        """Hold an event for a job."""
        if not job.cancelled:
            self._events.append((job, event))

    def fail(self, job: Job, error: BaseException) -> None:
        """Give up a job; its other rows leave at the next token."""
        self.add(job, Failed(error))
        job.cancel()

    def flush(self) -> None:
        """Deliver what is held."""
        events, self._events = self._events, []
        if events:
            self._deliver(events)
