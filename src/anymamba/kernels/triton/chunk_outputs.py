"""The outputs of the scan, from the states that enter its chunks (scan/serial.py, K2 and K5).

    y_i[p] = exp(Lam_i) <q_i, H_c[p]> + Σ_{j ≤ i} <q_i, k_j> exp(Lam_i - Lam_j) w_ij v_j[p] + skip[p] v_i[p]

`j ≤ i` compares steps, so that all MIMO ranks of a step see each other. `w_ij` is 1 for the plain scan and dt_j for
Mamba-2. For Mamba-3's trapezoid it is gamma_j in the same step and gamma_j + kappa_{j+1} for later ones, so one scan
computes either pathway and no term is subtracted.

One program for each chunk, head and tile of p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anymamba.kernels.triton.elementwise import store_rounded
from anymamba.kernels.triton.tiles import (
    causal_decay,
    chunk_span,
    decay_between,
    dot,
    load_by_step,
    load_columns,
    load_rows,
    running_decay,
)


@triton.jit
def write_outputs(
    v,  # (tokens, RANK, h, p)
    k,  # (tokens, RANK, g, n)
    q,  # (tokens, RANK, g, n)
    log_decay,  # (tokens, h)
    scale,  # (tokens, h), or None: weight of a value for later steps, and for the state
    diagonal,  # (tokens, h), or None: its weight in its own step, if it is another
    skip,  # (h, p), or None
    table,  # (chunks, 2), or None
    states,  # (chunks, h, p, n): states that enter the chunks
    y,  # (tokens, RANK, h, p)
    t,
    chunks_per_row,
    chunk_len,
    h,
    p,
    n,
    heads_per_group,
    v_stride_t,
    v_stride_r,
    v_stride_h,
    k_stride_t,
    k_stride_r,
    k_stride_g,
    q_stride_t,
    q_stride_r,
    q_stride_g,
    a_stride_t,
    a_stride_h,
    s_stride_t,
    s_stride_h,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute y; grid (chunks, h, tiles of p)."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, steps = chunk_span(table, chunk, t, chunks_per_row, chunk_len, PACKED)
    if steps <= 0:
        return
    columns_p = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    group = head // heads_per_group
    state = states + (chunk * h + head) * p * n

    # 1) Scores, and what the queries read from the entering state.
    scores_ij = tl.zeros((ROWS, ROWS), ACC)
    y_ip = tl.zeros((ROWS, WIDTH), ACC)
    for n0 in range(0, n, STATE):
        columns_n = n0 + tl.arange(0, STATE)
        q_in = load_rows(q + group * q_stride_g, start, steps, columns_n, n, q_stride_t, q_stride_r, ROWS, RANK)
        k_nj = load_columns(k + group * k_stride_g, start, steps, columns_n, n, k_stride_t, k_stride_r, ROWS, RANK)
        scores_ij += dot(q_in, k_nj, OPERAND, PRECISION)
        offsets = columns_p[None, :] * n + columns_n[:, None]
        state_np = tl.load(state + offsets, mask=(columns_n < n)[:, None] & (columns_p < p)[None, :], other=0.0)
        y_ip += dot(q_in, state_np, OPERAND, PRECISION)

    # 2) Decays.
    high, low, _, _ = running_decay(log_decay + head * a_stride_h, start, steps, a_stride_t, ROWS, RANK, ACC)
    y_ip *= decay_between(high, low, 0.0, 0.0)[:, None]
    weight_ij = causal_decay(high, low, steps, ROWS, RANK)
    if scale is not None:
        scale_j = load_by_step(scale + head * s_stride_h, start, steps, s_stride_t, ROWS, RANK, ACC)
        if diagonal is not None:
            diagonal_j = load_by_step(diagonal + head * s_stride_h, start, steps, s_stride_t, ROWS, RANK, ACC)
            step = tl.arange(0, ROWS) // RANK
            weight_ij *= tl.where(step[:, None] > step[None, :], scale_j[None, :], diagonal_j[None, :])
        else:
            weight_ij *= scale_j[None, :]

    # 3) The values of the chunk.
    v_jp = load_rows(v + head * v_stride_h, start, steps, columns_p, p, v_stride_t, v_stride_r, ROWS, RANK)
    y_ip += dot(scores_ij * weight_ij, v_jp, OPERAND, PRECISION)
    if skip is not None:
        y_ip += tl.load(skip + head * p + columns_p, mask=columns_p < p, other=0.0).to(ACC)[None, :] * v_jp.to(ACC)
    i = tl.arange(0, ROWS)
    offsets = (i * h * p)[:, None] + columns_p[None, :]
    mask = (i // RANK < steps)[:, None] & (columns_p < p)[None, :]
    store_rounded(y + (start * RANK * h + head) * p + offsets, y_ip, mask)
