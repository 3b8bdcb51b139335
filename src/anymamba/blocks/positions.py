"""States at chosen positions of a prefill, in one call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Prefill = Callable[[Tensor, Any], tuple[Tensor, Any]]  # a part of a sequence and the cache before it


def states_at(
    where: str, prefill: Prefill, x: Tensor, positions: Iterable[Any], cache: Any
) -> tuple[Tensor, list[Any]]:
    """Outputs of (b, t, ...), and the caches after its first p steps, for every p of `positions`.

    Raises:
        TypeError: a position is not a whole number.
        ValueError: there is no such position.
    """
    t, chosen = x.shape[1], list(positions)
    try:
        wanted = [operator.index(p) for p in chosen]
    except TypeError:
        raise TypeError(f"{where}: positions must be whole numbers, 1 to t = {t}, got {chosen}") from None
    if wrong := [p for p in wanted if not 1 <= p <= t]:
        raise ValueError(f"{where}: positions must be 1 to t = {t}, got {wrong[0]}")
    outputs, found, begin = [], {}, 0
    for end in sorted({*wanted, t}):
        y, cache = prefill(x[:, begin:end], cache)
        outputs.append(y)
        found[end], begin = cache, end
    return torch.cat(outputs, 1), [found[p] for p in wanted]
