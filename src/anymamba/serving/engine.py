"""One loop for all requests: rows join and leave between two tokens, and prompts are read in between.

A row gives what `generate` gives alone from the same state with the same seed, bit for bit: a prompt is read by itself,
in segments cut at multiples of `segment_len` from where reading starts, whatever else goes on; and rows are decoded
together only where a row does not depend on its batch (`Slots`).
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymamba.generation.sampling import row_key
from anymamba.generation.state import GenerationState
from anymamba.generation.tokenizers import Tokenizer
from anymamba.kernels.cpu.program import MAX_ROWS
from anymamba.models.lm import MambaLM
from anymamba.serving.jobs import Began, Ended, Event, Failed, Job, Reading, Ready, ShuttingDown, Wrote
from anymamba.serving.rows import Row, Scored, choose_tokens, score
from anymamba.serving.slots import Slots

SEGMENT_LEN = 256
_HALF_READ = 8  # prompts that are begun at a time: each holds a state

Deliver = Callable[[list[tuple[Job, Event]]], None]


class _Place:
    """A row that is decoded, the job it belongs to, and its number there."""

    def __init__(self, job: Job, number: int, row: Row) -> None:
        self.job, self.number, self.row = job, number, row


class Engine:
    """Reads prompts and continues them, in a thread of its own.

    Args:
        model: the language model.
        tokenizer: of its text.
        deliver: takes the events of a round, in the engine's thread.
        rows: the most rows that are decoded together.
        segment_len: tokens of a prompt that are read at once.
        stall: seconds that reading may take between two tokens of others; at least one segment is read.
        together: as for `Slots`.
    """

    def __init__(
        self,
        model: MambaLM,
        tokenizer: Tokenizer,
        deliver: Deliver,
        *,
        rows: int = MAX_ROWS,
        segment_len: int = SEGMENT_LEN,
        stall: float = 0.1,
        together: bool | None = None,
    ) -> None:
        """Start the thread."""
        if segment_len < 1:
            raise ValueError(f"segment_len must be at least 1, got {segment_len}")
        self.model, self.tokenizer, self.segment_len = model, tokenizer, segment_len
        self._deliver, self._stall, self._slots = deliver, stall, Slots(model, rows, together)
        self._new: deque[Job] = deque()  # shared with other threads, under the condition
        self._changed, self._closing, self._deadline = threading.Condition(threading.RLock()), False, float("inf")
        self._reading: list[Reading] = []
        self._oldest_next = True
        self._ready: deque[Ready] = deque()
        self._places: list[_Place] = []
        self._events: list[tuple[Job, Event]] = []
        self.tokens_read = self.tokens_written = self.steps = 0
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Ask for a job.

        Raises:
            RuntimeError: the engine was closed.
        """
        with self._changed:
            if self._closing:
                raise RuntimeError("the engine was closed")
            self._new.append(job)
            self._changed.notify()

    def close(self) -> None:
        """End the thread at the next token; jobs that are not done fail."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def finish_by(self, deadline: float) -> None:
        """Let no job run longer than until then, on the clock of `time.monotonic`: replies end, prompts are refused."""
        self._deadline = deadline

    @property
    def load(self) -> dict[str, int]:
        """Rows that are decoded, rows that wait for a place, prompts that are read or wait to be."""
        ready = sum(len(r.job.plans) - r.next for r in list(self._ready))
        return {"running": len(self._places), "ready": ready, "waiting": len(self._reading) + len(self._new)}

    # The thread

    @torch.no_grad()
    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # which torch keeps for each thread
        while self._wait():
            try:
                self._round()
            except Exception as error:  # noqa: PERF203  # nobody's that we know of: all hear of it, and work continues
                traceback.print_exc(file=sys.stderr)
                self._give_up(error)
        self._give_up(ShuttingDown("the server is shutting down"))

    def _round(self) -> None:
        """Read for a while, then write a token of every row."""
        began = time.monotonic()
        while not self._closing and self._has_room() and self._read():
            self._take_new()
            if self._places and time.monotonic() - began >= self._stall:
                break
        self._seat()
        if self._places:
            self._step()
        self._flush()

    def _give_up(self, error: BaseException) -> None:
        """Fail every job."""
        jobs = {p.job for p in self._places} | {r.job for r in self._ready} | {r.job for r in self._reading}
        self._places, self._ready, self._reading = [], deque(), []
        self._slots.clear()
        for job in jobs:
            self._fail(job, error)
        self._flush()

    def _wait(self) -> bool:
        """Take new jobs, waiting for one if there is nothing to do; whether to carry on."""
        with self._changed:
            while not (self._new or self._reading or self._ready or self._places or self._closing):
                self._changed.wait()
            self._take_new()
            return not self._closing

    def _take_new(self) -> None:
        with self._changed:
            while self._new:
                self._reading.append(Reading(self._new.popleft()))

    def _is_over(self, job: Job) -> bool:
        return time.monotonic() >= min(job.deadline, self._deadline)

    def _has_room(self) -> bool:
        self._seat()
        return not self._ready

    def _say(self, job: Job, event: Event) -> None:
        if not job.cancelled:
            self._events.append((job, event))

    def _flush(self) -> None:
        events, self._events = self._events, []
        if events:
            self._deliver(events)

    # Prompts

    def _read(self) -> bool:
        """Read a segment of a prompt that waits; whether there was one."""
        for reading in [r for r in self._reading if r.job.cancelled or self._is_over(r.job)]:
            self._say(reading.job, Failed(TimeoutError("the time for the request ran out before its prompt was read")))
            self._reading.remove(reading)
        if not self._reading:
            return False
        reading = self._next_reading()
        try:
            done = self._read_segment(reading)
        except Exception as error:  # of this job alone
            self._say(reading.job, Failed(error))
            self._reading.remove(reading)
            return True
        if done:
            self._reading.remove(reading)
            assert reading.state is not None
            self._ready.append(Ready(reading.job, reading.state))
        self._flush()
        return True

    def _next_reading(self) -> Reading:
        """In turns the prompt that came first and the one with the least to read, so that a long one holds up no
        short one, and is itself never held up by more than as much again."""
        self._oldest_next = not self._oldest_next
        if self._oldest_next:
            return self._reading[0]
        begun = [reading for reading in self._reading if reading.start is not None]
        return min(begun if len(begun) >= _HALF_READ else self._reading, key=lambda reading: reading.left)

    def _read_segment(self, reading: Reading) -> bool:
        """Read the next segment; whether the prompt is at its end."""
        job = reading.job
        if reading.start is None:
            reading.start = job.find()
            reading.state = reading.start.state
        ids, begin = reading.start.ids, reading.position
        if begin < len(ids):
            segment = ids[begin : begin + self.segment_len]
            reading.position = begin + len(segment)
            last = reading.position == len(ids)
            self._feed(reading, segment, last or job.kept_at(reading.position))
            self.tokens_read += len(segment)
            if not last:
                if job.on_read is not None and job.kept_at(reading.position):
                    assert reading.state is not None
                    job.on_read(reading.position, reading.state)
                return False
        if reading.state is None:
            raise ValueError("a prompt must have at least one token, got none")
        if job.on_read is not None:
            job.on_read(len(ids), reading.state)
        self._say(job, Began(len(ids), reading.start.reused, reading.scores))
        return True

    def _feed(self, reading: Reading, segment: list[int], with_logits: bool) -> None:
        """Run the model over a segment, as `MambaLM.forward` does with `logits="last"`, and score it if asked."""
        model, before = self.model, reading.state
        ids_1t = torch.tensor([segment], device=model.device)
        hidden_1td, cache = model.backbone(ids_1t, None if before is None else before.cache)
        width = model.config.padded_vocab_size
        logits_1v = model.lm_head(hidden_1td[:, -1:])[:, 0] if with_logits else hidden_1td.new_zeros(1, width)
        if reading.job.score_prompt is not None:
            self._score(reading, model.lm_head(hidden_1td)[0], segment)
        seen_1v = torch.zeros(1, width, dtype=torch.bool) if before is None else before.seen.clone()
        seen_1v[0, segment] = True
        keys = torch.zeros(1, dtype=torch.int64) if before is None else before.keys
        counts = torch.zeros(1, dtype=torch.int64) if before is None else before.counts
        reading.state = GenerationState(cache, logits_1v, seen_1v, keys, counts)

    def _score(self, reading: Reading, logits_tv: Tensor, segment: list[int]) -> None:
        """Score each token of a segment with the logits before it."""
        most, vocab = reading.job.score_prompt, self.model.config.vocab_size
        assert most is not None
        before = [reading.last_logits_1v, *logits_tv[:-1].split(1)]
        for logits_1v, token in zip(before, segment, strict=True):
            scores: list[Scored] = [] if logits_1v is None else score(logits_1v[0, :vocab], token, most)
            reading.scores.append(scores)
        reading.last_logits_1v = logits_tv[-1:].clone()

    # Continuations

    def _seat(self) -> None:
        """Let rows that are ready take their first token, and a place if they need another."""
        while self._ready and self._slots.used < self._slots.capacity:
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
            row = Row(job.plans[number], self.tokenizer, self.model.config.vocab_size, state, key)
            place = _Place(job, number, row)
            if row.plan.max_tokens == 0:
                self._end(place, row.end_now(), lambda: state)
                return
            self._take(place, choose_tokens([row], state.logits)[0], state.logits)
            if row.reason is not None and not (row.must_feed and job.on_end is not None):
                self._end(place, "", lambda: row.state(state.cache, state.logits))
                return
            self._slots.join(state.cache)
        except Exception as error:  # of this job alone
            self._fail(job, error)
            return
        self._places.append(place)

    def _take(self, place: _Place, token: int | ValueError, logits_1v: Tensor) -> None:
        if isinstance(token, ValueError):
            raise token
        piece = place.row.take(token, logits_1v)
        self.tokens_written += 1
        self._say(place.job, Wrote(place.number, piece))

    def _end(self, place: _Place, rest: str, state: Callable[[], GenerationState]) -> None:
        job, row = place.job, place.row
        assert row.reason is not None
        if job.on_end is not None and not job.cancelled:
            job.on_end(row, state())
        self._say(job, Ended(place.number, row.reason, rest))

    def _fail(self, job: Job, error: BaseException) -> None:
        """Give up a job; its other rows leave at the next token."""
        self._say(job, Failed(error))
        job.cancel()

    def _step(self) -> None:
        """Feed every row its token and let it take the next; rows that have ended or been given up leave."""
        self._leave([i for i, place in enumerate(self._places) if place.job.cancelled])
        self._expire()
        if not self._places:
            return
        try:
            pending: list[Any] = [place.row.pending for place in self._places]
            logits_bv = self._slots.step(pending)
        except Exception as error:  # it can belong to any of them
            for job in {place.job for place in self._places}:
                self._fail(job, error)
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
        """Let a row whose pending token was fed take the next, if it has not ended; whether it is done."""
        place = self._places[i]
        row = place.row
        try:
            if token is not None:
                self._take(place, token, logits_1v)
                if row.reason is None or (row.must_feed and place.job.on_end is not None):
                    return False
            self._end(place, "", lambda: row.state(self._slots.row(i), logits_1v.clone()))
        except Exception as error:  # of this job alone
            self._fail(place.job, error)
        return True

    def _expire(self) -> None:
        """End rows whose time is over."""
        gone = []
        for i, place in enumerate(self._places):
            if self._is_over(place.job):
                if place.row.reason is None:
                    rest = place.row.end_now()
                    self._say(place.job, Ended(place.number, "length", rest))
                else:
                    self._say(place.job, Ended(place.number, place.row.reason, ""))
                gone.append(i)
        self._leave(gone)

    def _leave(self, places: Any) -> None:
        for i in sorted(places, reverse=True):
            self._slots.leave(i)
            self._places[i] = self._places[-1]
            self._places.pop()


def _some(x: Tensor, rows: list[int]) -> Tensor:
    """These rows of a tensor, without a copy if they are all of them."""
    return x if len(rows) == x.shape[0] else x[rows]


def prompt_key(ids: list[int]) -> int:
    """The identity for sampling of a row that starts with these tokens, as `generate` has it."""
    return row_key(torch.tensor(ids, dtype=torch.int64))
