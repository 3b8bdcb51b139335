"""A guard against numbers that are not finite; off by default.

`with anymamba.check_finite(): ...`, or ANYMAMBA_CHECK_FINITE=1 in the environment, looks at the inputs, outputs and
caches of every block, and at the inputs and results of every operator: at every stage and state in between.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class _Switch:
    """Of the process."""

    on = os.environ.get("ANYMAMBA_CHECK_FINITE", "") not in ("", "0")


@contextmanager
def check_finite() -> Iterator[None]:
    """Raise `FloatingPointError` in this context at the first tensor that is not finite, with its name and index.

    It is a switch of the whole process. Graphs that torch compiles or exports in the meantime are not checked.
    """
    before, _Switch.on = _Switch.on, True
    try:
        yield
    finally:
        _Switch.on = before


def is_checked() -> bool:
    """Whether the guard is on."""
    return _Switch.on


def within(place: str) -> AbstractContextManager[object]:
    """A context in which an error of the guard says that it happened in `place`."""
    return _located(place) if _Switch.on else _NOWHERE


@contextmanager
def _located(place: str) -> Iterator[None]:
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"{place}: {error}") from None


_NOWHERE = nullcontext()


def raise_if_not_finite(
    where: str, names: Sequence[str], values: Iterable[Any], infinite: frozenset[str] = frozenset()
) -> None:
    """Raise `FloatingPointError` unless all tensors among `values` are finite, those named in `infinite` not NaN."""
    for name, x in zip(names, values, strict=True):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            continue
        fine = ~x.isnan() if name in infinite else x.isfinite()
        if not bool(fine.all()):
            index = tuple(torch.nonzero(~fine)[0].tolist())
            count = int((~fine).sum())
            raise FloatingPointError(
                f"{where} {name} is not finite: {x[index].item()} at {index}, one of {count} such numbers in "
                f"{tuple(x.shape)}"
            )
