"""What several kernels share: chunks of time, decays between steps, and products of tiles.

§ Chunks. Rows of a batch are laid end to end, so that a sequence is a range of tokens and a chunk a shorter one. A
chunk never crosses the end of a sequence. Its rows are its steps times their MIMO ranks: row i holds rank `i % RANK` of
step `i // RANK`. Rows after the end of a chunk are masked: they load zeros and store nothing.
Places in memory are a 64-bit number for the chunk, and 32-bit ones within it: half the registers, and what AMD's buffer
loads take.

§ Decays. Log-decays are summed in float64, which is little work for the steps of a chunk, and each running sum `Lam` is
kept as two numbers of the state's dtype, high and low. The difference of two sums is `(high - high) + (low - low)`:
where the first difference cancels it is exact, so a hard reset costs no digits of the small decays after it.

§ Products. Triton's interpreter multiplies bfloat16 as the 16-bit integers that it stores them in, so under it operands
are rounded to bfloat16 and multiplied in float32, which is the same function.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anymamba.kernels.triton.elementwise import INTERPRETED, round_to

MIN_LOG_DECAY = tl.constexpr(-1000.0)  # a factor of zero


@triton.jit
def chunk_span(table, chunk, t, chunks_per_row, chunk_len, PACKED: tl.constexpr):
    """Return the first token of a chunk, and its number of steps: at most 0 if there is no such chunk."""
    if PACKED:
        start = tl.load(table + 2 * chunk)
        stop = tl.load(table + 2 * chunk + 1)
    else:
        row = chunk // chunks_per_row
        start = row * t + (chunk % chunks_per_row) * chunk_len
        stop = tl.minimum(start + chunk_len, (row + 1) * t)
    return start, (stop - start).to(tl.int32)


@triton.jit
def load_rows(x, start, steps, columns, size, stride_t, stride_r, ROWS: tl.constexpr, RANK: tl.constexpr):
    """Return (ROWS, columns) of a tensor (tokens, ranks, ..., size) whose pointer is at the head or group."""
    i = tl.arange(0, ROWS)
    mask = (i // RANK < steps)[:, None] & (columns < size)[None, :]
    offsets = (i // RANK) * stride_t + (i % RANK) * stride_r
    return tl.load(x + start * stride_t + (offsets[:, None] + columns[None, :]), mask=mask, other=0.0)


@triton.jit
def load_columns(x, start, steps, columns, size, stride_t, stride_r, ROWS: tl.constexpr, RANK: tl.constexpr):
    """Return the transpose of `load_rows`, (columns, ROWS)."""
    i = tl.arange(0, ROWS)
    mask = (columns < size)[:, None] & (i // RANK < steps)[None, :]
    offsets = (i // RANK) * stride_t + (i % RANK) * stride_r
    return tl.load(x + start * stride_t + (columns[:, None] + offsets[None, :]), mask=mask, other=0.0)


@triton.jit
def load_by_step(x, start, steps, stride_t, ROWS: tl.constexpr, RANK: tl.constexpr, ACC: tl.constexpr):
    """Return (ROWS,) of a tensor (tokens, heads) whose pointer is at the head: ranks share the number of their step."""
    step = tl.arange(0, ROWS) // RANK
    return tl.load(x + start * stride_t + step * stride_t, mask=step < steps, other=0.0).to(ACC)


@triton.jit
def running_decay(log_decay, start, steps, stride_t, ROWS: tl.constexpr, RANK: tl.constexpr, ACC: tl.constexpr):
    """Return the inclusive running sum of the log-decays at each row, high and low, and the same at the end."""
    i = tl.arange(0, ROWS)
    mask = (i // RANK < steps) & (i % RANK == 0)
    a = tl.load(log_decay + start * stride_t + (i // RANK) * stride_t, mask=mask, other=0.0).to(tl.float64)
    lam = tl.cumsum(tl.maximum(a, MIN_LOG_DECAY), 0)
    end = tl.min(lam, 0)  # sums never increase, so this is the last
    high, end_high = lam.to(ACC), end.to(ACC)
    return high, (lam - high.to(tl.float64)).to(ACC), end_high, (end - end_high.to(tl.float64)).to(ACC)


@triton.jit
def decay_between(high, low, from_high, from_low):
    """Return `exp(Lam - Lam_from)`, at most 1."""
    return tl.exp(tl.minimum((high - from_high) + (low - from_low), 0.0))


@triton.jit
def causal_decay(high, low, steps, ROWS: tl.constexpr, RANK: tl.constexpr):
    """Return the decay from every row (second axis) to every row of the same or a later step (first axis), else 0."""
    step = tl.arange(0, ROWS) // RANK
    causal = (step[:, None] >= step[None, :]) & (step < steps)[:, None]
    return tl.where(causal, decay_between(high[:, None], low[:, None], high[None, :], low[None, :]), 0.0)


@triton.jit
def dot(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return `a @ b` with operands rounded to OPERAND, summed in float32 (float64 for float64)."""
    a, b = round_to(a, OPERAND), round_to(b, OPERAND)
    if INTERPRETED and OPERAND == tl.bfloat16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def dot_exact(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return `a @ b` without rounding `a`, for a `b` that OPERAND holds exactly."""
    if OPERAND == tl.bfloat16:
        first = round_to(a, OPERAND)
        rest = a - first.to(tl.float32)
        second = round_to(rest, OPERAND)
        third = round_to(rest - second.to(tl.float32), OPERAND)
        small = dot(third, b, OPERAND, PRECISION) + dot(second, b, OPERAND, PRECISION)
        return small + dot(first, b, OPERAND, PRECISION)
    return dot(a, b, OPERAND, PRECISION)
