"""Which set of weights each pass of a stack uses: any number of passes over the layers.

Letters: v pass, V passes, R real layers; of pairs u = ⌊v/2⌋, U = V/2, E = ⌈R/2⌉, O = ⌊R/2⌋.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable

MOST_PASSES = 2**16  # more than any real model; limits the work that one number in a config can ask for

_Schedule = Callable[[int, int, int], int]  # (v, R, V) -> layer

SCHEDULES: dict[str, _Schedule] = {
    "cyclic": lambda v, real, passes: v % real,
    "stretched": lambda v, real, passes: v * real // passes,
}


def _strided(count: Callable[[int, int, int], int]) -> _Schedule:
    """Forward passes over the even layers, backward ones over the odd ones; `count`(u, layers, U) numbers each kind."""

    def schedule(v: int, real: int, passes: int) -> int:
        backward = v % 2
        layers = (real + 1 - backward) // 2
        return 2 * count(v // 2, layers, passes // 2) + backward

    return schedule


def _symmetric(count: Callable[[int, int, int], int]) -> _Schedule:
    """Both directions of a pair share the weights of a layer."""
    return lambda v, real, passes: count(v // 2, real, passes // 2)


PAIR_SCHEDULES: dict[str, _Schedule] = {
    "strided_cyclic": _strided(SCHEDULES["cyclic"]),
    "strided_stretched": _strided(SCHEDULES["stretched"]),
    "symmetric_cyclic": _symmetric(SCHEDULES["cyclic"]),
    "symmetric_stretched": _symmetric(SCHEDULES["stretched"]),
}


def layers_of_passes(
    where: str, schedule: str | list[int], real: int, passes: int | None, names: dict[str, _Schedule]
) -> list[int]:
    """The layer that each pass uses.

    Args:
        where: named in errors.
        schedule: one of `names`, or the layer of every pass.
        real: number of layers.
        passes: number of passes; None: as many as layers, or as entries in the list.
        names: the schedules to choose from.

    Raises:
        ValueError: an unknown schedule, one that does not fit the number of passes, or a layer that does not exist.
    """
    if isinstance(schedule, str):
        if schedule not in names:
            raise ValueError(
                f"{where}: schedule must be one of {', '.join(names)}, or a list of layers, got {schedule!r}"
            )
        count = real if passes is None else passes
        return [names[schedule](v, real, count) for v in range(count)]
    if not isinstance(schedule, list | tuple) or not all(type(i) is int for i in schedule) or not schedule:
        raise ValueError(f"{where}: a custom schedule is a list of layers, got {reprlib.repr(schedule)}")
    if passes is not None and len(schedule) != passes:
        raise ValueError(f"{where}: the schedule must have {passes} entries, one per pass, got {len(schedule)}")
    if wrong := [i for i in schedule if not 0 <= i < real]:
        raise ValueError(f"{where}: the schedule must name layers 0 to {real - 1}, got {wrong[0]}")
    return list(schedule)
