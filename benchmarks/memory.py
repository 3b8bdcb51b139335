"""Peak memory of one contender, measured in a fresh process.

The figure is the highest resident set during the first call at full size, minus the resident set right before it: what
the call needs above its parameters and inputs, its results included. A fresh process is used because an allocator that
has served other contenders holds memory which would hide what this one needs.
"""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
from pathlib import Path

from anymamba.core.process import trim_freed_memory
from benchmarks.harness import Contender

_ROOT = Path(__file__).resolve().parent.parent


def measure_in_child(case: str, contender: str, threads: int) -> int:
    """Measure the bytes that a call of `contender` needs above its parameters and inputs, in a child process.

    Raises:
        RuntimeError: if the child fails, with what it wrote.
    """
    command = [sys.executable, "-m", "benchmarks", "--memory-of", f"{case}/{contender}", "--threads", str(threads)]
    child = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        raise RuntimeError(f"memory of {case}/{contender}: exit code {child.returncode}\n{child.stderr}")
    return int(child.stdout)


def measure_here(contender: Contender) -> int:
    """Measure the bytes that the first call of `contender` needs above its parameters and inputs, in this process.

    Where the kernel cannot reset a process's high-water mark the figure is by how much the mark rises, which is too
    small by what the set-up allocated and freed again.
    """
    contender.tiny()()
    call = contender.setup()
    gc.collect()
    trim_freed_memory()  # so that the call cannot use it uncounted
    reset_high_water_mark()
    before = high_water_mark()
    call()
    return high_water_mark() - before


def high_water_mark() -> int:
    """Return the largest resident set of this process since the last reset, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_high_water_mark() -> None:
    """Set the high-water mark to the present resident set, where the kernel allows it."""
    clear_refs = Path("/proc/self/clear_refs")
    if clear_refs.exists():
        try:
            clear_refs.write_text("5")
        except PermissionError:
            print("memory: /proc/self/clear_refs is not writable, figures may be too small", file=sys.stderr)
