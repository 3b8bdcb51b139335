"""Where the C library takes memory from, and when it gives it back."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST_KEPT, _MOST_KEPT = 2**28, 2**30  # bytes
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have the process keep up to 1 GiB of freed memory for its next tensors, in blocks of up to 256 MiB each.

    glibc gives a large tensor's memory back to the system as soon as it is freed, and the system clears every page when
    it is taken again: several percent of a training step. This is a setting of the whole process, so programs should
    call it once, and libraries should not. The `anymamba` command does.

    Returns:
        Whether it took effect: False with another C library, or if the environment has settings for malloc.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)) and bool(mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT))
