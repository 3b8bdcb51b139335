"""Prompts into states: each is read by itself, in segments cut at fixed places, whatever else runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anymamba.core.linear import apply_linear
from anymamba.generation.state import GenerationState
from anymamba.models.lm import MambaLM
from anymamba.serving.scheduler.continuation import TokenScore, score
from anymamba.serving.scheduler.events import Failed, Job, Outbox, PrefilledJob, PrefillStart, PromptDone

_HALF_READ = 8  # prompts that are begun at a time: each holds a state


class _Reading:
    """A job whose prompt is being read or waits for it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.start: PrefillStart | None = None  # not asked for before the job's turn
        self.position = 0
        self.state: GenerationState | None = None
        self.scores: list[list[TokenScore]] = []
        self.last_logits_1v: Tensor | None = None  # of the last segment, to score the first token of the next

    @property
    def left(self) -> int:
        """Tokens still to be read, or an estimate of them before the job's turn."""
        return self.job.length if self.start is None else len(self.start.ids) - self.position


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
            at_end = self._read_segment(reading)
        except Exception as error:  # of this job only
            self._outbox.add(reading.job, Failed(error))
            self._waiting.remove(reading)
            return True
        if at_end:
            self._waiting.remove(reading)
            assert reading.state is not None
            self._done(PrefilledJob(reading.job, reading.state))
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

    def _read_segment(self, reading: _Reading) -> bool:
        """Read the next segment of a prompt; whether it was the last."""
        job = reading.job
        if reading.start is None:
            reading.start = job.find()
            reading.state = reading.start.state
        ids, begin = reading.start.ids, reading.position
        if begin < len(ids):
            segment = ids[begin : begin + self._segment_len]
            reading.position = begin + len(segment)
            last = reading.position == len(ids)
            self._feed(reading, segment, last or job.should_cache_at(reading.position))
            self.tokens_read += len(segment)
            if not last:
                if job.on_read is not None and job.should_cache_at(reading.position):
                    assert reading.state is not None
                    job.on_read(reading.position, reading.state)
                return False
        if reading.state is None:
            raise ValueError("a prompt must have at least one token, got none")
        if job.on_read is not None:
            job.on_read(len(ids), reading.state)
        self._outbox.add(job, PromptDone(len(ids), reading.start.reused, reading.scores))
        return True

    def _feed(self, reading: _Reading, segment: list[int], with_logits: bool) -> None:
        """Run the model over a segment, as `MambaLM.forward` does with `logits="last"`, and score it if asked."""
        model, before = self._model, reading.state
        ids_1t = torch.tensor([segment], device=model.device)
        hidden_1td, cache = model.backbone(ids_1t, None if before is None else before.cache)
        width = model.config.padded_vocab_size
        logits_1v = (
            apply_linear(model.lm_head, hidden_1td[:, -1:])[:, 0] if with_logits else hidden_1td.new_zeros(1, width)
        )
        if reading.job.score_prompt is not None:
            self._score(reading, apply_linear(model.lm_head, hidden_1td)[0], segment)
        seen_1v = torch.zeros(1, width, dtype=torch.bool) if before is None else before.seen.clone()
        seen_1v[0, segment] = True
        keys = torch.zeros(1, dtype=torch.int64) if before is None else before.keys
        counts = torch.zeros(1, dtype=torch.int64) if before is None else before.counts
        reading.state = GenerationState(cache, logits_1v, seen_1v, keys, counts)

    def _score(self, reading: _Reading, logits_tv: Tensor, segment: list[int]) -> None:
        """Score each token of a segment with the logits before it."""
        most, vocab = reading.job.score_prompt, self._model.config.vocab_size
        assert most is not None
        before = [reading.last_logits_1v, *logits_tv[:-1].split(1)]
        for logits_1v, token in zip(before, segment, strict=True):
            scores: list[TokenScore] = [] if logits_1v is None else score(logits_1v[0, :vocab], token, most)
            reading.scores.append(scores)
        reading.last_logits_1v = logits_tv[-1:].clone()
