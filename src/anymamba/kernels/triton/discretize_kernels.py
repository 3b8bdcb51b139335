"""Step sizes, decays, trapezoidal weights and angular rates (contracts: `anymamba.ops.step_sizes`, `discretize`).

    s = clamp(softplus(dt + dt_bias))     rate = max(act(a), a_floor)     lambda = sigmoid(trapezoid_logit)
    log_decay = -s rate                   gamma = lambda s                kappa = (1 - lambda) s
    ds = ddt - dlog_decay rate + dgamma lambda + dkappa (1 - lambda)
    ddt_raw = ds softplus'  da = -dlog_decay s act'  dlogit = (dgamma - dkappa) s lambda (1 - lambda)

and angular rates `max_rotation π tanh(x)`, or for vectors of three `max_rotation π tanh|x| x / |x|`, whose gradient is
`tanh'` along the vector and `tanh|x| / |x|` across it.

Grid of all kernels: blocks of tokens, with all heads, or all numbers of a token's rotation, in each. The backward
writes what each block adds to the gradient of the bias; torch adds up the blocks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.kernels.triton.block_sizes import pointwise_rows
from anymamba.kernels.triton.elementwise import ACC_DTYPES, sigmoid, softplus, store_rounded, tanh, tanh_slope
from anymamba.kernels.triton.launch import launch, row_major
from anymamba.kernels.triton.selection import GpuKernel

_MAX_WIDTH = 16384  # heads, or numbers of a rotation, that a program can hold


@triton.jit
def load_block(x, token, c, mask, stride, ACC: tl.constexpr):
    """Return (tokens, columns) of a tensor."""
    return tl.load(x + token[:, None] * stride + c[None, :], mask=mask, other=0.0).to(ACC)


@triton.jit
def is_real(lengths, token, time):
    """Return which tokens are no padding."""
    real = token >= 0
    if lengths is not None:
        real = token % time < tl.load(lengths + token // time, mask=real, other=0)
    return real


@triton.jit
def step_size(raw, real, dt_min, dt_max):
    """Return step sizes, and their derivatives: that of softplus within the limits, else zero."""
    free = softplus(raw)
    size = tl.minimum(tl.maximum(free, dt_min), dt_max)
    slope = tl.where((free >= dt_min) & (free <= dt_max), sigmoid(raw), 0.0)
    return tl.where(real, size, 0.0), tl.where(real, slope, 0.0)


@triton.jit
def decay_rate(raw, floor, HEAVY: tl.constexpr):
    """Return decay rates, positive, and their derivatives."""
    if HEAVY:
        below = 1.0 / (1.0 - tl.minimum(raw, 0.0))
        free = tl.maximum(raw, 0.0) + below
        steep = tl.where(raw > 0, 1.0, below * below)
    else:
        free = softplus(raw)
        steep = sigmoid(raw)
    return tl.maximum(free, floor), tl.where(free >= floor, steep, 0.0)


@triton.jit
def discretize_heads(
    dt,
    a,
    logit,
    bias,
    lengths,
    size,
    log_decay,
    gamma,
    kappa,
    tokens,
    time,
    heads,
    stride_dt,
    stride_a,
    stride_logit,
    dt_min,
    dt_max,
    floor,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAVY: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write the step sizes of a block and, if there are rates, what is computed from both."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    h = tl.arange(0, HEADS)
    mask = (token < tokens)[:, None] & (h < heads)[None, :]
    at = token[:, None] * heads + h[None, :]
    raw = load_block(dt, token, h, mask, stride_dt, ACC) + tl.load(bias + h, mask=h < heads, other=0.0).to(ACC)[None, :]
    s, _ = step_size(raw, is_real(lengths, token, time)[:, None], dt_min, dt_max)
    tl.store(size + at, s, mask=mask)
    if a is not None:
        rate, _ = decay_rate(load_block(a, token, h, mask, stride_a, ACC), floor, HEAVY)
        x = load_block(logit, token, h, mask, stride_logit, ACC)
        tl.store(log_decay + at, -s * rate, mask=mask)
        tl.store(gamma + at, sigmoid(x) * s, mask=mask)
        tl.store(kappa + at, sigmoid(-x) * s, mask=mask)


@triton.jit
def differentiate_heads(
    dsize,
    dlog_decay,
    dgamma,
    dkappa,
    dt,
    a,
    logit,
    bias,
    lengths,
    ddt,
    da,
    dlogit,
    partial,
    tokens,
    time,
    heads,
    stride_dt,
    stride_a,
    stride_logit,
    dt_min,
    dt_max,
    floor,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAVY: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write the gradients of the raw numbers of a block, and what it adds to that of the bias."""
    block = tl.program_id(0).to(tl.int64)
    token = block * TOKENS + tl.arange(0, TOKENS)
    h = tl.arange(0, HEADS)
    mask = (token < tokens)[:, None] & (h < heads)[None, :]
    at = token[:, None] * heads + h[None, :]
    raw = load_block(dt, token, h, mask, stride_dt, ACC) + tl.load(bias + h, mask=h < heads, other=0.0).to(ACC)[None, :]
    s, slope = step_size(raw, is_real(lengths, token, time)[:, None], dt_min, dt_max)
    ds = load_block(dsize, token, h, mask, heads, ACC)
    if a is not None:
        rate, steep = decay_rate(load_block(a, token, h, mask, stride_a, ACC), floor, HEAVY)
        x = load_block(logit, token, h, mask, stride_logit, ACC)
        now, before = sigmoid(x), sigmoid(-x)
        ddecay = load_block(dlog_decay, token, h, mask, heads, ACC)
        dnow = load_block(dgamma, token, h, mask, heads, ACC)
        dbefore = load_block(dkappa, token, h, mask, heads, ACC)
        ds += dnow * now + dbefore * before - ddecay * rate
        store_rounded(da + at, -ddecay * s * steep, mask)
        store_rounded(dlogit + at, (dnow - dbefore) * s * (now * before), mask)
    ds = tl.where(mask, ds * slope, 0.0)
    store_rounded(ddt + at, ds, mask)
    tl.store(partial + block * heads + h, tl.sum(ds, 0), mask=h < heads)


@triton.jit
def bound_angles(
    raw,
    grad,
    result,
    tokens,
    columns,
    stride,
    scale,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write the angular rates of a block or, given the gradient of the rates, that of the raw numbers."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.arange(0, COLUMNS)
    mask = (token < tokens)[:, None] & (c < columns)[None, :]
    x = load_block(raw, token, c, mask, stride, ACC)
    if grad is None:
        value = tanh(x)
    else:
        value = load_block(grad, token, c, mask, columns, ACC) * tanh_slope(x)
    store_rounded(result + token[:, None] * columns + c[None, :], scale * value, mask)


@triton.jit
def bound_vectors(
    raw,
    grad,
    result,
    tokens,
    vectors,
    stride,
    scale,
    tiny,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Do the same for vectors of three; no square overflows or vanishes."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    j = tl.arange(0, COLUMNS)
    mask = (token < tokens)[:, None] & (j < vectors)[None, :]
    x = load_block(raw, token, 3 * j, mask, stride, ACC)
    y = load_block(raw, token, 3 * j + 1, mask, stride, ACC)
    z = load_block(raw, token, 3 * j + 2, mask, stride, ACC)
    most = tl.maximum(tl.maximum(tl.maximum(tl.abs(x), tl.abs(y)), tl.abs(z)), tiny)
    x /= most
    y /= most
    z /= most
    size = tl.sqrt(x * x + y * y + z * z)
    length = most * size
    inverse = 1.0 / tl.maximum(size, tiny)
    x *= inverse
    y *= inverse
    z *= inverse
    value = tanh(length)
    at = token[:, None] * (3 * vectors) + 3 * j[None, :]
    if grad is None:
        out_x = value * x
        out_y = value * y
        out_z = value * z
    else:
        dx = load_block(grad, token, 3 * j, mask, 3 * vectors, ACC)
        dy = load_block(grad, token, 3 * j + 1, mask, 3 * vectors, ACC)
        dz = load_block(grad, token, 3 * j + 2, mask, 3 * vectors, ACC)
        across = tl.where(length > tiny, value / tl.maximum(length, tiny), 1.0)
        along = (tanh_slope(length) - across) * (x * dx + y * dy + z * dz)
        out_x = across * dx + along * x
        out_y = across * dy + along * y
        out_z = across * dz + along * z
    store_rounded(result + at, scale * out_x, mask)
    store_rounded(result + at + 1, scale * out_y, mask)
    store_rounded(result + at + 2, scale * out_z, mask)


class _Heads(NamedTuple):
    """What is computed per head: raw numbers (tokens, heads), and the numbers that both kernels take."""

    dt: Tensor
    a: Tensor | None
    logit: Tensor | None
    bias: Tensor
    lengths: Tensor | None

    @staticmethod
    def read(dt: Tensor, a: Tensor | None, logit: Tensor | None, bias: Tensor, lengths: Tensor | None) -> _Heads:
        rows = [None if x is None else row_major(x.flatten(0, 1)) for x in (dt, a, logit)]
        assert rows[0] is not None
        return _Heads(rows[0], rows[1], rows[2], bias.contiguous(), lengths)

    def run(self, kernel: Any, before: tuple[Any, ...], after: tuple[Any, ...], time: int, *numbers: Any) -> None:
        """Launch a kernel with tensors `before` and `after` the raw numbers; `numbers` are options."""
        heavy, *limits = numbers
        (tokens, heads), grid_and_constants = self.dt.shape, _blocks(self.dt)
        grid, constants = grid_and_constants
        strides = (x.stride(0) if x is not None else 0 for x in (self.dt, self.a, self.logit))
        constants["HEADS"] = constants.pop("COLUMNS")
        sizes = (tokens, time, heads, *strides)
        launch(kernel, grid, *before, *self, *after, *sizes, *limits, HEAVY=heavy, **constants)


def _blocks(rows: Tensor, per_row: int = 1) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid and the constants of a kernel for tensors like `rows`, (tokens, columns · per_row)."""
    width = triton.next_power_of_2(max(1, rows.shape[1] // per_row))
    tokens, warps = pointwise_rows(width)
    constants = {"TOKENS": tokens, "COLUMNS": width, "ACC": ACC_DTYPES[state_dtype(rows.dtype)], "num_warps": warps}
    return (triton.cdiv(rows.shape[0], tokens),), constants


def _bound(raw: Tensor, grad: Tensor | None, result: Tensor, max_rotation: float, quaternion: bool) -> None:
    """Launch the kernel of the angular rates, or of their gradient; tensors are (b, t, numbers)."""
    if not result.numel():
        return
    rows, scale = row_major(raw.flatten(0, 1)), max_rotation * math.pi
    grad = None if grad is None else grad.contiguous()
    if not quaternion:
        grid, constants = _blocks(rows)
        launch(bound_angles, grid, rows, grad, result, *rows.shape, rows.stride(0), scale, **constants)
        return
    if rows.shape[1] % 3:
        raise ValueError(f"quaternion rotations are three numbers each, got {rows.shape[1]} in all")
    grid, constants = _blocks(rows, 3)
    tiny = math.sqrt(torch.finfo(state_dtype(rows.dtype)).tiny)
    sizes = (rows.shape[0], rows.shape[1] // 3, rows.stride(0), scale, tiny)
    launch(bound_vectors, grid, rows, grad, result, *sizes, **constants)


def _empty(dtype: torch.dtype, *like: Tensor) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=dtype, device=x.device) for x in like]


def _discretize_forward(*inputs: Any) -> tuple[Tensor, ...]:
    dt, a, logit, rotation, bias, heavy, floor, dt_min, dt_max, max_rotation, quaternion, lengths = inputs
    results = _empty(state_dtype(dt.dtype), dt, dt, dt, dt, rotation)
    heads = _Heads.read(dt, a, logit, bias, lengths)
    heads.run(discretize_heads, (), tuple(results[:4]), dt.shape[1], heavy, dt_min, dt_max, floor)
    _bound(rotation, None, results[4], max_rotation, quaternion)
    return tuple(results)


def _discretize_backward(*arguments: Any) -> tuple[Tensor, ...]:
    cotangents, inputs = [x.contiguous() for x in arguments[:5]], arguments[5:]
    dt, a, logit, rotation, bias, heavy, floor, dt_min, dt_max, max_rotation, quaternion, lengths = inputs
    grads = _empty(dt.dtype, dt, a, logit, rotation)
    heads = _Heads.read(dt, a, logit, bias, lengths)
    partial = _partial_sums(heads)
    after = (*grads[:3], partial)
    heads.run(differentiate_heads, tuple(cotangents[:4]), after, dt.shape[1], heavy, dt_min, dt_max, floor)
    _bound(rotation, cotangents[4], grads[3], max_rotation, quaternion)
    return (*grads, partial.sum(0).to(bias.dtype))


def _partial_sums(heads: _Heads) -> Tensor:
    """Return memory for what each block adds to the gradient of the bias."""
    shape = (_blocks(heads.dt)[0][0], heads.dt.shape[1])
    return torch.empty(shape, dtype=state_dtype(heads.dt.dtype), device=heads.dt.device)


def _steps_forward(*inputs: Any) -> Tensor:
    dt, bias, dt_min, dt_max, lengths = inputs
    (size,) = _empty(state_dtype(dt.dtype), dt)
    after = (size, None, None, None)
    _Heads.read(dt, None, None, bias, lengths).run(discretize_heads, (), after, dt.shape[1], False, dt_min, dt_max, 0.0)
    return size


def _steps_backward(dsize: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    dt, bias, dt_min, dt_max, lengths = inputs
    (ddt,) = _empty(dt.dtype, dt)
    heads = _Heads.read(dt, None, None, bias, lengths)
    partial = _partial_sums(heads)
    before, after = (dsize.contiguous(), None, None, None), (ddt, None, None, partial)
    heads.run(differentiate_heads, before, after, dt.shape[1], False, dt_min, dt_max, 0.0)
    return ddt, partial.sum(0).to(bias.dtype)


def _missing(dt: Tensor, *inputs: Any) -> str:
    widths = (x.shape[2] for x in (dt, *inputs[:3]) if isinstance(x, Tensor) and x.ndim == 3)
    return "" if max(widths) <= _MAX_WIDTH else f"more than {_MAX_WIDTH} heads, or numbers of a rotation"


def _discretize_examples(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    dt, a, logit, rotation, bias = (
        torch.randn(shape, device=device, dtype=dtype) for shape in ((2, 3, 5), (2, 3, 5), (2, 3, 5), (2, 3, 6), (5,))
    )
    lengths = torch.tensor([3, 1], device=device)
    return dt, a, logit, rotation, bias, True, 0.5, 0.125, 2.0, 1.0, True, lengths


def _steps_examples(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    dt, bias = torch.randn(2, 3, 5, device=device, dtype=dtype), torch.randn(5, device=device, dtype=dtype)
    return dt, bias, 0.0, math.inf, None


KERNELS = {
    "step_sizes": GpuKernel(_steps_forward, _steps_backward, _steps_examples, _missing),
    "discretize": GpuKernel(_discretize_forward, _discretize_backward, _discretize_examples, _missing),
}
