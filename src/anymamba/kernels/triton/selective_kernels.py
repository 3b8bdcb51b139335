"""Mamba-1's selective scan, with softplus, skip and gate (contract: scan/selective_scan.py).

With `size = softplus(dt)`, for channel i and state n:

    h_t[i, n] = exp(size_t[i] A[i, n]) h_{t-1}[i, n] + size_t[i] x_t[i] B_t[n]
    y_t[i] = (Σ_n C_t[n] h_t[i, n] + D[i] x_t[i]) silu(z_t[i])

The gradient, backward in time, with `grad = dy silu(z)` and g the gradient of h:

    g_t = grad_t ⊗ C_t + exp(size_{t+1} A) g_{t+1}         E_t = g_t exp(size_t A) h_{t-1}, the gradient of size_t A
    dC_t[n] = Σ_i grad_t h_t     dB_t[n] = Σ_i g_t size_t x_t     dA = Σ_t E_t size_t
    dx_t = size_t Σ_n g_t B_t + D grad_t                    dsize_t = Σ_n E_t A + x_t Σ_n g_t B_t

One program for each sequence and block of channels walks over time with its states in registers: there are thousands of
independent channels, and no two steps of one can be computed at once without writing every state to memory. The
backward first stores the state before every STEPS-th step, and then recomputes the states between, from the start of
their block for every step: 4.5 state updates per step for blocks of 8, all in registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.core.operators import allocate_like
from anymamba.kernels.triton.block_sizes import fit
from anymamba.kernels.triton.elementwise import ACC_DTYPES, sigmoid, silu, silu_slope, softplus, store_rounded
from anymamba.kernels.triton.launch import launch, row_major
from anymamba.kernels.triton.part_sums import add_parts
from anymamba.kernels.triton.selection import GpuKernel

_STEPS = 8  # of a block, which is recomputed from one stored state


@triton.jit
def sequence_span(bounds, sequence, t, PACKED: tl.constexpr):
    """Return the first token of a sequence, and its number of steps."""
    if PACKED:
        start = tl.load(bounds + sequence).to(tl.int64)
        return start, (tl.load(bounds + sequence + 1) - start).to(tl.int32)
    return sequence * t, t


@triton.jit
def step_state(state_in, rates_in, x_i, size_i, b_n):
    """Return the state after a step."""
    return tl.exp(size_i[:, None] * rates_in) * state_in + (size_i * x_i)[:, None] * b_n[None, :]


@triton.jit
def scan_channels(
    x,  # (tokens, i)
    dt,  # (tokens, i)
    rates,  # (i, n): A
    b,  # (tokens, n)
    c,  # (tokens, n)
    skip,  # (i,), or None
    z,  # (tokens, i), or None
    bounds,  # (sequences + 1,), or None
    initial,  # (sequences, i, n)
    y,  # (tokens, i), or None: then states are stored in its place
    final,  # (sequences, i, n)
    states,  # (tokens / STEPS + sequences, i, n), or None: the state before every block of steps
    t,
    width,
    n,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    z_stride,
    STEPS: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute y, or the stored states; grid (sequences, blocks of channels)."""
    sequence = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    j = tl.arange(0, STATE)
    is_i, is_n = i < width, j < n
    mask = is_i[:, None] & is_n[None, :]
    at = i[:, None] * n + j[None, :]
    start, steps = sequence_span(bounds, sequence, t, PACKED)
    rates_in = tl.load(rates + at, mask=mask, other=0.0)
    state_in = tl.load(initial + sequence * width * n + at, mask=mask, other=0.0)
    if y is not None and skip is not None:
        skip_i = tl.load(skip + i, mask=is_i, other=0.0).to(ACC)
    for step in range(steps):
        token = start + step
        if states is not None and step % STEPS == 0:
            block = start // STEPS + sequence + step // STEPS
            tl.store(states + block * width * n + at, state_in, mask=mask)
        x_i = tl.load(x + token * x_stride + i, mask=is_i, other=0.0).to(ACC)
        size_i = softplus(tl.load(dt + token * dt_stride + i, mask=is_i, other=0.0))
        b_n = tl.load(b + token * b_stride + j, mask=is_n, other=0.0).to(ACC)
        state_in = step_state(state_in, rates_in, x_i, size_i, b_n)
        if y is not None:
            c_n = tl.load(c + token * c_stride + j, mask=is_n, other=0.0).to(ACC)
            y_i = tl.sum(state_in * c_n[None, :], 1)
            if skip is not None:
                y_i += skip_i * x_i
            if z is not None:
                z_i = tl.load(z + token * z_stride + i, mask=is_i, other=0.0).to(ACC)
                y_i *= silu(z_i)
            store_rounded(y + token * width + i, y_i, is_i)
    if final is not None:
        tl.store(final + sequence * width * n + at, state_in, mask=mask)


@triton.jit
def scan_channels_backward(
    x,  # (tokens, i)
    dt,  # (tokens, i)
    rates,  # (i, n)
    b,  # (tokens, n)
    c,  # (tokens, n)
    skip,  # (i,), or None
    z,  # (tokens, i), or None
    bounds,  # (sequences + 1,), or None
    states,  # (tokens / STEPS + sequences, i, n)
    dy,  # (tokens, i)
    dfinal,  # (sequences, i, n)
    dx,  # (tokens, i)
    ddt,  # (tokens, i)
    drates,  # (sequences, i, n)
    db,  # (blocks of channels, tokens, n)
    dc,  # (blocks of channels, tokens, n)
    dskip,  # (sequences, i), or None
    dz,  # (tokens, i), or None
    dinitial,  # (sequences, i, n)
    t,
    tokens,
    width,
    n,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    z_stride,
    dy_stride,
    STEPS: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute the gradients, of b and c in parts; grid (sequences, blocks of channels)."""
    sequence = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    j = tl.arange(0, STATE)
    is_i, is_n = i < width, j < n
    mask = is_i[:, None] & is_n[None, :]
    at = i[:, None] * n + j[None, :]
    place = sequence * width * n
    part = tl.program_id(1).to(tl.int64) * tokens
    start, steps = sequence_span(bounds, sequence, t, PACKED)
    rates_in = tl.load(rates + at, mask=mask, other=0.0)
    g_in = tl.load(dfinal + place + at, mask=mask, other=0.0)
    drates_in = tl.zeros((WIDTH, STATE), ACC)
    if skip is not None:
        skip_i = tl.load(skip + i, mask=is_i, other=0.0).to(ACC)
        dskip_i = tl.zeros((WIDTH,), ACC)
    for back in range(steps):
        step = steps - 1 - back
        token = start + step
        # 1) Recompute the state before this step, from the start of its block.
        block = start // STEPS + sequence + step // STEPS
        before_in = tl.load(states + block * width * n + at, mask=mask, other=0.0)
        first = step - step % STEPS
        for earlier in range(first, step):
            place_of = start + earlier
            x_i = tl.load(x + place_of * x_stride + i, mask=is_i, other=0.0).to(ACC)
            size_i = softplus(tl.load(dt + place_of * dt_stride + i, mask=is_i, other=0.0))
            b_n = tl.load(b + place_of * b_stride + j, mask=is_n, other=0.0).to(ACC)
            before_in = step_state(before_in, rates_in, x_i, size_i, b_n)
        # 2) Compute this step.
        x_i = tl.load(x + token * x_stride + i, mask=is_i, other=0.0).to(ACC)
        dt_i = tl.load(dt + token * dt_stride + i, mask=is_i, other=0.0)
        size_i = softplus(dt_i)
        b_n = tl.load(b + token * b_stride + j, mask=is_n, other=0.0).to(ACC)
        c_n = tl.load(c + token * c_stride + j, mask=is_n, other=0.0).to(ACC)
        decay_in = tl.exp(size_i[:, None] * rates_in)
        kept_in = decay_in * before_in
        state_in = kept_in + (size_i * x_i)[:, None] * b_n[None, :]
        # 3) Pass the gradient through the gate.
        grad_i = tl.load(dy + token * dy_stride + i, mask=is_i, other=0.0).to(ACC)
        if z is not None:
            read_i = tl.sum(state_in * c_n[None, :], 1)
            if skip is not None:
                read_i += skip_i * x_i
            z_i = tl.load(z + token * z_stride + i, mask=is_i, other=0.0).to(ACC)
            dz_i = grad_i * read_i * silu_slope(z_i)
            store_rounded(dz + token * width + i, dz_i, is_i)
            grad_i *= silu(z_i)
        # 4) Pass it to the inputs of this step, and to the state before it.
        g_in += grad_i[:, None] * c_n[None, :]
        tl.store(dc + (part + token) * n + j, tl.sum(grad_i[:, None] * state_in, 0), mask=is_n)
        tl.store(db + (part + token) * n + j, tl.sum((size_i * x_i)[:, None] * g_in, 0), mask=is_n)
        through_i = tl.sum(g_in * b_n[None, :], 1)
        exponent_in = g_in * kept_in
        drates_in += exponent_in * size_i[:, None]
        dsize_i = tl.sum(exponent_in * rates_in, 1) + x_i * through_i
        tl.store(ddt + token * width + i, dsize_i * sigmoid(dt_i), mask=is_i)
        dx_i = size_i * through_i
        if skip is not None:
            dx_i += skip_i * grad_i
            dskip_i += grad_i * x_i
        store_rounded(dx + token * width + i, dx_i, is_i)
        g_in *= decay_in
    tl.store(dinitial + place + at, g_in, mask=mask)
    tl.store(drates + place + at, drates_in, mask=mask)
    if skip is not None:
        tl.store(dskip + sequence * width + i, dskip_i, mask=is_i)


class _Selective(NamedTuple):
    """Inputs of the operator, in its order."""

    x: Tensor
    dt: Tensor
    rates: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor | None
    z: Tensor | None
    initial_state: Tensor
    cu_seqlens: Tensor | None
    chunk_len: int | None
    algorithm: str

    def launch(self, kernel: Any, results: tuple[Tensor | None, ...], dy: Tensor | None = None) -> None:
        """Launch a kernel with all of them."""
        b, t, width = self.x.shape
        x, dt, keys, queries = (row_major(tensor).flatten(0, 1) for tensor in (self.x, self.dt, self.b, self.c))
        z = None if self.z is None else row_major(self.z).flatten(0, 1)
        skip = None if self.skip is None else self.skip.contiguous()
        strides = (*(tensor.stride(0) for tensor in (x, dt, keys, queries)), 0 if z is None else z.stride(0))
        counts = (t, width, self.rates.shape[1]) if dy is None else (t, b * t, width, self.rates.shape[1])
        launch(
            kernel,
            (self.initial_state.shape[0], -(-width // self.block)),
            *(x, dt, self.rates.contiguous(), keys, queries, skip, z, self.cu_seqlens),
            *results,
            *counts,
            *strides,
            *(() if dy is None else (dy.stride(0),)),
            STEPS=_STEPS,
            PACKED=self.cu_seqlens is not None,
            WIDTH=self.block,
            STATE=fit(self.rates.shape[1], 1 << 20),
            ACC=ACC_DTYPES[state_dtype(self.x.dtype)],
            num_warps=4,
            num_stages=1,
        )

    @property
    def block(self) -> int:
        """Return the channels of a program: fewer for larger states, which are in registers."""
        return max(1, 512 // fit(self.rates.shape[1], 512))

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to compute."""
        return not self.x.numel() or not self.rates.shape[1]

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return y and the final states."""
        y, final_state = allocate_like(self.x, self.initial_state)
        self.launch(scan_channels, (self.initial_state.contiguous(), y, final_state, None))
        return y, final_state

    def backward(self, dy: Tensor, dfinal_state: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the first eight inputs."""
        b, t, width = self.x.shape
        n, sequences = self.rates.shape[1], self.initial_state.shape[0]
        states = self.rates.new_empty((b * t // _STEPS + sequences, width, n))
        self.launch(scan_channels, (self.initial_state.contiguous(), None, None, states))
        dx, ddt, dinitial = allocate_like(self.x, self.dt, self.initial_state)
        dz = None if self.z is None else allocate_like(self.z)[0]
        drates = self.rates.new_empty((sequences, width, n))
        db, dc = (self.rates.new_empty((-(-width // self.block), b * t, n)) for _ in range(2))
        dskip = None if self.skip is None else self.rates.new_empty((sequences, width))
        dy = row_major(dy).flatten(0, 1)
        results = (states, dy, dfinal_state.contiguous(), dx, ddt, drates, db, dc, dskip, dz, dinitial)
        self.launch(scan_channels_backward, results, dy)
        none = dy.new_empty(0)
        db, dc = (add_parts(parts, self.b.dtype).view(self.b.shape) for parts in (db, dc))
        dd = none if dskip is None or self.skip is None else dskip.sum(0).to(self.skip.dtype)
        return dx, ddt, drates.sum(0), db, dc, dd, none if dz is None else dz, dinitial


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    scan = _Selective(*inputs)
    return (torch.zeros_like(scan.x), scan.initial_state.clone()) if scan.is_empty else scan.forward()


def _backward(dy: Tensor, dfinal_state: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    scan = _Selective(*inputs)
    if scan.is_empty:
        zeros = [dy.new_empty(0) if x is None else torch.zeros_like(x) for x in scan[:7]]
        return (*zeros, dfinal_state.clone())
    return scan.backward(dy, dfinal_state)


def _examples(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    acc_dtype, (i, n) = state_dtype(dtype), (37, 5)
    x, z = torch.randn((2, 1, 21, i), device=device).to(dtype)
    b, c = torch.randn((2, 1, 21, n), device=device).to(dtype)
    dt, rates = torch.randn((1, 21, i), device=device).to(acc_dtype), -torch.rand((i, n), device=device).to(acc_dtype)
    skip, state = (torch.randn(shape, device=device).to(acc_dtype) for shape in ((i,), (3, i, n)))
    return x, dt, rates, b, c, skip, z, state, torch.tensor([0, 1, 12, 21], device=device), None, "fastest"


KERNELS = {"selective_scan": GpuKernel(_forward, _backward, _examples)}
