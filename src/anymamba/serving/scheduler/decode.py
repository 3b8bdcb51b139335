"""Decoding: continuations that occupy a slot, get one token each per step, and leave when they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.core.registry import are_kernels_off
from anymamba.generation.decoder import Decoder
from anymamba.generation.state import GenerationState
from anymamba.generation.tokenizers import Tokenizer
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM
from anymamba.serving.scheduler.continuation import (
    Continuation,
    Job,
    Outbox,
    PrefilledJob,
    SequenceDone,
    TokenEvent,
    choose_tokens,
    select_rows,
)
from anymamba.serving.scheduler.growing_slots import GrowingSlots

DEFAULT_ROWS = 64


class DecodeSlots:
    """Slots 0 to `used` - 1 of a cache, each with the state of one row, in memory that does not move.

    The compiled kernels compute a row the same way in any batch. Without them the last bits of a row depend on its
    batch, so each row is stepped alone, unless `together` prefers speed.

    Args:
        model: Language model.
        capacity: Largest number of rows.
        together: True to step all rows in one batch, False to step each alone, None for one batch where the compiled
            kernels run.
    """

    def __init__(self, model: MambaLM, capacity: int = DEFAULT_ROWS, together: bool | None = None) -> None:
        """Begin with one empty slot; the cache grows with the number of rows."""
        if capacity < 1:
            raise ValueError(f"rows must be at least 1, got {capacity}")
        self.capacity = capacity
        self.used = 0
        self._model = model
        self._decoder = Decoder(model)
        self._cache = model.init_cache(1)
        is_compiled = not self._decoder.reason and not are_kernels_off()
        self.together = is_compiled if together is None else together

    def insert(self, cache: LMCache) -> None:
        """Copy the cache of one row to the next slot."""
        size = self._cache.batch_size
        if self.used == size:
            self._grow(min(self.capacity, 2 * size))
        for x, row in zip(self._cache.leaves(), cache.leaves(), strict=True):
            x[self.used : self.used + 1] = row
        self.used += 1

    def remove(self, slot: int) -> None:
        """Free a slot; the row of the last one moves there."""
        self.used -= 1
        if slot != self.used:
            for x in self._cache.leaves():
                x[slot] = x[self.used]

    def clear(self) -> None:
        """Free all slots."""
        self.used = 0

    def copy_row(self, slot: int) -> LMCache:
        """Return a copy of the cache in a slot."""
        return self._cache.with_tensors(x[slot : slot + 1].clone() for x in self._cache.leaves())

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Feed one token to the row in each used slot; return the logits of the next tokens, (b, v)."""
        ids_b = torch.tensor(tokens, device=self._model.device)
        if self.together:
            return self._step_range(ids_b, 0, self.used)
        return torch.cat([self._step_range(ids_b[slot : slot + 1], slot, slot + 1) for slot in range(self.used)])

    def _step_range(self, ids_b: Tensor, begin: int, end: int) -> Tensor:
        views = self._cache.with_tensors(x[begin:end] for x in self._cache.leaves())
        logits_bv, new_cache = self._decoder.step(ids_b, views, in_place=True)
        for x, new in zip(views.leaves(), new_cache.leaves(), strict=True):
            if x.data_ptr() != new.data_ptr():  # the portable step returns a new cache
                x.copy_(new)
        return logits_bv

    def _grow(self, size: int) -> None:
        def enlarge(x: Tensor) -> Tensor:
            enlarged = torch.zeros((size, *x.shape[1:]), dtype=x.dtype, device=x.device)
            enlarged[: x.shape[0]] = x
            return enlarged

        self._cache = self._cache.with_tensors(map(enlarge, self._cache.leaves()))


Slots = DecodeSlots | GrowingSlots


class ActiveRow(NamedTuple):
    """A continuation that is being decoded, its job, and its index among its continuations."""

    job: Job
    choice: int
    continuation: Continuation

    @property
    def is_done(self) -> bool:
        """True if the continuation has ended, and its final state needs no further token."""
        if self.continuation.completion.reason is None:
            return False
        return not (self.continuation.needs_final_feed and self.job.on_end is not None)


class DecodeLoop:
    """Continues jobs whose prompts have been read, one token of every continuation at a time.

    `is_over` returns whether the time of a job has run out; its rows then end.
    """

    def __init__(
        self, slots: Slots, tokenizer: Tokenizer, vocab_size: int, outbox: Outbox, is_over: Callable[[Job], bool]
    ) -> None:
        """Begin with no rows."""
        self.slots = slots
        self.tokens_written = 0  # chosen since the start
        self.steps = 0  # since the start
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._outbox = outbox
        self._is_over = is_over
        self._prefilled: deque[PrefilledJob] = deque()
        self._rows: list[ActiveRow] = []  # the row of each slot

    @property
    def running(self) -> int:
        """Number of rows that are being decoded."""
        return len(self._rows)

    @property
    def ready(self) -> int:
        """Number of continuations that wait for a slot."""
        return sum(len(prefilled.job.continuations) - prefilled.next_index for prefilled in list(self._prefilled))

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to decode."""
        return not (self._prefilled or self._rows)

    def add(self, prefilled: PrefilledJob) -> None:
        """Queue the continuations of a job for slots."""
        self._prefilled.append(prefilled)

    def clear(self) -> set[Job]:
        """Drop all continuations; return their jobs."""
        jobs = {row.job for row in self._rows} | {prefilled.job for prefilled in self._prefilled}
        self._rows = []
        self._prefilled = deque()
        self.slots.clear()
        return jobs

    def admit(self) -> bool:
        """Choose the first token of queued continuations, and admit those that need more to free slots.

        Return whether none is left in the queue.
        """
        while self._prefilled and self.slots.used < self.slots.capacity:
            prefilled = self._prefilled[0]
            job = prefilled.job
            index = prefilled.next_index
            prefilled.next_index += 1
            if prefilled.next_index >= len(job.continuations) or job.is_cancelled:
                self._prefilled.popleft()
            if not job.is_cancelled and index < len(job.continuations):
                try:
                    self._begin(job, index, prefilled.state)
                except BaseException as error:  # even one of a native library concerns only this job
                    self._outbox.fail(job, error)
        return not self._prefilled

    def _begin(self, job: Job, index: int, state: GenerationState) -> None:
        # 1) Continuations of a prompt draw by keys of their own, those of a session by the key in its state.
        key = int(state.keys[0])
        if job.sampling_keys is not None:
            key = job.sampling_keys[index]
            state = state._replace(counts=torch.zeros_like(state.counts))
        continuation = Continuation(job.continuations[index], self._tokenizer, self._vocab_size, state, key)
        row = ActiveRow(job, index, continuation)
        # 2) A continuation of no tokens has ended before its first.
        if continuation.options.max_tokens == 0:
            self._end(row, continuation.completion.finish(), lambda: state)
            return
        # 3) The first token comes from the logits of the prompt.
        self._add_token(row, choose_tokens([continuation], state.logits)[0], state.logits)
        if row.is_done:
            self._end(row, "", lambda: continuation.make_state(state.cache, state.logits))
            return
        # 4) Further ones need a slot.
        self.slots.insert(state.cache)
        self._rows.append(row)

    def step(self) -> None:
        """Decode one token of every row."""
        # 1) Rows whose job was cancelled, or whose time has run out, leave.
        self._remove([i for i, row in enumerate(self._rows) if row.job.is_cancelled])
        self._end_overdue()
        if not self._rows:
            return
        # 2) The model reads the pending token of every row.
        try:
            pending: list[Any] = [row.continuation.pending_token for row in self._rows]
            logits_bv = self.slots.step(pending)
        except Exception as error:  # any of the rows may have caused it
            for job in {row.job for row in self._rows}:
                self._outbox.fail(job, error)
            self._remove(range(len(self._rows)))
            return
        self.steps += 1
        for row in self._rows:
            row.continuation.mark_fed()
        # 3) Rows that have not ended choose their next token.
        unfinished = [i for i, row in enumerate(self._rows) if row.continuation.completion.reason is None]
        continuations = [self._rows[i].continuation for i in unfinished]
        tokens = choose_tokens(continuations, select_rows(logits_bv, unfinished))
        token_by_row = dict(zip(unfinished, tokens, strict=True))
        # 4) Rows that are done leave.
        rows = range(len(self._rows))
        self._remove([i for i in rows if self._advance(i, token_by_row.get(i), logits_bv[i : i + 1])])

    def _advance(self, i: int, token: int | ValueError | None, logits_1v: Tensor) -> bool:
        """Add the next token to a row; return whether the row is done. The token is None if the text had ended."""
        row = self._rows[i]
        try:
            if token is not None:
                self._add_token(row, token, logits_1v)
                if not row.is_done:
                    return False
            self._end(row, "", lambda: row.continuation.make_state(self.slots.copy_row(i), logits_1v.clone()))
        except BaseException as error:  # even one of a native library concerns only this job
            self._outbox.fail(row.job, error)
        return True

    def _add_token(self, row: ActiveRow, token: int | ValueError, logits_1v: Tensor) -> None:
        if isinstance(token, ValueError):
            raise token
        token_text = row.continuation.add_token(token, logits_1v)
        self.tokens_written += 1
        self._outbox.add(row.job, TokenEvent(row.choice, token_text))

    def _end(self, row: ActiveRow, rest: str, make_state: Callable[[], GenerationState]) -> None:
        if row.job.on_end is not None and not row.job.is_cancelled:
            row.job.on_end(row.continuation, make_state())
        self._emit_end(row, rest)

    def _emit_end(self, row: ActiveRow, rest: str) -> None:
        reason = row.continuation.completion.reason
        assert reason is not None
        self._outbox.add(row.job, SequenceDone(row.choice, reason, rest))

    def _end_overdue(self) -> None:
        """End the rows whose time has run out; their states are not handed out."""
        overdue = [i for i, row in enumerate(self._rows) if self._is_over(row.job)]
        for row in (self._rows[i] for i in overdue):
            self._emit_end(row, row.continuation.completion.finish())
        self._remove(overdue)

    def _remove(self, rows: Iterable[int]) -> None:
        for i in sorted(rows, reverse=True):
            self.slots.remove(i)
            self._rows[i] = self._rows[-1]
            self._rows.pop()
