"""Where the C library takes memory from, and when it gives it back."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_LARGEST_KEPT, _MOST_KEPT = 2**28, 2**30  # bytes
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def return_freed_memory() -> None:
    """Give the memory of freed tensors back to the system, holes between others included, where glibc can."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def keep_freed_memory() -> bool:
    """Have the process keep up to 1 GiB of freed memory for its next tensors, in blocks of up to 256 MiB each.

    glibc gives a large tensor's memory back to the system as soon as it is freed, and the system clears every page when
    it is taken again: several percent of a training step. This is a setting of the whole process, so programs should
    call it once, and libraries should not. The `anymamba` command does.

    Returns:
        Whether it took effect: False with another C library, or if the environment has settings for malloc.
    """
    return _set(_SETTINGS, {_M_MMAP_THRESHOLD: _LARGEST_KEPT, _M_TRIM_THRESHOLD: _MOST_KEPT})


def share_freed_memory() -> bool:
    """Have all threads take memory from one place, so that what one has freed is there for the others.

    glibc gives each thread an arena of its own. Each of them keeps the most that its thread ever had, so that a process
    with many threads grows for a long time, although it never needs more. Like `keep_freed_memory`, it is for programs
    to call, before they start threads.

    Returns:
        Whether it is so now: False with another C library, or where the environment has settings for malloc.
    """
    return _set(("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"), {_M_ARENA_MAX: 1})


def _set(variables: tuple[str, ...], options: dict[int, int]) -> bool:
    """Set options of glibc's malloc, unless the environment has set them."""
    if sys.platform != "linux" or any(name in os.environ for name in variables):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return False
    return all(mallopt(option, value) for option, value in options.items())
