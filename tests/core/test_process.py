"""Freed memory that is kept is not cleared again, and freed memory that is shared is not kept by every thread."""

import ctypes
import os
import resource
import subprocess
import sys

import pytest

from anymamba.core.process import keep_freed_memory, use_one_malloc_arena

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

ARENAS = """
import ctypes, sys, threading
from anymamba.core.process import use_one_malloc_arena
shared = use_one_malloc_arena() if sys.argv[2] == "share" else None
libc, together = ctypes.CDLL(None), threading.Barrier(6)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
def work():
    together.wait()
    for _ in range(100):
        libc.free(ctypes.c_void_p(libc.malloc(50_000)))
    together.wait()
threads = [threading.Thread(target=work) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
print(shared)
"""

GIVEN_BACK = """
import resource, torch
from anymamba.core.process import trim_freed_memory, keep_freed_memory
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
if not keep_freed_memory():
    raise SystemExit("skip")
before = resident()
blocks, held = [torch.ones(2**14) for _ in range(1000)], []
for i in range(1000):
    held += [blocks[i]] if i % 10 == 0 else []
del blocks
kept = resident() - before
trim_freed_memory()
print(kept, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_kept_memory_can_be_given_back():
    done = subprocess.run([sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True)
    if "skip" in done.stderr:
        pytest.skip("another C library, or malloc has settings of its own")
    kept, rest = map(int, done.stdout.split())
    assert kept > 50 * 2**20  # of 62.5 MiB, a tenth of which is still in use
    assert rest < 20 * 2**20


def arenas(path, how: str, **environment: str) -> tuple[str, int]:
    """Return what `use_one_malloc_arena` returned, and the number of arenas from which six threads took memory."""
    command = [sys.executable, "-c", ARENAS, str(path / "malloc.xml"), how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    return done.stdout.strip(), (path / "malloc.xml").read_text().count("<heap nr=")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_threads_share_what_they_free(tmp_path):
    shared, count = arenas(tmp_path, "share")
    if shared == "False":
        pytest.skip("another C library, or malloc has settings of its own")
    assert count == 1
    assert arenas(tmp_path, "not")[1] > 1
    assert arenas(tmp_path, "share", MALLOC_ARENA_MAX="3")[0] == "False"


def faults(how: str, **environment: str) -> tuple[str, int]:
    """Return what `keep_freed_memory` returned, and the median number of pages that are cleared in a round."""
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
from anymamba.core.process import trim_freed_memory
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
taken = [torch.ones(2**14) for _ in range(1024)]  # 64 KiB each: parts of the heap
del taken[::2], taken[:-1]  # the last holds the end of the heap
before = resident()
trim_freed_memory()
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
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert use_one_malloc_arena() is False
