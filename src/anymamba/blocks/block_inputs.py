"""Inputs of blocks, stacks and models: checks, rows of packed sequences as one row, and a prefill in parts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from anymamba.core.checks import (
    check_cu_seqlens,
    check_dtype_and_device,
    check_mutually_exclusive,
    check_shape,
    check_tensor,
    check_time_steps,
)
from anymamba.core.dtypes import is_autocast
from anymamba.core.layout import Padding, cu_seqlens_from_seq_idx

Prefill = Callable[[Tensor, Any], tuple[Tensor, Any]]  # part of a sequence and the cache before it -> y, new cache


def check_input(where: str, x: Any, letters: str, width: int, like: Tensor, name: str = "x") -> None:
    """Raise for an input of another shape, or with another dtype or device than `like`."""
    sizes = {"d": width}
    check_shape(where, name, x, letters, sizes)
    check_time_steps(where, sizes.get("t", 1))
    check_dtype_and_device(where, name, x, x.dtype if is_autocast(x.device) else like.dtype, like.device)


def check_batch(where: str, x: Tensor, cu_seqlens: Any, mask: Any) -> Padding | None:
    """Raise for boundaries or a mask that do not match (b, t, ...); return how the rows are padded."""
    b, t = x.shape[:2]
    if cu_seqlens is not None:
        check_mutually_exclusive(where, "cu_seqlens", mask=mask)
        check_cu_seqlens(where, cu_seqlens, b, t, x.device)
    return None if mask is None else Padding.from_mask(where, mask, b, t, x.device)


def flatten_packed_rows(where: str, x: Any, seq_idx: Any, cu_seqlens: Any, mask: Any) -> tuple[Tensor, Tensor]:
    """Return rows (b, t, ...) of packed sequences as one row (1, b t, ...), and the boundaries of its sequences."""
    check_mutually_exclusive(where, "seq_idx", cu_seqlens=cu_seqlens, mask=mask)
    check_tensor(where, "x", x)
    if x.ndim < 2:
        raise ValueError(f"{where}: expected (b, t, ...), got {tuple(x.shape)}")
    b, t = x.shape[:2]
    return x.reshape(1, b * t, *x.shape[2:]), cu_seqlens_from_seq_idx(where, seq_idx, b, t, x.device)


def prefill_with_states_at(
    where: str, prefill: Prefill, x: Tensor, positions: Iterable[Any], cache: Any
) -> tuple[Tensor, list[Any]]:
    """Return the outputs of x (b, t, ...), and the caches after its first p steps for every p of `positions`.

    Raises:
        TypeError: A position is not an integer.
        ValueError: A position is not between 1 and t.
    """
    t, raw_positions = x.shape[1], list(positions)
    try:
        cuts = [operator.index(p) for p in raw_positions]
    except TypeError:
        raise TypeError(f"{where}: positions must be integers, 1 to t = {t}, got {raw_positions}") from None
    if invalid := [p for p in cuts if not 1 <= p <= t]:
        raise ValueError(f"{where}: positions must be 1 to t = {t}, got {invalid[0]}")
    outputs, caches, start = [], {}, 0
    for stop in sorted({*cuts, t}):
        y, cache = prefill(x[:, start:stop], cache)
        outputs.append(y)
        caches[stop] = cache
        start = stop
    return torch.cat(outputs, 1), [caches[p] for p in cuts]
