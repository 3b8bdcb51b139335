"""How many cores this process may use: those it may run on (affinity), within the quota of its control groups.

A container with `--cpus 1.5` sees every core of the machine, and its threads run on any of them. But together they may
compute for 150 ms in each period of 100 ms; after that all of them stand still until the next period. The limits are
read from the files of Linux, below a root directory that tests replace. Elsewhere only the number of cores is known.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class CoreLimit(NamedTuple):
    """Number of threads that a process has cores for, and what limits it."""

    threads: int
    reason: str


def available_cores(root: Path = Path("/")) -> CoreLimit:
    """Return for how many threads this process has cores, from its affinity and its quota."""
    machine = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    return limit_threads(machine, affinity, read_quota(root))


def limit_threads(machine: int, affinity: int, quota: float | None) -> CoreLimit:
    """Return for how many threads there are cores.

    A quota that is not an integer is rounded up: 1.5 cores are 2 threads. That is the smallest number that can use all
    of the quota. Fewer leave a part of it unused. More use it up earlier in each period, and then wait for longer.

    Args:
        machine: Number of cores of the machine.
        affinity: Number of cores that the process may run on.
        quota: Processor time per time that the process may use, in cores; None if it is not limited.
    """
    if quota is not None and math.ceil(quota) < affinity:
        return CoreLimit(max(1, math.ceil(quota)), f"a quota of {quota:g} cores")
    if affinity < machine:
        return CoreLimit(affinity, f"the process may run on {affinity} of {machine} cores")
    return CoreLimit(machine, f"the machine has {machine} cores")


def read_quota(root: Path = Path("/")) -> float | None:
    """Return the quota of this process in cores; None without one, or where there are no control groups.

    It is the smallest along the path from the root of each hierarchy to the group of the process, since the limit of a
    group holds for all groups inside it. Version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`) may be mounted both.
    """
    quotas = [_read_group_quota(group) for group in _find_groups(root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _find_groups(root: Path) -> Iterator[Path]:
    """Yield the directories whose limits hold for this process, by the mounted hierarchies with a limit of time."""
    groups: dict[str, str] = {}  # of this process, by version
    for line in _read_lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            groups["cgroup2"] = group
        elif "cpu" in controllers.split(","):
            groups["cgroup"] = group
    for line in _read_lines(root / "proc/self/mountinfo"):
        mount, _, rest = line.partition(" - ")
        fields, kinds = mount.split(" "), rest.split(" ")
        kind = kinds[0]
        if len(fields) < 5 or kind not in groups or (kind == "cgroup" and "cpu" not in kinds[-1].split(",")):
            continue
        mounted_group, directory = (_unescape(field) for field in fields[3:5])
        top = root / directory.lstrip("/")
        yield top
        for name in _names_below(groups[kind], mounted_group):
            top /= name
            yield top


def _names_below(group: str, mounted_group: str) -> tuple[str, ...]:
    """Return the names from the mounted group to a group; none if it is outside, as it may be in a container."""
    path = PurePosixPath(group)
    if ".." in path.parts or not path.is_relative_to(mounted_group):
        return ()
    return path.relative_to(mounted_group).parts


def _read_group_quota(group: Path) -> float | None:
    """Return the quota of one group in cores; None if it has none or its files cannot be read."""
    words = " ".join(_read_lines(group / "cpu.max")).split()
    if not words:
        words = [word for name in ("quota", "period") for word in _read_lines(group / f"cpu.cfs_{name}_us")]
    try:
        quota, period = map(int, words)
    except ValueError:  # "max", nothing, or what is no limit that we know
        return None
    return quota / period if quota > 0 and period > 0 else None


def _read_lines(file: Path) -> list[str]:
    """Return the lines of a file of the system; none if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescape(field: str) -> str:
    """Return a field of mountinfo, in which octal numbers stand for blanks and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
