"""Prompts to states: each prompt is read by itself, in segments whose positions do not depend on other requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anymamba.generation.prefill import Prefill
from anymamba.generation.state import GenerationState
from anymamba.models.lm import MambaLM
from anymamba.serving.scheduler.continuation import Job, JobFailed, Outbox, PrefilledJob, PrefillStart, PromptDone

_MAX_STARTED = 8  # prompts that may be read in turns: each holds a state


@dataclass(eq=False)
class _QueuedPrompt:
    """A job whose prompt is being read or waits for it."""

    job: Job
    start: PrefillStart | None = None  # not known before the job is scheduled
    prefill: Prefill | None = None  # also None if a cached state has read the whole prompt

    @property
    def remaining(self) -> int:
        """Number of tokens still to be read, or an estimate of it before the job is scheduled."""
        if self.start is None:
            return self.job.estimated_len
        return 0 if self.prefill is None else self.prefill.remaining


class PrefillQueue:
    """Reads the prompts of jobs, one segment of one prompt at a time, and hands those that are done to `on_done`.

    `is_over` returns whether the time of a job has run out; it then fails.
    """

    def __init__(
        self,
        model: MambaLM,
        segment_len: int,
        outbox: Outbox,
        is_over: Callable[[Job], bool],
        on_done: Callable[[PrefilledJob], None],
        *,
        exact: bool = False,
    ) -> None:
        """Begin with an empty queue."""
        if segment_len < 1:
            raise ValueError(f"segment_len must be at least 1, got {segment_len}")
        self._model = model
        self._segment_len = segment_len
        self._exact = exact
        self._outbox = outbox
        self._is_over = is_over
        self._on_done = on_done
        self._prompts: list[_QueuedPrompt] = []
        self._is_oldest_next = True
        self.tokens_read = 0  # since the start

    def __len__(self) -> int:
        """Return the number of prompts that are being read or wait for it."""
        return len(self._prompts)

    def add(self, job: Job) -> None:
        """Add a job to the queue."""
        self._prompts.append(_QueuedPrompt(job))

    def clear(self) -> set[Job]:
        """Empty the queue; return its jobs."""
        prompts = self._prompts
        self._prompts = []
        return {prompt.job for prompt in prompts}

    def run_segment(self) -> bool:
        """Read one segment; return whether there was a prompt to read."""
        # 1) Drop the jobs that were cancelled or whose time has run out.
        for prompt in [p for p in self._prompts if p.job.is_cancelled or self._is_over(p.job)]:
            timeout = TimeoutError("the time for the request ran out before its prompt was read")
            self._outbox.add(prompt.job, JobFailed(timeout))
            self._prompts.remove(prompt)
        if not self._prompts:
            return False
        # 2) Read a segment of the next prompt. An error, even one of a native library, concerns only its job.
        prompt = self._select_next()
        try:
            state = self._read_segment(prompt)
        except BaseException as error:
            self._outbox.add(prompt.job, JobFailed(error))
            self._prompts.remove(prompt)
            return True
        # 3) A prompt that has been read leaves the queue.
        if state is not None:
            self._prompts.remove(prompt)
            self._on_done(PrefilledJob(prompt.job, state))
        self._outbox.flush()
        return True

    def _select_next(self) -> _QueuedPrompt:
        """Alternate between the oldest prompt and the one with the fewest tokens left to read.

        So a long prompt does not delay short ones, and short ones at most double the time of a long one.
        """
        self._is_oldest_next = not self._is_oldest_next
        if self._is_oldest_next:
            return self._prompts[0]
        started = [prompt for prompt in self._prompts if prompt.start is not None]
        candidates = started if len(started) >= _MAX_STARTED else self._prompts
        return min(candidates, key=lambda prompt: prompt.remaining)

    def _read_segment(self, prompt: _QueuedPrompt) -> GenerationState | None:
        """Read the next segment of a prompt; return the state at the end of the prompt, or None before it."""
        job = prompt.job
        # 1) When the job is scheduled for the first time, find the cached state to continue from.
        if prompt.start is None:
            prompt.start = job.find_start()
            if prompt.start.ids:
                prompt.prefill = Prefill(
                    self._model,
                    [prompt.start.ids],
                    prompt.start.state,
                    segment_len=self._segment_len,
                    exact=self._exact,
                    keeps_state_at=job.should_cache_at,
                    logprobs=job.prompt_logprobs,
                )
        start = prompt.start
        prefill = prompt.prefill
        # 2) Read a segment, unless the cached state has read the whole prompt.
        if prefill is None:
            state = start.state
            if state is None:
                raise ValueError("a prompt must have at least one token, got none")
        else:
            position = prefill.position
            state = prefill.read_segment()
            self.tokens_read += prefill.position - position
        # 3) Hand out the state where it is to be cached, and at the end.
        if state is not None and job.on_read is not None:
            job.on_read(0 if prefill is None else prefill.position, state)
        if prefill is not None and not prefill.is_done:
            return None
        scores = [] if prefill is None else prefill.prompt_scores
        self._outbox.add(job, PromptDone(len(start.ids), start.cached_tokens, scores))
        return state
