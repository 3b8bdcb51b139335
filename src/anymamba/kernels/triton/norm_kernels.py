"""Root-mean-square norms, gated or not (contract: `anymamba.ops.rms_norm`).

With `n = u rho`, `rho = (mean_group(u²) + eps)^(-1/2)` and `G = silu(z)`:

    gate first: u = x G, y = weight n              norm first, or no gate: u = x, y = weight n G
    dn = dy weight (G)        du = rho (dn - n mean_group(dn n))        dweight = Σ_rows dy n (G)
    gate first: dx = du G, dz = du x silu'(z)      norm first: dx = du, dz = dy weight n silu'(z)

A program has a few rows of one group, the whole group at once, so that x is read once. Grid of both kernels: blocks of
rows × groups. The backward writes what each block adds to the gradient of the weight; torch adds up the blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.kernels.triton.block_sizes import pointwise_rows
from anymamba.kernels.triton.elementwise import ACC_DTYPES, silu, silu_slope, store_rounded
from anymamba.kernels.triton.launch import launch, row_major
from anymamba.kernels.triton.selection import GpuKernel

_MAX_GROUP = 16384  # channels that a program can hold
_BLOCKS_PER_PROGRAM = 4  # in the backward, whose programs write a row of partial sums each


@triton.jit
def load_block(x, row, c, mask, stride, ACC: tl.constexpr):
    """Return (rows, channels) of a group."""
    return tl.load(x + row[:, None] * stride + c[None, :], mask=mask, other=0.0).to(ACC)


@triton.jit
def normalize(
    x,
    z,
    weight,
    y,
    rows,
    group_size,
    stride_x,
    stride_z,
    stride_y,
    eps,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write the outputs of a block."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, CHANNELS)
    c = tl.program_id(1) * group_size + lane
    mask = (row < rows)[:, None] & (lane < group_size)[None, :]
    u = load_block(x, row, c, mask, stride_x, ACC)
    if z is not None:
        gate = silu(load_block(z, row, c, mask, stride_z, ACC))
        if not NORM_FIRST:
            u *= gate
    rho = 1.0 / tl.sqrt(tl.sum(u * u, 1) / group_size + eps)
    result = u * rho[:, None] * tl.load(weight + c, mask=lane < group_size, other=0.0).to(ACC)[None, :]
    if z is not None and NORM_FIRST:
        result *= gate
    store_rounded(y + row[:, None] * stride_y + c[None, :], result, mask)


@triton.jit
def differentiate(
    dy,
    x,
    z,
    weight,
    dx,
    dz,
    partial,
    rows,
    group_size,
    channels,
    stride_x,
    stride_z,
    eps,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write the gradients of a few blocks of x and z, and the sum of what they add to that of the weight."""
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHANNELS)
    c = tl.program_id(1) * group_size + lane
    scale = tl.load(weight + c, mask=lane < group_size, other=0.0).to(ACC)[None, :]
    dweight = tl.zeros((CHANNELS,), ACC)
    for block in range(BLOCKS):
        row = (program * BLOCKS + block) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (lane < group_size)[None, :]
        u = load_block(x, row, c, mask, stride_x, ACC)
        grad = load_block(dy, row, c, mask, channels, ACC)
        if z is not None:
            gate = load_block(z, row, c, mask, stride_z, ACC)
            if not NORM_FIRST:
                u *= silu(gate)
        rho = 1.0 / tl.sqrt(tl.sum(u * u, 1) / group_size + eps)[:, None]
        n = u * rho
        if z is not None and NORM_FIRST:
            dgate = grad * scale * n
            grad *= silu(gate)
        dweight += tl.sum(grad * n, 0)
        dn = grad * scale
        du = rho * (dn - n * (tl.sum(dn * n, 1) / group_size)[:, None])
        if z is not None:
            if not NORM_FIRST:
                dgate = du * load_block(x, row, c, mask, stride_x, ACC)
                du *= silu(gate)
            dgate *= silu_slope(gate)
            store_rounded(dz + row[:, None] * channels + c[None, :], dgate, mask)
        store_rounded(dx + row[:, None] * channels + c[None, :], du, mask)
    tl.store(partial + program * channels + c, dweight, mask=lane < group_size)


class _Norm(NamedTuple):
    """Inputs of the operator; x and z as rows of channels."""

    x: Tensor
    z: Tensor | None
    weight: Tensor
    group_size: int
    norm_first: bool
    eps: float

    @staticmethod
    def read(*inputs: Any) -> _Norm:
        x, z, weight, group_size, norm_first, eps = inputs
        rows = [None if y is None else row_major(y.reshape(-1, x.shape[-1])) for y in (x, z)]
        assert rows[0] is not None
        return _Norm(rows[0], rows[1], weight.contiguous(), group_size, norm_first, eps)

    @property
    def strides(self) -> tuple[int, int]:
        """Return the distance of two rows of x, and of z."""
        return self.x.stride(0), 0 if self.z is None else self.z.stride(0)

    @property
    def constants(self) -> dict[str, Any]:
        """Return the constants of both kernels."""
        width = triton.next_power_of_2(self.group_size)
        rows, warps = pointwise_rows(width)
        acc = ACC_DTYPES[state_dtype(self.x.dtype)]
        return {"ROWS": rows, "CHANNELS": width, "NORM_FIRST": self.norm_first, "ACC": acc, "num_warps": warps}


def _forward(*inputs: Any) -> Tensor:
    norm = _Norm.read(*inputs)
    x, z, weight, group_size, _, eps = norm
    y = torch.empty(inputs[0].shape, dtype=x.dtype, device=x.device)
    constants, (rows, channels) = norm.constants, x.shape
    grid = (triton.cdiv(rows, constants["ROWS"]), channels // group_size)
    launch(normalize, grid, x, z, weight, y, rows, group_size, *norm.strides, channels, eps, **constants)
    return y


def _backward(dy: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    norm = _Norm.read(*inputs)
    x, z, weight, group_size, _, eps = norm
    constants, (rows, channels) = {**norm.constants, "BLOCKS": _BLOCKS_PER_PROGRAM}, x.shape
    programs = triton.cdiv(rows, _BLOCKS_PER_PROGRAM * constants["ROWS"])
    dx = torch.empty(inputs[0].shape, dtype=x.dtype, device=x.device)
    dz = None if z is None else torch.empty_like(dx)
    partial = torch.empty((programs, channels), dtype=state_dtype(x.dtype), device=x.device)
    tensors = (dy.reshape(rows, channels).contiguous(), x, z, weight, dx, dz, partial)
    sizes = (rows, group_size, channels, *norm.strides, eps)
    launch(differentiate, (programs, channels // group_size), *tensors, *sizes, **constants)
    return dx, dy.new_empty(0) if dz is None else dz, partial.sum(0).to(weight.dtype)


def _missing(*inputs: Any) -> str:
    group_size = inputs[3]
    return "" if group_size <= _MAX_GROUP else f"groups of more than {_MAX_GROUP} channels, got {group_size}"


def _examples(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    x, z, weight = (torch.randn(shape, device=device, dtype=dtype) for shape in ((3, 5, 24), (3, 5, 24), (24,)))
    return x, z, weight, 12, False, 1e-5


KERNELS = {"rms_norm": GpuKernel(_forward, _backward, _examples, _missing)}
