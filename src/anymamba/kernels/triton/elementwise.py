"""What kernels without products share: activations and their derivatives, without libraries of one vendor, and stores.

`exp(-|x|)` never overflows, and no formula cancels: `log1p` is Kahan's `log(1 + u) u / ((1 + u) - 1)`, and `tanh` is a
continued fraction near zero.

A GPU rounds to nearest. Triton's interpreter cuts the digits of a bfloat16 off, so under it they are rounded before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anymamba.kernels.triton.selection import IS_INTERPRETED

INTERPRETED = tl.constexpr(IS_INTERPRETED)
ACC_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}  # of sums, by the dtype of states


@triton.jit
def sigmoid(x):
    """Return `1 / (1 + exp(-x))`."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0 / (1.0 + e), e / (1.0 + e))


@triton.jit
def silu(x):
    """Return `x sigmoid(x)`."""
    return x * sigmoid(x)


@triton.jit
def silu_slope(x):
    """Return the derivative of `silu`."""
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def softplus(x):
    """Return `log(1 + exp(x))`."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    log1p = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    near = tl.minimum(tl.abs(x), 0.5)
    square = near * near
    above = near * (135135.0 + square * (17325.0 + square * (378.0 + square)))
    below = 135135.0 + square * (62370.0 + square * (3150.0 + 28.0 * square))
    size = tl.where(tl.abs(x) < 0.5, above / below, far)
    return tl.where(x < 0, -size, size)


@triton.jit
def tanh_slope(x):
    """Return the derivative of `tanh`, `1 - tanh²`."""
    e = tl.exp(-2.0 * tl.abs(x))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Return `x` in `DTYPE`, rounded to nearest."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def store_rounded(pointer, x, mask):
    """Store `x` in the dtype of the memory, rounded to nearest."""
    tl.store(pointer, round_to(x, pointer.dtype.element_ty), mask=mask)
