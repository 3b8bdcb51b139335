"""Mamba-3's gate over MIMO ranks (contract: `anymamba.ops.rank_gate`).

    o[c] = Σ_r out[r, c] y[r, c] silu(z[c] gate[r, c])

over the channels c = (head, width) of a token. Grid of both kernels: blocks of tokens × blocks of channels. The
backward writes what each block adds to the gradients of the weights, (blocks, 2, r, c); torch adds up the blocks.
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
from anymamba.kernels.triton.launch import launch
from anymamba.kernels.triton.selection import GpuKernel

_CHANNELS = 128  # of a block


@triton.jit
def gate_ranks(
    y,
    z,
    gate,
    out,
    o,
    tokens,
    channels,
    stride_y,
    stride_r,
    stride_z,
    R: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write the outputs of a block."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = (token < tokens)[:, None] & (c < channels)[None, :]
    z_block = tl.load(z + token[:, None] * stride_z + c[None, :], mask=mask, other=0.0).to(ACC)
    total = tl.zeros((TOKENS, CHANNELS), ACC)
    for r in tl.static_range(R):
        opened = z_block
        value = tl.load(y + token[:, None] * stride_y + r * stride_r + c[None, :], mask=mask, other=0.0).to(ACC)
        if gate is not None:
            opened = z_block * tl.load(gate + r * channels + c, mask=c < channels, other=0.0).to(ACC)[None, :]
            value *= tl.load(out + r * channels + c, mask=c < channels, other=0.0).to(ACC)[None, :]
        total += value * silu(opened)
    store_rounded(o + token[:, None] * channels + c[None, :], total, mask)


@triton.jit
def differentiate_gate(
    do,
    y,
    z,
    gate,
    out,
    dy,
    dz,
    partial,
    tokens,
    channels,
    stride_y,
    stride_r,
    stride_z,
    R: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write the gradients of a block, and what it adds to those of the weights."""
    block = tl.program_id(0).to(tl.int64)
    token = block * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = (token < tokens)[:, None] & (c < channels)[None, :]
    z_block = tl.load(z + token[:, None] * stride_z + c[None, :], mask=mask, other=0.0).to(ACC)
    grad = tl.load(do + token[:, None] * channels + c[None, :], mask=mask, other=0.0).to(ACC)
    dz_block = tl.zeros((TOKENS, CHANNELS), ACC)
    for r in tl.static_range(R):
        value = tl.load(y + token[:, None] * stride_y + r * stride_r + c[None, :], mask=mask, other=0.0).to(ACC)
        opened = z_block
        weighted = grad
        if gate is not None:
            opening = tl.load(gate + r * channels + c, mask=c < channels, other=0.0).to(ACC)[None, :]
            opened = z_block * opening
            weighted = grad * tl.load(out + r * channels + c, mask=c < channels, other=0.0).to(ACC)[None, :]
        dvalue = weighted * silu(opened)
        dopened = weighted * value * silu_slope(opened)
        if gate is not None:
            sums = partial + (block * 2 * R + r) * channels + c
            tl.store(sums, tl.sum(dopened * z_block, 0), mask=c < channels)
            tl.store(sums + R * channels, tl.sum(grad * value * silu(opened), 0), mask=c < channels)
            dopened *= opening
        dz_block += dopened
        at = (token[:, None] * R + r) * channels + c[None, :]
        store_rounded(dy + at, dvalue, mask)
    store_rounded(dz + token[:, None] * channels + c[None, :], dz_block, mask)


class _Gate(NamedTuple):
    """Inputs of the operator; y as (tokens, ranks, channels), z as (tokens, channels), weights as (ranks, channels)."""

    y: Tensor
    z: Tensor
    gate: Tensor | None
    out: Tensor | None

    @staticmethod
    def read(y: Tensor, z: Tensor, gate: Tensor | None, out: Tensor | None) -> _Gate:
        b, t, r, h, p = y.shape
        weights = [None if x is None else x.transpose(0, 1).reshape(r, h * p).contiguous() for x in (gate, out)]
        return _Gate(_rows(y.reshape(b * t, r, h * p)), _rows(z.reshape(b * t, h * p)), *weights)

    @property
    def grid(self) -> tuple[int, int]:
        """Return the number of blocks of tokens and of channels."""
        return triton.cdiv(self.y.shape[0], pointwise_rows(_CHANNELS)[0]), triton.cdiv(self.y.shape[2], _CHANNELS)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers that both kernels take."""
        return self.y.shape[0], self.y.shape[2], self.y.stride(0), self.y.stride(1), self.z.stride(0)

    @property
    def constants(self) -> dict[str, Any]:
        """Return the constants of both kernels."""
        tokens, warps = pointwise_rows(_CHANNELS)
        acc = ACC_DTYPES[state_dtype(self.y.dtype)]
        return {"R": self.y.shape[1], "TOKENS": tokens, "CHANNELS": _CHANNELS, "ACC": acc, "num_warps": warps}


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 and not x.is_neg() else x.contiguous()


def _forward(*inputs: Any) -> Tensor:
    gate = _Gate.read(*inputs)
    o = torch.empty(inputs[1].shape, dtype=inputs[1].dtype, device=inputs[1].device)
    launch(gate_ranks, gate.grid, *gate, o, *gate.sizes, **gate.constants)
    return o


def _backward(do: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    y, z, gate_weight, out_weight = inputs
    gate, (r, h, p) = _Gate.read(*inputs), y.shape[2:]
    dy, dz = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (y, z))
    partial = torch.empty((gate.grid[0], 2, r, h * p), dtype=state_dtype(y.dtype), device=y.device)
    tensors = (do.contiguous(), *gate, dy, dz, partial)
    launch(differentiate_gate, gate.grid, *tensors, *gate.sizes, **gate.constants)
    if gate_weight is None:
        return dy, dz, do.new_empty(0), do.new_empty(0)
    dgate, dout = (
        sums.view(r, h, p).transpose(0, 1).to(weight.dtype, memory_format=torch.contiguous_format, copy=True)
        for sums, weight in zip(partial.sum(0), (gate_weight, out_weight), strict=True)
    )
    return dy, dz, dgate, dout


def _examples(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    shapes = ((2, 3, 2, 3, 5), (2, 3, 3, 5), (3, 2, 5), (3, 2, 5))
    return tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)


KERNELS = {"rank_gate": GpuKernel(_forward, _backward, _examples)}
