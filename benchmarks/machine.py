"""The machine, and how busy other programs keep it."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("anymamba", "torch", "transformers")
GPU_PACKAGES = ("triton", "mamba-ssm", "flash-linear-attention", "causal-conv1d")
VARIABLES = ("ONEDNN_MAX_CPU_ISA", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "MALLOC_ARENA_MAX")


def describe_machine() -> dict[str, Any]:
    """Return the processor, its cores and vector width, memory, threads and versions, but no name of the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "versions": {"python": platform.python_version(), **{name: installed_version(name) for name in PACKAGES}},
    }


class OtherPrograms:
    """A clock of how many cores other programs use, from its creation on."""

    def __init__(self) -> None:
        """Start the clock."""
        self._start = self._clock()

    def cores_used(self) -> float | None:
        """Return the mean number of cores that other programs kept busy, None where the system does not report it."""
        stop = self._clock()
        if self._start is None or stop is None:
            return None
        wall, all_programs, this_program = (b - a for a, b in zip(self._start, stop, strict=True))
        # Both counts tick in hundredths of a second, so a difference just below zero is possible.
        return max(0.0, (all_programs - this_program) / wall)

    @staticmethod
    def _clock() -> tuple[float, float, float] | None:
        """Return seconds: wall clock, processor time of all programs, processor time of this one."""
        stat = Path("/proc/stat")
        if not stat.exists():
            return None
        # user, nice, system, idle, iowait, irq, softirq, steal; what follows is contained in user and nice.
        ticks = [int(word) for word in stat.read_text().splitlines()[0].split()[1:9]]
        everyone = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), everyone, time.process_time()


def installed_version(package: str) -> str:
    """Return the version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
