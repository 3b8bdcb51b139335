"""The causal convolution with SiLU, from and to windows (contract: `anymamba.ops.causal_conv`).

    pre_t = bias + Σ_{k<w} weight_k s_{t-w+1+k}        o_t = silu(pre_t)        s = window, then x

A *token* is a step of a row; rows are laid end to end. The sequence of a token starts at the token `begin`; what its
taps read before that is in the window of the sequence, newest input last.

| kernel | grid | writes |
|---|---|---|
| `convolve` | blocks of tokens × blocks of channels | o |
| `slide_window` | sequences × blocks of channels | the new windows |
| `differentiate_pre` | as `convolve` | dpre, and per block a partial sum of the gradients of weight and bias |
| `differentiate_inputs` | as `convolve` | dx, from the dpre of the next w tokens and the gradient of the new window |
| `differentiate_window` | as `slide_window` | the gradient of the windows |

A tap is added in the same order wherever a token is, so a row has the same bits alone, in a batch and packed. Partial
sums are added up by torch, in one order.

Letters: b batch, t time, v channels, w width, k tap, z sequences, n blocks of tokens.
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

_CHANNELS = 128  # of a block


@triton.jit
def load_tap(x, window, token, begin, sequence, c, valid, v, stride_t, W: tl.constexpr, ACC: tl.constexpr):
    """Return the inputs (tokens, channels) at `token`, from the window for those before `begin`."""
    is_input = valid & (token >= begin)
    from_input = tl.load(
        x + token[:, None] * stride_t + c[None, :], mask=is_input[:, None] & (c < v)[None, :], other=0.0
    )
    is_before = valid & (token < begin)
    slot = (sequence[:, None] * v + c[None, :]) * W + (W + token - begin)[:, None]
    from_window = tl.load(window + slot, mask=is_before[:, None] & (c < v)[None, :], other=0.0)
    return from_input.to(ACC) + from_window.to(ACC)


@triton.jit
def compute_pre(
    x, window, weight, bias, token, begin, sequence, c, valid, v, stride_t, W: tl.constexpr, ACC: tl.constexpr
):
    """Return the convolution before its activation, (tokens, channels)."""
    pre = tl.zeros((token.shape[0], c.shape[0]), ACC)
    for k in tl.static_range(W):
        tap = load_tap(x, window, token - (W - 1) + k, begin, sequence, c, valid, v, stride_t, W, ACC)
        pre += tap * tl.load(weight + c * W + k, mask=c < v, other=0.0).to(ACC)[None, :]
    if bias is not None:
        pre += tl.load(bias + c, mask=c < v, other=0.0).to(ACC)[None, :]
    return pre


@triton.jit
def locate(spans, first, tokens, t, TOKENS: tl.constexpr, PACKED: tl.constexpr):
    """Return tokens, whether they exist, the number of their sequence, its first token and the one after its last."""
    token = first + tl.arange(0, TOKENS).to(tl.int64)
    valid = token < tokens
    if PACKED:
        sequence = tl.load(spans + token, mask=valid, other=0).to(tl.int64)
        begin = tl.load(spans + tokens + token, mask=valid, other=0).to(tl.int64)
        stop = tl.load(spans + 2 * tokens + token, mask=valid, other=0).to(tl.int64)
    else:
        sequence = token // t
        begin = sequence * t
        stop = begin + t
    return token, valid, sequence, begin, stop


@triton.jit
def convolve(
    x,
    window,
    weight,
    bias,
    spans,
    out,
    tokens,
    t,
    v,
    stride_t,
    W: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write the outputs of a block."""
    token, valid, sequence, begin, _ = locate(spans, tl.program_id(0).to(tl.int64) * TOKENS, tokens, t, TOKENS, PACKED)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    pre = compute_pre(x, window, weight, bias, token, begin, sequence, c, valid, v, stride_t, W, ACC)
    mask = valid[:, None] & (c < v)[None, :]
    store_rounded(out + token[:, None] * v + c[None, :], silu(pre), mask)


@triton.jit
def differentiate_pre(
    x,
    window,
    weight,
    bias,
    spans,
    dout,
    dpre,
    partial,
    tokens,
    t,
    v,
    stride_t,
    W: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write the gradient before the activation, and what the block adds to those of weight and bias."""
    block = tl.program_id(0).to(tl.int64)
    token, valid, sequence, begin, _ = locate(spans, block * TOKENS, tokens, t, TOKENS, PACKED)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = valid[:, None] & (c < v)[None, :]
    pre = compute_pre(x, window, weight, bias, token, begin, sequence, c, valid, v, stride_t, W, ACC)
    grad = tl.load(dout + token[:, None] * v + c[None, :], mask=mask, other=0.0).to(ACC) * silu_slope(pre)
    tl.store(dpre + token[:, None] * v + c[None, :], grad, mask=mask)
    sums = partial + block * (W + 1) * v + c
    for k in tl.static_range(W):
        tap = load_tap(x, window, token - (W - 1) + k, begin, sequence, c, valid, v, stride_t, W, ACC)
        tl.store(sums + k * v, tl.sum(grad * tap, 0), mask=c < v)
    tl.store(sums + W * v, tl.sum(grad, 0), mask=c < v)


@triton.jit
def differentiate_inputs(
    dpre,
    weight,
    spans,
    lengths,
    dnew_window,
    dx,
    tokens,
    t,
    v,
    W: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write the gradient of the inputs of a block."""
    token, valid, sequence, begin, stop = locate(
        spans, tl.program_id(0).to(tl.int64) * TOKENS, tokens, t, TOKENS, PACKED
    )
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    grad = tl.zeros((TOKENS, CHANNELS), ACC)
    for k in tl.static_range(W):
        later = token + (W - 1) - k
        mask = (valid & (later < stop))[:, None] & (c < v)[None, :]
        tap = tl.load(weight + c * W + k, mask=c < v, other=0.0).to(ACC)
        grad += tl.load(dpre + later[:, None] * v + c[None, :], mask=mask, other=0.0) * tap[None, :]
    last = stop
    if lengths is not None:
        last = begin + tl.load(lengths + sequence, mask=valid, other=0)
    slot = W + token - last
    mask = (valid & (slot >= 0) & (slot < W))[:, None] & (c < v)[None, :]
    offset = (sequence[:, None] * v + c[None, :]) * W + slot[:, None]
    grad += tl.load(dnew_window + offset, mask=mask, other=0.0).to(ACC)
    store_rounded(dx + token[:, None] * v + c[None, :], grad, valid[:, None] & (c < v)[None, :])


@triton.jit
def span_of(bounds, lengths, sequence, t, PACKED: tl.constexpr):
    """Return the first token of a sequence, and its number of real tokens."""
    if PACKED:
        begin = tl.load(bounds + sequence).to(tl.int64)
        length = tl.load(bounds + sequence + 1).to(tl.int64) - begin
    else:
        begin = sequence * t
        length = begin * 0 + t
        if lengths is not None:
            length = tl.load(lengths + sequence).to(tl.int64)
    return begin, length


@triton.jit
def slide_window(
    x,
    window,
    bounds,
    lengths,
    new_window,
    t,
    v,
    stride_t,
    W: tl.constexpr,
    CHANNELS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Write the last w inputs of a sequence, (channels, w)."""
    sequence = tl.program_id(0).to(tl.int64)
    begin, length = span_of(bounds, lengths, sequence, t, PACKED)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    for j in tl.static_range(W):
        after = length - W + j  # steps after the first; negative ones are in the window
        tap = tl.load(x + (begin + after) * stride_t + c, mask=(c < v) & (after >= 0), other=0.0)
        slot = (sequence * v + c) * W
        tap += tl.load(window + slot + (W + after), mask=(c < v) & (after < 0), other=0.0)
        tl.store(new_window + slot + j, tap, mask=c < v)


@triton.jit
def differentiate_window(
    dpre,
    weight,
    bounds,
    lengths,
    dnew_window,
    dwindow,
    t,
    v,
    W: tl.constexpr,
    CHANNELS: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write the gradient of the window of a sequence: its first tokens read it, and the new window may contain it."""
    sequence = tl.program_id(0).to(tl.int64)
    begin, length = span_of(bounds, lengths, sequence, t, PACKED)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    steps = length
    if not PACKED:
        steps = length * 0 + t  # padding is convolved too
    slot = (sequence * v + c) * W
    for j in tl.static_range(W):
        grad = tl.zeros((CHANNELS,), ACC)
        for k in tl.static_range(W):
            if k < j:  # tap k of step j - 1 - k
                mask = (c < v) & (j - 1 - k < steps)
                tap = tl.load(weight + c * W + k, mask=c < v, other=0.0).to(ACC)
                grad += tap * tl.load(dpre + (begin + j - 1 - k) * v + c, mask=mask, other=0.0)
        mask = (c < v) & (j >= length)
        grad += tl.load(dnew_window + slot + (j - length), mask=mask, other=0.0).to(ACC)
        store_rounded(dwindow + slot + j, grad, c < v)


class _Conv(NamedTuple):
    """Inputs of the operator, as the kernels read them."""

    x: Tensor
    window: Tensor
    weight: Tensor
    bias: Tensor | None
    lengths: Tensor | None
    cu_seqlens: Tensor | None

    @staticmethod
    def read(*inputs: Any) -> _Conv:
        x, window, weight, bias, lengths, cu_seqlens = inputs
        b, t, v = x.shape
        x = row_major(x)
        rows = x if b == 1 or t == 1 or x.stride(0) == t * x.stride(1) else x.contiguous()
        bias = None if bias is None else bias.contiguous()
        return _Conv(rows, window.contiguous(), weight.contiguous(), bias, lengths, cu_seqlens)

    @property
    def stride(self) -> int:
        """Return the distance of two tokens."""
        return self.x.stride(1) if self.x.shape[1] > 1 else self.x.stride(0)

    @property
    def by_token(self) -> tuple[tuple[int, int], dict[str, Any]]:
        """Return the grid and the constants of kernels of blocks of tokens."""
        rows, warps = pointwise_rows(_CHANNELS)
        (b, t, v), w = self.x.shape, self.window.shape[2]
        constants = {"W": w, "TOKENS": rows, "CHANNELS": _CHANNELS, "PACKED": self.cu_seqlens is not None}
        acc = ACC_DTYPES[state_dtype(self.x.dtype)]
        return (triton.cdiv(b * t, rows), triton.cdiv(v, _CHANNELS)), {**constants, "ACC": acc, "num_warps": warps}

    @property
    def by_sequence(self) -> tuple[tuple[int, int], dict[str, Any]]:
        """Return the grid and the constants of kernels of sequences."""
        (z, v, w), packed = self.window.shape, self.cu_seqlens is not None
        return (z, triton.cdiv(v, _CHANNELS)), {"W": w, "CHANNELS": _CHANNELS, "PACKED": packed, "num_warps": 4}

    def spans(self) -> Tensor | None:
        """Return the number of each token's sequence, its first token and the one after its last, (3, t)."""
        if self.cu_seqlens is None:
            return None
        time = torch.arange(self.x.shape[1], device=self.x.device, dtype=self.cu_seqlens.dtype)
        number = torch.bucketize(time, self.cu_seqlens[1:], right=True)
        return torch.stack([number, self.cu_seqlens[number], self.cu_seqlens[number + 1]])


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    conv = _Conv.read(*inputs)
    x, window, weight, bias, lengths, cu_seqlens = conv
    (b, t, v), (grid, constants) = x.shape, conv.by_token
    out, new_window = torch.empty((b, t, v), dtype=x.dtype, device=x.device), torch.empty_like(window)
    if not x.numel():
        return out, window.clone()
    launch(convolve, grid, x, window, weight, bias, conv.spans(), out, b * t, t, v, conv.stride, **constants)
    grid, constants = conv.by_sequence
    launch(slide_window, grid, x, window, cu_seqlens, lengths, new_window, t, v, conv.stride, **constants)
    return out, new_window


def _backward(dout: Tensor, dnew_window: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    conv = _Conv.read(*inputs)
    x, window, weight, bias, lengths, cu_seqlens = conv
    (b, t, v), w, acc_dtype = x.shape, window.shape[2], state_dtype(x.dtype)
    dx, dwindow = torch.empty((b, t, v), dtype=x.dtype, device=x.device), torch.empty_like(window)
    if not x.numel():
        return dx, dnew_window.clone(), torch.zeros_like(weight), torch.zeros_like(weight[:, 0])
    dout, dnew_window, spans = dout.contiguous(), dnew_window.contiguous(), conv.spans()
    # 1) Before the activation, and partial sums for weight and bias.
    grid, constants = conv.by_token
    dpre = torch.empty((b, t, v), dtype=acc_dtype, device=x.device)
    partial = torch.empty((grid[0], w + 1, v), dtype=acc_dtype, device=x.device)
    sizes = (b * t, t, v)
    launch(
        differentiate_pre, grid, x, window, weight, bias, spans, dout, dpre, partial, *sizes, conv.stride, **constants
    )
    # 2) Inputs and windows.
    launch(differentiate_inputs, grid, dpre, weight, spans, lengths, dnew_window, dx, *sizes, **constants)
    by_sequence, others = conv.by_sequence
    others["ACC"] = constants["ACC"]
    launch(differentiate_window, by_sequence, dpre, weight, cu_seqlens, lengths, dnew_window, dwindow, t, v, **others)
    # 3) Weight and bias.
    sums = partial.sum(0)
    dbias = sums[w].to(weight.dtype if bias is None else bias.dtype, copy=True)
    return dx, dwindow, sums[:w].t().to(weight.dtype, memory_format=torch.contiguous_format), dbias


def _examples(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    x, window = torch.randn(2, 5, 6, device=device), torch.randn(2, 6, 4, device=device)
    weight, bias, lengths = torch.randn(6, 4), torch.randn(6), torch.tensor([5, 2])
    return x.to(dtype), window.to(dtype), weight.to(device, dtype), bias.to(device, dtype), lengths.to(device), None


KERNELS = {"causal_conv": GpuKernel(_forward, _backward, _examples)}
