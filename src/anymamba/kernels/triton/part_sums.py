"""Sums of what several programs computed, in one order whatever the batch is: torch's own sum chooses by shape."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymamba.kernels.triton.elementwise import store_rounded
from anymamba.kernels.triton.launch import launch

_BLOCK = 1024


@triton.jit
def sum_parts(parts, total, count, size, BLOCK: tl.constexpr):
    """Compute `total[i] = Σ_part parts[part, i]`, first to last; grid (blocks of i)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    sum_i = tl.load(parts + i, mask=mask, other=0.0)
    for part in range(1, count):
        sum_i += tl.load(parts + (part * size).to(tl.int64) + i, mask=mask, other=0.0)
    store_rounded(total + i, sum_i, mask)


def add_parts(parts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum contiguous `parts` over their first axis, rounded to `dtype` at the end."""
    dtype = dtype or parts.dtype
    if parts.shape[0] == 1:
        return parts[0].to(dtype)
    total = parts.new_empty(parts.shape[1:], dtype=dtype)
    launch(
        sum_parts,
        (-(-total.numel() // _BLOCK),),
        parts,
        total,
        parts.shape[0],
        total.numel(),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return total
