"""Continuations of prompts: rows that take a place, get a token each at every step, and leave when they end.

§ The rows that are decoded together, in memory that stays where it is: to join or leave costs the copy of one row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from anymamba.core.registry import are_kernels_off
from anymamba.generation.decoder import Decoder
from anymamba.generation.state import GenerationState
from anymamba.generation.tokenizers import Tokenizer
from anymamba.kernels.cpu.step_program import MAX_ROWS
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM
from anymamba.serving.scheduler.continuation import Continuation, choose_tokens
from anymamba.serving.scheduler.events import Job, Outbox, PrefilledJob, SequenceDone, TokenEvent


class DecodeSlots:
    """Places 0 to `used` - 1 of a cache, each with the state of one row.

    The compiled kernels compute a row the same in any batch of up to `MAX_ROWS`. Where they do not run, the last bits
    of a row depend on its batch, so each row is stepped alone there, unless `together` asks for speed.

    Args:
        model: the language model.
        capacity: the most rows, at most `MAX_ROWS`.
        together: whether rows share a step; if not given, they do where the kernels run.

    Raises:
        ValueError: a capacity out of range.
    """

    def __init__(self, model: MambaLM, capacity: int = MAX_ROWS, together: bool | None = None) -> None:
        """Take no memory yet."""
        if not 1 <= capacity <= MAX_ROWS:
            raise ValueError(f"rows must be between 1 and {MAX_ROWS}, got {capacity}")
        self.decoder, self.capacity, self.used = Decoder(model), capacity, 0
        compiled = not self.decoder.reason and not are_kernels_off()
        self.together = compiled if together is None else together
        self._model, self._cache = model, model.init_cache(1)

    def join(self, cache: LMCache) -> None:
        """Copy the state of one row to the next place."""
        size = self._cache.batch_size
        if self.used == size:
            self._grow(min(self.capacity, 2 * size))
        for mine, new in zip(self._cache.leaves(), cache.leaves(), strict=True):
            mine[self.used : self.used + 1] = new
        self.used += 1

    def leave(self, place: int) -> None:
        """Give up a place; the row in the last one moves there."""
        self.used -= 1
        if place != self.used:
            for x in self._cache.leaves():
                x[place] = x[self.used]

    def clear(self) -> None:
        """Give up all places."""
        self.used = 0

    def row(self, place: int) -> LMCache:
        """A copy of the state in a place."""
        return self._cache.with_tensors(x[place : place + 1].clone() for x in self._cache.leaves())

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Feed one token to each row.

        Args:
            tokens: as many as places are used.

        Returns:
            The logits of the next token of each, (b, v).
        """
        ids = torch.tensor(tokens, device=self._model.device)
        if self.together:
            return self._step(ids, 0, self.used)
        return torch.cat([self._step(ids[place : place + 1], place, place + 1) for place in range(self.used)])

    def _step(self, ids: Tensor, begin: int, end: int) -> Tensor:
        views = self._cache.with_tensors(x[begin:end] for x in self._cache.leaves())
        logits, new = self.decoder.step(ids, views, in_place=True)
        for mine, x in zip(views.leaves(), new.leaves(), strict=True):
            if mine.data_ptr() != x.data_ptr():  # the model's own code ran, which makes a new cache
                mine.copy_(x)
        return logits

    def _grow(self, size: int) -> None:
        def grown(x: Tensor) -> Tensor:
            wider = torch.zeros((size, *x.shape[1:]), dtype=x.dtype, device=x.device)
            wider[: x.shape[0]] = x
            return wider

        self._cache = self._cache.with_tensors(map(grown, self._cache.leaves()))


class ActiveRow:
    """A row that is being decoded, its job, and its number in the job."""

    def __init__(self, job: Job, number: int, row: Continuation) -> None:
        """Bind the row to its job."""
        self.job, self.number, self.row = job, number, row


class DecodeLoop:
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
        self, slots: DecodeSlots, tokenizer: Tokenizer, vocab_size: int, outbox: Outbox, is_over: Callable[[Job], bool]
    ) -> None:
        """No row is there yet."""
        self.slots, self._tokenizer, self._vocab_size = slots, tokenizer, vocab_size
        self._outbox, self._is_over = outbox, is_over
        self._ready: deque[PrefilledJob] = deque()
        self._places: list[ActiveRow] = []
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

    def add(self, ready: PrefilledJob) -> None:
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
        self.admit()
        return not self._ready

    def admit(self) -> None:
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
            row = Continuation(job.plans[number], self._tokenizer, self._vocab_size, state, key)
            place = ActiveRow(job, number, row)
            if row.plan.max_tokens == 0:
                self._end(place, row.completion.finish(), lambda: state)
                return
            self._take(place, choose_tokens([row], state.logits)[0], state.logits)
            if row.completion.reason is not None and not (row.must_feed and job.on_end is not None):
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
        going = [i for i, place in enumerate(self._places) if place.row.completion.reason is None]
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
                if row.completion.reason is None or (row.must_feed and place.job.on_end is not None):
                    return False
            self._end(place, "", lambda: row.state(self.slots.row(i), logits_1v.clone()))
        except Exception as error:  # of this job only
            self._outbox.fail(place.job, error)
        return True

    def _take(self, place: ActiveRow, token: int | ValueError, logits_1v: Tensor) -> None:
        if isinstance(token, ValueError):
            raise token
        piece = place.row.take(token, logits_1v)
        self.tokens_written += 1
        self._outbox.add(place.job, TokenEvent(place.number, piece))

    def _end(self, place: ActiveRow, rest: str, state: Callable[[], GenerationState]) -> None:
        job, row = place.job, place.row
        assert row.completion.reason is not None
        if job.on_end is not None and not job.cancelled:
            job.on_end(row, state())
        self._outbox.add(job, SequenceDone(place.number, row.completion.reason, rest))

    def _expire(self) -> None:
        """End rows whose time is up."""
        late = [i for i, place in enumerate(self._places) if self._is_over(place.job)]
        for place in (self._places[i] for i in late):
            rest = place.row.completion.finish() if place.row.completion.reason is None else ""
            assert place.row.completion.reason is not None
            self._outbox.add(place.job, SequenceDone(place.number, place.row.completion.reason, rest))
        self._leave(late)

    def _leave(self, places: Iterable[int]) -> None:
        for i in sorted(places, reverse=True):
            self.slots.leave(i)
            self._places[i] = self._places[-1]
            self._places.pop()


def _some(x: Tensor, rows: list[int]) -> Tensor:
    """Some rows of a tensor, without a copy if they are all of them."""
    return x if len(rows) == x.shape[0] else x[rows]
