"""Prompts into states: each is read by itself, in segments cut at fixed places, whatever else runs."""

from __future__ import annotations

from collections.abc import Callable

from anymamba.generation.prefill import Prefill
from anymamba.generation.state import GenerationState
from anymamba.models.lm import MambaLM
from anymamba.serving.scheduler.events import Failed, Job, Outbox, PrefilledJob, PrefillStart, PromptDone

_HALF_READ = 8  # prompts that are begun at a time: each holds a state


class _Reading:
    """A job whose prompt is being read or waits for it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.start: PrefillStart | None = None  # not asked for before the job's turn
        self.prefill: Prefill | None = None  # none either if a kept state has read all of the prompt

    @property
    def left(self) -> int:
        """Tokens still to be read, or an estimate of them before the job's turn."""
        if self.start is None:
            return self.job.length
        return 0 if self.prefill is None else self.prefill.remaining


class PrefillQueue:
    """Reads the prompts of jobs, one segment of one prompt at a time.

    Args:
        model: the language model.
        segment_len: tokens that are read at once, at least 1.
        outbox: for events.
        is_over: whether a job's time is up.
        done: takes each job whose prompt has been read.

    Attributes:
        tokens_read: since the start.
    """

    def __init__(
        self,
        model: MambaLM,
        segment_len: int,
        outbox: Outbox,
        is_over: Callable[[Job], bool],
        done: Callable[[PrefilledJob], None],
    ) -> None:
        """Nothing waits yet."""
        if segment_len < 1:
            raise ValueError(f"segment_len must be at least 1, got {segment_len}")
        self._model, self._segment_len, self._outbox = model, segment_len, outbox
        self._is_over, self._done = is_over, done
        self._waiting: list[_Reading] = []
        self._oldest_next = True
        self.tokens_read = 0

    def __len__(self) -> int:
        """How many prompts are being read or wait for it."""
        return len(self._waiting)

    def add(self, job: Job) -> None:
        """Let a job's prompt wait for its turn."""
        self._waiting.append(_Reading(job))

    def clear(self) -> set[Job]:
        """Stop reading; the jobs whose prompts were not read to the end."""
        waiting, self._waiting = self._waiting, []
        return {reading.job for reading in waiting}

    def read(self) -> bool:
        """Read a segment; whether there was one to read."""
        for reading in [r for r in self._waiting if r.job.cancelled or self._is_over(r.job)]:
            late = TimeoutError("the time for the request ran out before its prompt was read")
            self._outbox.add(reading.job, Failed(late))
            self._waiting.remove(reading)
        if not self._waiting:
            return False
        reading = self._next()
        try:
            state = self._read_segment(reading)
        except Exception as error:  # of this job only
            self._outbox.add(reading.job, Failed(error))
            self._waiting.remove(reading)
            return True
        if state is not None:
            self._waiting.remove(reading)
            self._done(PrefilledJob(reading.job, state))
        self._outbox.flush()
        return True

    def _next(self) -> _Reading:
        """Alternate between the prompt that came first and the one with the least left to read: a long prompt does not
        hold up short ones, and short ones at most double the time that a long one takes."""
        self._oldest_next = not self._oldest_next
        if self._oldest_next:
            return self._waiting[0]
        begun = [reading for reading in self._waiting if reading.start is not None]
        return min(begun if len(begun) >= _HALF_READ else self._waiting, key=lambda reading: reading.left)

    def _read_segment(self, reading: _Reading) -> GenerationState | None:
        """Read the next segment of a prompt; return the state at the end of the prompt, None before it."""
        job = reading.job
        # 1) When the job is scheduled for the first time, find the kept state from which reading starts.
        if reading.start is None:
            reading.start = job.find()
            if reading.start.ids:
                reading.prefill = Prefill(
                    self._model,
                    [reading.start.ids],
                    reading.start.state,
                    segment_len=self._segment_len,
                    keeps_state_at=job.should_cache_at,
                    logprobs=job.score_prompt,
                )
        start = reading.start
        prefill = reading.prefill
        # 2) Read a segment, unless the kept state has read everything.
        if prefill is None:
            state = start.state
            if state is None:
                raise ValueError("a prompt must have at least one token, got none")
        else:
            before = prefill.position
            state = prefill.read_segment()
            self.tokens_read += prefill.position - before
        # 3) Hand out the state where it is kept, and at the end.
        if state is not None and job.on_read is not None:
            job.on_read(0 if prefill is None else prefill.position, state)
        if prefill is not None and not prefill.is_done:
            return None
        scores = [] if prefill is None else prefill.prompt_scores
        self._outbox.add(job, PromptDone(len(start.ids), start.reused, scores))
        return state
