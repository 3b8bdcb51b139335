"""Settings of the whole process, for programs: the C library's memory allocator, and signals that end work cleanly."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Options of mallopt, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MAX_BLOCK_BYTES = 2**28
_MAX_FREE_BYTES = 2**30
_THRESHOLD_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_ARENA_VARIABLES = ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


@contextmanager
def catch_signals(*signals: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether one of `signals` has arrived; a second signal raises KeyboardInterrupt.

    Outside the main thread, which alone can handle signals, the function always returns False.
    """
    has_arrived = False

    def handle(*_: Any) -> None:
        nonlocal has_arrived
        if has_arrived:
            raise KeyboardInterrupt
        has_arrived = True

    handled = signals if threading.current_thread() is threading.main_thread() else ()
    previous = {number: signal.signal(number, handle) for number in handled}
    try:
        yield lambda: has_arrived
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def trim_freed_memory() -> None:
    """Return freed memory to the system, including the gaps between tensors that are still in use, where glibc can."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def keep_freed_memory() -> bool:
    """Let the process keep up to 1 GiB of freed memory for its next tensors, in blocks of up to 256 MiB each.

    glibc returns a large tensor's memory to the system as soon as it is freed, and the system clears every page when it
    is allocated again: several percent of a training step. This is a setting of the whole process, so programs should
    call it once, and libraries should not. The `anymamba` command does.

    Returns:
        True if the setting took effect; False with a C library other than glibc, or if the environment has settings
        for malloc.
    """
    return _set_malloc_options(
        _THRESHOLD_VARIABLES, {_M_MMAP_THRESHOLD: _MAX_BLOCK_BYTES, _M_TRIM_THRESHOLD: _MAX_FREE_BYTES}
    )


def use_one_malloc_arena() -> bool:
    """Let all threads allocate from one arena, so that memory freed by one thread is reused by the others.

    glibc gives each thread its own arena, which keeps the most memory that the thread ever allocated. A process with
    many threads then grows for a long time although it never needs more. Like `keep_freed_memory`, this is for programs
    to call, before they start threads; it returns the same.
    """
    return _set_malloc_options(_ARENA_VARIABLES, {_M_ARENA_MAX: 1})


def _set_malloc_options(variables: tuple[str, ...], options: dict[int, int]) -> bool:
    """Set options of glibc's malloc, unless one of the environment `variables` is set."""
    if sys.platform != "linux" or any(name in os.environ for name in variables):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return False
    return all(mallopt(option, value) for option, value in options.items())
