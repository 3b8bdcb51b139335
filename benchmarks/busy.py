"""Decoding with and without another program that keeps one core busy.

The other program is started here and stopped between the calls, so that both are measured side by side in one run. The
harness marks such a case as not to be trusted: other programs use the processor, which here is what is measured.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial

from torch import Tensor

from benchmarks.generation import our_model_with, prompt, set_up_steps
from benchmarks.harness import Call, Case, Contender

TOKENS = 40  # per call: long enough for the scheduler to become steady
_LIVES = 600  # seconds, if it is not ended earlier
_SPIN = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"


@cache
def _start_busy_program() -> subprocess.Popen[bytes]:
    """Start a program that only keeps a core busy, and stop it at once."""
    program = subprocess.Popen([sys.executable, "-c", _SPIN, str(_LIVES)])
    atexit.register(program.kill)
    program.send_signal(signal.SIGSTOP)
    return program


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keep a core busy inside the context."""
    program = _start_busy_program()
    if program.poll() is not None:
        raise RuntimeError(f"the busy program ended after {_LIVES} seconds: measure fewer rounds")
    os.kill(program.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.kill(program.pid, signal.SIGSTOP)


def set_up(weights: str, is_busy: bool, small: bool = False) -> Call:
    """Return a call that decodes tokens one after another."""
    step = set_up_steps(our_model_with(weights, small), prompt(1, 64), prompt(1, 1)[:, 0])

    def run() -> dict[str, Tensor]:
        with busy_core() if is_busy else contextlib.nullcontext():
            for _ in range(TOKENS - 1):
                step()
            return dict(step())

    return run


def busy_case(weights: str) -> Case:
    """Return the cases: the same tokens on an idle and on a busy machine."""
    contenders = tuple(
        Contender(
            name=name, setup=partial(set_up, weights, busy), tiny=partial(set_up, weights, busy, True), computes=weights
        )
        for name, busy in (("alone", False), ("with a busy program", True))
    )
    return Case(name=f"generation/busy/{weights}", contenders=contenders, baseline="alone")


CASES: tuple[Case, ...] = tuple(busy_case(weights) for weights in ("float32", "int8", "int4"))
