"""The states of the scan: what each chunk adds, and the recurrence over chunks.

With `Lam` the running sum of log-decays in a chunk, and weights s (scan/serial.py, K3 and K4):

    S_c[p, n] = Σ_i exp(Lam_end - Lam_i) s_i v_i[p] k_i[n]           H_{c+1} = exp(Lam_end) H_c + S_c

The gradient is the same function, backward in time: what a chunk's outputs pass to the state that enters it, and the
gradient `G` of the state that leaves each chunk:

    dH_c[p, n] = Σ_i exp(Lam_i) dy_i[p] q_i[n]                       G_{c-1} = exp(Lam_end) G_c + dH_c

`add_chunk_states` runs one program for each chunk, head and tile of (p, n). `pass_states` runs one for each sequence,
head and block of a state, with a loop over the chunks. The loop is a kernel of its own, so that everything else is
parallel over chunks: with a batch of one, heads alone would not fill a GPU. For mamba2-130m, 24 heads of (64, 128) with
chunks of 64 steps, a state is written twice and read twice: 49 KB per token, compared with 7 KB of inputs and outputs,
but in loads that wait for nothing except memory. One program for each head that kept its state in registers would move
7 KB, and 24 programs would walk over the chunks one after another, on a card with 108 multiprocessors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anymamba.kernels.triton.tiles import (
    chunk_span,
    decay_between,
    dot_exact,
    load_by_step,
    load_columns,
    load_rows,
    running_decay,
)


@triton.jit
def add_chunk_states(
    v,  # (tokens, RANK, h, p)
    k,  # (tokens, RANK, g, n)
    log_decay,  # (tokens, h)
    scale,  # (tokens, h), or None
    table,  # (chunks, 2), or None
    states,  # (chunks, h, p, n)
    totals,  # (chunks, h): decay of a whole chunk
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
    a_stride_t,
    a_stride_h,
    s_stride_t,
    s_stride_h,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    TO_END: tl.constexpr,  # decay to the end of the chunk, rather than from its start
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute S_c, or dH_c; grid (chunks, h, tiles of p and n)."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tile = tl.program_id(2)
    state_tiles = tl.cdiv(n, STATE)
    start, steps = chunk_span(table, chunk, t, chunks_per_row, chunk_len, PACKED)
    if steps <= 0:
        return
    high, low, end_high, end_low = running_decay(
        log_decay + head * a_stride_h, start, steps, a_stride_t, ROWS, RANK, ACC
    )
    weight = decay_between(end_high, end_low, high, low) if TO_END else decay_between(high, low, 0.0, 0.0)
    if scale is not None:
        weight *= load_by_step(scale + head * s_stride_h, start, steps, s_stride_t, ROWS, RANK, ACC)
    if tile == 0:
        tl.store(totals + chunk * h + head, decay_between(end_high, end_low, 0.0, 0.0))

    columns_p = (tile // state_tiles) * WIDTH + tl.arange(0, WIDTH)
    columns_n = (tile % state_tiles) * STATE + tl.arange(0, STATE)
    v_head = v + head * v_stride_h
    k_group = k + (head // heads_per_group) * k_stride_g
    v_pi = load_columns(v_head, start, steps, columns_p, p, v_stride_t, v_stride_r, ROWS, RANK).to(ACC)
    k_in = load_rows(k_group, start, steps, columns_n, n, k_stride_t, k_stride_r, ROWS, RANK)
    state_pn = dot_exact(v_pi * weight[None, :], k_in, OPERAND, PRECISION)
    at = states + (chunk * h + head) * p * n + (columns_p[:, None] * n + columns_n[None, :])
    tl.store(at, state_pn, mask=(columns_p < p)[:, None] & (columns_n < n)[None, :])


@triton.jit
def pass_states(
    states,  # (chunks, h, p n): on entry what chunks add, on return the states before them (after them if REVERSE)
    totals,  # (chunks, h)
    initial,  # (z, h, p n)
    final,  # (z, h, p n)
    first_chunk,  # (z + 1,), or None
    chunks_per_row,
    h,
    size,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute H, or G if REVERSE; grid (z, h, blocks of p n)."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    if PACKED:
        first = tl.load(first_chunk + sequence)
        chunks = (tl.load(first_chunk + sequence + 1) - first).to(tl.int32)
    else:
        first = sequence * chunks_per_row
        chunks = chunks_per_row
    place = (sequence * h + head) * size
    state = tl.load(initial + place + i, mask=mask, other=0.0)
    for c in range(chunks):
        chunk = first + (chunks - 1 - c if REVERSE else c)
        block = states + (chunk * h + head) * size + i
        added = tl.load(block, mask=mask, other=0.0)
        tl.store(block, state, mask=mask)
        state = tl.load(totals + chunk * h + head) * state + added
    tl.store(final + place + i, state, mask=mask)
