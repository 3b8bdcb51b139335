"""Freed memory that is kept is not cleared again."""

import ctypes
import os
import resource
import subprocess
import sys

import pytest

from anymamba.ground.allocator import keep_freed_memory

FAULTS = """
import resource, statistics, sys, torch
from anymamba import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
def take():
    a = torch.full((3, 2**20), 1.0)  # 12 MiB each, 48 in all: more than a process keeps of itself
    return sum(float(x[0, 0]) for x in (a, a + 1, a + 2, a + 3))
def cleared():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    take()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(kept, statistics.median_low(cleared() for _ in range(21)))  # the heap may grow once more in some of them
"""


def faults(how: str, **environment: str) -> tuple[str, int]:
    """What `keep_freed_memory` said, and how many pages are cleared in a round, in the median."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    kept, pages = done.stdout.split()
    return kept, int(pages)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_kept_memory_is_not_cleared_again():
    kept, pages = faults("keep")
    if kept == "False":
        pytest.skip("another C library, or malloc has settings of its own")
    assert pages < 48 * 2**20 / resource.getpagesize() / 20
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"


HOLES = """
import re, sys, torch
from anymamba.ground.allocator import return_freed_memory
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
taken = [torch.ones(2**14) for _ in range(1024)]  # 64 KiB each: parts of the heap
del taken[::2], taken[:-1]  # the last holds the end of the heap
before = resident()
return_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_below_some_that_is_taken_is_given_back():
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("another C library")
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 0.8 * 2**26


def test_settings_of_the_environment_come_first(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert keep_freed_memory() is False
