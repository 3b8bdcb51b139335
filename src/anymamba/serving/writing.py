"""Continuations of prompts: rows that take a place, get a token each at every step, and leave when they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from anymamba.generation.state import GenerationState
from anymamba.generation.tokenizers import Tokenizer
from anymamba.serving.jobs import Ended, Job, Outbox, Ready, Wrote
from anymamba.serving.rows import Row, choose_tokens
from anymamba.serving.slots import Slots


class _Place:
    """A row that is being decoded, its job, and its number in the job."""

    def __init__(self, job: Job, number: int, row: Row) -> None:
        self.job, self.number, self.row = job, number, row


class Writer:
    """Continues the rows of jobs whose prompts have been read, one token of every row at a time.

    Args:
        slots: hold the states of the rows.
        tokenizer: of the model's text.
        vocab_size: of the model.
        outbox: for events.
        is_over: whether a job's time is up.

    Attributes:
        tokens_written: since the start.
        steps: since the start.
    """

    def __init__(
        self, slots: Slots, tokenizer: Tokenizer, vocab_size: int, outbox: Outbox, is_over: Callable[[Job], bool]
    ) -> None:
        """No row is there yet."""
        self.slots, self._tokenizer, self._vocab_size = slots, tokenizer, vocab_size
        self._outbox, self._is_over = outbox, is_over
        self._ready: deque[Ready] = deque()
        self._places: list[_Place] = []
        self.tokens_written = self.steps = 0

    @property
    def running(self) -> int:
        """How many rows are being decoded."""
        return len(self._places)

    @property
    def ready(self) -> int:
        """How many rows wait for a place."""
        return sum(len(r.job.plans) - r.next for r in list(self._ready))

    @property
    def is_idle(self) -> bool:
        """Whether there is no row."""
        return not (self._ready or self._places)

    def add(self, ready: Ready) -> None:
        """Let a job's rows wait for places."""
        self._ready.append(ready)

    def clear(self) -> set[Job]:
        """Give up all rows; returns their jobs."""
        jobs = {place.job for place in self._places} | {ready.job for ready in self._ready}
        self._places, self._ready = [], deque()
        self.slots.clear()
        return jobs

    def has_room(self) -> bool:
        """Whether every row that was ready has found a place."""
        self.seat()
        return not self._ready

    def seat(self) -> None:
        """Let rows that are ready take their first token, and a place if they need further ones."""
        while self._ready and self.slots.used < self.slots.capacity:
            ready = self._ready[0]
            job, number = ready.job, ready.next
            ready.next += 1
            if ready.next >= len(job.plans) or job.cancelled:
                self._ready.popleft()
            if not job.cancelled and number < len(job.plans):
                self._begin(job, number, ready.state)

    def _begin(self, job: Job, number: int, state: GenerationState) -> None:
        try:
            key = int(state.keys[0]) if job.keys is None else job.keys[number]
            if job.keys is not None:
                state = state._replace(counts=torch.zeros_like(state.counts))
            row = Row(job.plans[number], self._tokenizer, self._vocab_size, state, key)
            place = _Place(job, number, row)
            if row.plan.max_tokens == 0:
                self._end(place, row.end_now(), lambda: state)
                return
            self._take(place, choose_tokens([row], state.logits)[0], state.logits)
            if row.reason is not None and not (row.must_feed and job.on_end is not None):
                self._end(place, "", lambda: row.state(state.cache, state.logits))
                return
            self.slots.join(state.cache)
        except Exception as error:  # of this job only
            self._outbox.fail(job, error)
            return
        self._places.append(place)

    def step(self) -> None:
        """Feed every row its token and let it take the next; rows that have ended or were given up leave."""
        self._leave([i for i, place in enumerate(self._places) if place.job.cancelled])
        self._expire()
        if not self._places:
            return
        try:
            pending: list[Any] = [place.row.pending for place in self._places]
            logits_bv = self.slots.step(pending)
        except Exception as error:  # it may belong to any of them
            for job in {place.job for place in self._places}:
                self._outbox.fail(job, error)
            self._leave(range(len(self._places)))
            return
        self.steps += 1
        for place in self._places:
            place.row.fed()
        going = [i for i, place in enumerate(self._places) if place.row.reason is None]
        rows = [self._places[i].row for i in going]
        tokens = dict(zip(going, choose_tokens(rows, _some(logits_bv, going)), strict=True))
        self._leave([i for i in range(len(self._places)) if self._advance(i, tokens.get(i), logits_bv[i : i + 1])])

    def _advance(self, i: int, token: int | ValueError | None, logits_1v: Tensor) -> bool:
        """Let a row whose pending token was fed take the next, if it has not ended; returns whether it is done."""
        place = self._places[i]
        row = place.row
        try:
            if token is not None:
                self._take(place, token, logits_1v)
                if row.reason is None or (row.must_feed and place.job.on_end is not None):
                    return False
            self._end(place, "", lambda: row.state(self.slots.row(i), logits_1v.clone()))
        except Exception as error:  # of this job only
            self._outbox.fail(place.job, error)
        return True

    def _take(self, place: _Place, token: int | ValueError, logits_1v: Tensor) -> None:
        if isinstance(token, ValueError):
            raise token
        piece = place.row.take(token, logits_1v)
        self.tokens_written += 1
        self._outbox.add(place.job, Wrote(place.number, piece))

    def _end(self, place: _Place, rest: str, state: Callable[[], GenerationState]) -> None:
        job, row = place.job, place.row
        assert row.reason is not None
        if job.on_end is not None and not job.cancelled:
            job.on_end(row, state())
        self._outbox.add(job, Ended(place.number, row.reason, rest))

    def _expire(self) -> None:
        """End rows whose time is up."""
        late = [i for i, place in enumerate(self._places) if self._is_over(place.job)]
        for place in (self._places[i] for i in late):
            rest = place.row.end_now() if place.row.reason is None else ""
            assert place.row.reason is not None
            self._outbox.add(place.job, Ended(place.number, place.row.reason, rest))
        self._leave(late)

    def _leave(self, places: Iterable[int]) -> None:
        for i in sorted(places, reverse=True):
            self.slots.leave(i)
            self._places[i] = self._places[-1]
            self._places.pop()


def _some(x: Tensor, rows: list[int]) -> Tensor:
    """Some rows of a tensor, without a copy if they are all of them."""
    return x if len(rows) == x.shape[0] else x[rows]
