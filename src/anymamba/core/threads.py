"""How many threads torch computes with, and how those of OpenMP wait for each other.

torch divides an operation among threads that meet at its end. By default, a thread of libgomp (GCC's OpenMP library,
which torch's Linux wheels contain) that has nothing to do spins for milliseconds before it sleeps. On a core that
another program needs too, the spinning thread takes the time of the very thread that it waits for. With a quota of
processor time, spinning uses up the quota.

libgomp reads how to wait from the environment, once, when it is loaded with torch. So the `anymamba` command calls
`set_spin_count` before it imports torch; a program can only be started with the variable. The number of threads can be
changed at any time, by `configure_threads`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from anymamba.core.available_cores import CoreLimit, available_cores

SPIN_COUNT = 1000
"""How often a thread of libgomp looks for work before it sleeps, in the `anymamba` command.

From libgomp's source: without a setting, a thread looks 300,000 times, by its own estimate 3 ms; 100 times if there are
more threads than the cores that it may run on, which counts neither other programs nor a quota; and with 0 it sleeps
at once. A thread that sleeps must be woken for each parallel operation. 1,000 cost nothing on an idle machine and kept
most of what 0 gains next to a busy program (`python -m benchmarks.waiting`, in benchmarks/RESULTS.md).
"""
_WAITING_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # the first has precedence in libgomp
_COUNT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class ThreadSettings(NamedTuple):
    """Threads of torch in this process.

    Attributes:
        threads: Number of threads.
        reason: Why that many.
        waiting: How they wait for work.
        advice: What to do to let them wait better; empty if nothing.
    """

    threads: int
    reason: str
    waiting: str
    advice: str


def set_spin_count(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Let threads of libgomp sleep when they have nothing to do, unless the user has set how they wait.

    Returns:
        True if `GOMP_SPINCOUNT` was set; False if the environment has settings, or torch was imported before.
    """
    if "torch" in sys.modules or any(environment.get(name) for name in _WAITING_VARIABLES):
        return False
    environment["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    return True


def configure_threads() -> ThreadSettings:
    """Let torch use at most as many threads as this process may use cores, and return how its threads are set.

    torch counts the cores of the machine and does not know of the quota of a container. The number is only ever
    lowered, and kept if the environment sets it (`OMP_NUM_THREADS`). This is a setting of the whole process, so
    programs should call it once, before they start threads of their own, and libraries should not. The `anymamba`
    command does, unless `--threads` is set. How threads wait can no longer be changed; `advice` says if it should be.
    """
    import torch

    count, reason = choose_thread_count(torch.get_num_threads(), available_cores(), os.environ)
    if count != torch.get_num_threads():
        torch.set_num_threads(count)
    return ThreadSettings(count, reason, *describe_waiting(os.environ, _uses_libgomp()))


def choose_thread_count(count: int, limit: CoreLimit, environment: Mapping[str, str]) -> tuple[int, str]:
    """Return how many threads to use where torch uses `count`, and why."""
    for name in _COUNT_VARIABLES:
        if environment.get(name):
            return count, f"{name}={environment[name]} in the environment"
    if count < limit.threads:
        return count, f"torch's setting, below the limit of {limit.threads} ({limit.reason})"
    return limit.threads, limit.reason


def describe_waiting(environment: Mapping[str, str], uses_libgomp: bool) -> tuple[str, str]:
    """Return how threads wait for work, and advice if they spin for long."""
    if not uses_libgomp:
        return "as torch's library of threads does", ""
    for name in _WAITING_VARIABLES:
        if value := environment.get(name):
            return f"{name}={value}{': threads sleep at once' * (value == '0')}", ""
    advice = f"start the program with GOMP_SPINCOUNT={SPIN_COUNT} in its environment: it is read when torch is imported"
    return "threads spin for milliseconds, then sleep", advice


def _uses_libgomp() -> bool:
    """Return whether this process has loaded libgomp; False where the system does not say."""
    try:
        return "/libgomp" in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return False
