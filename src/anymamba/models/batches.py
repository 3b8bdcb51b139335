"""Checks at the entry points of stacks and models: a batch of sequences, padded or packed into rows.

Letters: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from anymamba.ground.checks import (
    check_cu_seqlens,
    expect_alone,
    expect_like,
    expect_shape,
    expect_steps,
    expect_tensor,
)
from anymamba.ground.numerics import is_autocast
from anymamba.ground.padding import Padding
from anymamba.ground.sequences import bounds_of


def check_input(where: str, x: Any, letters: str, width: int, like: Tensor) -> None:
    """Refuse an input of another shape, or with another dtype or device than `like`."""
    sizes = {"d": width}
    expect_shape(where, "x", x, letters, sizes)
    expect_steps(where, sizes.get("t", 1))
    expect_like(where, "x", x, x.dtype if is_autocast(x.device) else like.dtype, like.device)


def end_to_end(where: str, x: Any, seq_idx: Any, cu_seqlens: Any, mask: Any) -> tuple[Tensor, Tensor]:
    """Rows (b, t, ...) of packed sequences as one row (1, b t, ...), and the boundaries of its sequences."""
    expect_alone(where, "seq_idx", cu_seqlens=cu_seqlens, mask=mask)
    expect_tensor(where, "x", x)
    if x.ndim < 2:
        raise ValueError(f"{where}: expected (b, t, ...), got {tuple(x.shape)}")
    b, t = x.shape[:2]
    return x.reshape(1, b * t, *x.shape[2:]), bounds_of(where, seq_idx, b, t, x.device)


def check_batch(where: str, x: Tensor, cu_seqlens: Any, mask: Any) -> Padding | None:
    """Refuse boundaries or a mask that do not fit (b, t, ...); returns how the rows are padded."""
    b, t = x.shape[:2]
    if cu_seqlens is not None:
        if mask is not None:
            raise ValueError(f"{where}: mask and cu_seqlens exclude each other, got both")
        check_cu_seqlens(where, cu_seqlens, b, t, x.device)
        return None
    return None if mask is None else Padding.of(where, mask, b, t, x.device)


def from_the_first(where: str, name: str, numbers: Sequence[int], n: int) -> list[int]:
    """Numbers from 0 to n - 1; those below zero count from the end.

    Raises:
        ValueError: one is out of range.
    """
    if wrong := [i for i in numbers if not -n <= i < n]:
        raise ValueError(f"{where}: {name} must be {-n} to {n - 1}, got {wrong[0]}")
    return [i % n for i in numbers]
