"""A guard against numbers that are not finite, like torch's anomaly mode; off by default.

`with anymamba.check_finite(): ...`, or ANYMAMBA_CHECK_FINITE=1 in the environment, checks the inputs, outputs and
caches of every block, and the inputs and results of every operator.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class _Switch:
    """Process-wide switch of the guard."""

    on = os.environ.get("ANYMAMBA_CHECK_FINITE", "") not in ("", "0")


@contextmanager
def check_finite() -> Iterator[None]:
    """Raise `FloatingPointError` in this context at the first tensor that is not finite, with its name and index.

    The switch is process-wide. Graphs that torch compiles or exports in this context are not checked.
    """
    previous = _Switch.on
    _Switch.on = True
    try:
        yield
    finally:
        _Switch.on = previous


def is_check_finite_on() -> bool:
    """Return whether the guard is on."""
    return _Switch.on


def named_location(location: str) -> AbstractContextManager[object]:
    """Return a context in which errors of the guard begin with `location`, such as "layers.3"."""
    return _prefix_errors(location) if _Switch.on else _NO_LOCATION


@contextmanager
def _prefix_errors(location: str) -> Iterator[None]:
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"{location}: {error}") from None


_NO_LOCATION = nullcontext()


def check_tensors_finite(
    where: str, names: Sequence[str], values: Iterable[Any], may_be_infinite: frozenset[str] = frozenset()
) -> None:
    """Raise `FloatingPointError` unless all tensors among `values` are finite; other values are skipped.

    Those in `may_be_infinite` may hold infinities, but no NaN.
    """
    for name, x in zip(names, values, strict=True):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            continue
        is_valid = ~x.isnan() if name in may_be_infinite else x.isfinite()
        if not bool(is_valid.all()):
            index = tuple(torch.nonzero(~is_valid)[0].tolist())
            count = int((~is_valid).sum())
            raise FloatingPointError(
                f"{where} {name} is not finite: {x[index].item()} at {index}, one of {count} such numbers in "
                f"{tuple(x.shape)}"
            )
