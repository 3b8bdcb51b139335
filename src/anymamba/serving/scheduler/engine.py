"""One loop for all requests: rows join and leave between two tokens, and prompts are read in between.

A row gives what `generate` gives alone from the same state with the same seed, bit for bit: a prompt is read by itself,
in segments cut at multiples of `segment_len` from where reading starts (`PrefillQueue`), and rows are decoded together
only where a row does not depend on its batch (`DecodeLoop`, `DecodeSlots`).
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque

import torch

from anymamba.core.process import trim_freed_memory
from anymamba.generation.sampling import hash_tokens
from anymamba.generation.tokenizers import Tokenizer
from anymamba.kernels.cpu.step_program import MAX_ROWS
from anymamba.models.lm import MambaLM
from anymamba.serving.scheduler.decode import DecodeLoop, DecodeSlots
from anymamba.serving.scheduler.events import Deliver, Job, Outbox, ShuttingDown
from anymamba.serving.scheduler.prefill import PrefillQueue

SEGMENT_LEN = 256
_REST = 1.0  # seconds without work, after which freed memory is given back


class Engine:
    """Reads prompts and continues them, in a thread of its own.

    Args:
        model: the language model.
        tokenizer: of its text.
        deliver: takes the events of each round, in the engine's thread.
        rows: the most rows that are decoded together.
        segment_len: tokens of a prompt that are read at once.
        stall: seconds that reading may take between two tokens of others; at least one segment is read.
        together: as for `DecodeSlots`.
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
        self.model, self.tokenizer, self.segment_len = model, tokenizer, segment_len
        self._stall, self._outbox = stall, Outbox(deliver)
        slots, vocab = DecodeSlots(model, rows, together), model.config.vocab_size
        self._decode_loop = DecodeLoop(slots, tokenizer, vocab, self._outbox, self._is_over)
        self._prefill_queue = PrefillQueue(model, segment_len, self._outbox, self._is_over, self._decode_loop.add)
        self._new: deque[Job] = deque()  # shared with other threads, under the condition
        self._changed, self._closing, self._deadline = threading.Condition(threading.RLock()), False, float("inf")
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

    def set_deadline(self, deadline: float) -> None:
        """Let no job run beyond this moment, on the clock of `time.monotonic`: replies end, prompts are refused."""
        self._deadline = deadline

    @property
    def load(self) -> dict[str, int]:
        """Rows that are being decoded, rows that wait for a place, and prompts that are being read or wait for it."""
        waiting = len(self._prefill_queue) + len(self._new)
        return {"running": self._decode_loop.running, "ready": self._decode_loop.ready, "waiting": waiting}

    @property
    def tokens_read(self) -> int:
        """Since the start."""
        return self._prefill_queue.tokens_read

    @property
    def tokens_written(self) -> int:
        """Since the start."""
        return self._decode_loop.tokens_written

    @property
    def steps(self) -> int:
        """Steps since the start, each of which decodes a token of every row."""
        return self._decode_loop.steps

    @torch.no_grad()
    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # which torch keeps for each thread
        while self._wait():
            try:
                self._round()
            except Exception as error:  # noqa: PERF203  # it may concern any job, so all of them fail; new ones are taken
                traceback.print_exc(file=sys.stderr)
                self._give_up(error)
        self._give_up(ShuttingDown("the server is shutting down"))

    def _wait(self) -> bool:
        """Take new jobs, waiting for one if there is nothing to do; returns whether to continue."""
        with self._changed:
            rest: float | None = _REST
            while not (self._new or len(self._prefill_queue) or not self._decode_loop.is_idle or self._closing):
                if not self._changed.wait(rest):
                    rest = None
                    self._changed.release()  # whoever submits a job does not wait for this
                    trim_freed_memory()
                    self._changed.acquire()
            self._take_new()
            return not self._closing

    def _take_new(self) -> None:
        with self._changed:
            while self._new:
                self._prefill_queue.add(self._new.popleft())

    def _round(self) -> None:
        """Read for a while, then write a token of every row."""
        began = time.monotonic()
        while not self._closing and self._decode_loop.has_room() and self._prefill_queue.read():
            self._take_new()
            if self._decode_loop.running and time.monotonic() - began >= self._stall:
                break
        self._decode_loop.admit()
        self._decode_loop.step()
        self._outbox.flush()

    def _is_over(self, job: Job) -> bool:
        return time.monotonic() >= min(job.deadline, self._deadline)

    def _give_up(self, error: BaseException) -> None:
        """Fail every job."""
        for job in self._decode_loop.clear() | self._prefill_queue.clear():
            self._outbox.fail(job, error)
        self._outbox.flush()


def prompt_key(ids: list[int]) -> int:
    """The identity for sampling of a row that starts with these tokens, as in `generate`."""
    return hash_tokens(torch.tensor(ids, dtype=torch.int64))
