"""The loop for all requests: continuations join and leave between two tokens, and prompts are read in between.

A continuation gives what `generate` gives alone from the same state with the same seed, bit for bit: a prompt is read
by itself, in segments cut at multiples of `segment_len` from where the prefill begins (`PrefillQueue`), and rows are
decoded together only where a row does not depend on its batch (`DecodeLoop`).
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

import torch

from anymamba.core.process import trim_freed_memory
from anymamba.generation.decoder import Decoder
from anymamba.generation.sampling import hash_tokens
from anymamba.generation.tokenizers import Tokenizer
from anymamba.models.lm import MambaLM
from anymamba.serving.scheduler.continuation import Event, Job, Outbox, ShuttingDown
from anymamba.serving.scheduler.decode import DEFAULT_ROWS, DecodeLoop, DecodeSlots, Slots
from anymamba.serving.scheduler.growing_slots import GrowingSlots, has_growing_cache
from anymamba.serving.scheduler.prefill import PrefillQueue

SEGMENT_LEN = 256
_IDLE_SECONDS = 1.0  # time without work after which freed memory is returned to the system


class Engine:
    """Reads prompts and continues them, in a thread of its own.

    Args:
        deliver: Takes the events of each round, in the engine's thread.
        rows: Largest number of rows that are decoded together.
        segment_len: Number of tokens of a prompt that are read at once.
        stall: Seconds that prefill may delay the next token of running replies; at least one segment is read.
        together: True to step all rows in one batch, False to step each alone, None to choose what keeps the bits.
        exact: Whether to read prompts so that bits do not depend on where a text was cut, as `prefill` does.
    """

    def __init__(
        self,
        model: MambaLM,
        tokenizer: Tokenizer,
        deliver: Callable[[list[tuple[Job, Event]]], None],
        *,
        rows: int = DEFAULT_ROWS,
        segment_len: int = SEGMENT_LEN,
        stall: float = 0.1,
        together: bool | None = None,
        exact: bool = False,
    ) -> None:
        """Start the thread."""
        if exact:
            Decoder(model).check_exact()
        self.model = model
        self.tokenizer = tokenizer
        self.segment_len = segment_len
        self._stall = stall
        self._outbox = Outbox(deliver)
        kind = GrowingSlots if has_growing_cache(model) else DecodeSlots
        slots: Slots = kind(model, rows, together)
        self._decode_loop = DecodeLoop(slots, tokenizer, model.config.vocab_size, self._outbox, self._is_over)
        self._prefill_queue = PrefillQueue(
            model, segment_len, self._outbox, self._is_over, self._decode_loop.add, exact=exact
        )
        self._changed = threading.Condition(threading.RLock())
        self._new_jobs: deque[Job] = deque()  # shared with other threads, under the condition
        self._is_closing = False
        self._deadline = float("inf")
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; raise RuntimeError if the engine was closed."""
        with self._changed:
            if self._is_closing:
                raise RuntimeError("the engine was closed")
            self._new_jobs.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Stop the thread at the next token; jobs that are not done fail."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def set_deadline(self, deadline: float) -> None:
        """Let no job run beyond this time on the clock of `time.monotonic`: replies end, prompts are rejected."""
        self._deadline = deadline

    @property
    def load(self) -> dict[str, int]:
        """Rows that are being decoded, rows that wait for a slot, and prompts that are being read or wait for it."""
        waiting = len(self._prefill_queue) + len(self._new_jobs)
        return {"running": self._decode_loop.running, "ready": self._decode_loop.ready, "waiting": waiting}

    @property
    def counters(self) -> dict[str, int]:
        """Prompt tokens read, tokens chosen, and steps, each of which decodes one token of every row."""
        loop = self._decode_loop
        return {
            "read_tokens": self._prefill_queue.tokens_read,
            "written_tokens": loop.tokens_written,
            "steps": loop.steps,
        }

    @torch.no_grad()
    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # torch stores the number of threads per thread
        while self._wait_for_work():
            try:
                self._run_round()
            except BaseException as error:  # noqa: PERF203  # any job may be the cause, so all fail; the thread goes on
                traceback.print_exc(file=sys.stderr)
                self._fail_all(error)
        self._fail_all(ShuttingDown("the server is shutting down"))

    def _wait_for_work(self) -> bool:
        """Take new jobs, and wait for one if there is nothing to do; return False once the engine is closing."""
        with self._changed:
            timeout: float | None = _IDLE_SECONDS
            while not (self._new_jobs or len(self._prefill_queue) or not self._decode_loop.is_idle or self._is_closing):
                if not self._changed.wait(timeout):
                    timeout = None
                    self._changed.release()  # a job can be submitted meanwhile
                    trim_freed_memory()
                    self._changed.acquire()
            self._take_new_jobs()
            return not self._is_closing

    def _take_new_jobs(self) -> None:
        with self._changed:
            while self._new_jobs:
                self._prefill_queue.add(self._new_jobs.popleft())

    def _run_round(self) -> None:
        """Run one round: some prefill, then one token of every row."""
        # 1) Read prompts while every row that is ready has a slot, but only for a while if replies are running.
        start_time = time.monotonic()
        while not self._is_closing and self._decode_loop.admit() and self._prefill_queue.run_segment():
            self._take_new_jobs()
            if self._decode_loop.running and time.monotonic() - start_time >= self._stall:
                break
        # 2) Admit the rows of prompts that were read last.
        self._decode_loop.admit()
        # 3) Decode one token of every row.
        self._decode_loop.step()
        # 4) Deliver the events of the round together.
        self._outbox.flush()

    def _is_over(self, job: Job) -> bool:
        return time.monotonic() >= min(job.deadline, self._deadline)

    def _fail_all(self, error: BaseException) -> None:
        for job in self._decode_loop.clear() | self._prefill_queue.clear():
            self._outbox.fail(job, error)
        self._outbox.flush()


def prompt_key(ids: list[int]) -> int:
    """Return the sampling key of a row that begins with these tokens, as in `generate`."""
    return hash_tokens(torch.tensor(ids, dtype=torch.int64))
