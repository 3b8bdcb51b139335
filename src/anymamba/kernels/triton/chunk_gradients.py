"""The gradients of the scan, chunk by chunk (scan/serial_recalculated.py has the derivation).

With H the state that enters a chunk, G the gradient of the state that leaves it, `M_ij = exp(Lam_i - Lam_j)`, weights
`w_ij` as in chunk_outputs.py and s_j for the state, `rho = exp(Lam_end - Lam)`, `W = scores ∘ M ∘ w`, `D = dy vᵀ`:

    dv_j = Σ_i W_ij dy_i + s_j rho_j G k_j + skip dy_j           dskip = Σ_i v_i dy_i
    dq_i = Σ_j (D ∘ M ∘ w)_ij k_j + exp(Lam_i) Hᵀ dy_i
    dk_j = Σ_i (D ∘ M ∘ w)_ij q_i + s_j rho_j Gᵀ v_j

both summed over the heads of a group. The weights, with `P = D ∘ M ∘ scores` and `in_j = <v_j, rho_j G k_j>`:

    ds_j = Σ_{i later than j} P_ij + in_j                        ddiagonal_j = Σ_{i in the step of j} P_ij

The log-decays: an exponent is a sum of them over an interval, and passes its gradient to exactly those. So nothing
cancels, with `out_i = <q_i, exp(Lam_i) Hᵀ dy_i>` and `E_ij = P_ij s_j` for i later than j:

    da_t = Σ_{i ≥ t} (out_i + Σ_{j < t} E_ij) + Σ_{j < t} s_j in_j + exp(Lam_end) <G, H>
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
def write_value_gradients(
    v,  # (tokens, RANK, h, p)
    k,  # (tokens, RANK, g, n)
    q,  # (tokens, RANK, g, n)
    log_decay,  # (tokens, h)
    scale,  # (tokens, h), or None
    diagonal,  # (tokens, h), or None
    skip,  # (h, p), or None
    table,  # (chunks, 2), or None
    states,  # (chunks, h, p, n): G
    dy,  # (tokens, RANK, h, p)
    dv,  # (tokens, RANK, h, p)
    dskip,  # (chunks, h, p), or None
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
    dy_stride_t,
    dy_stride_r,
    dy_stride_h,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dv and the chunk's part of dskip; grid (chunks, h, tiles of p)."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, steps = chunk_span(table, chunk, t, chunks_per_row, chunk_len, PACKED)
    if steps <= 0:
        return
    columns_p = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    group = head // heads_per_group
    state = states + (chunk * h + head) * p * n

    # 1) Scores, transposed, and what the state passes to the values.
    scores_ji = tl.zeros((ROWS, ROWS), ACC)
    dv_jp = tl.zeros((ROWS, WIDTH), ACC)
    for n0 in range(0, n, STATE):
        columns_n = n0 + tl.arange(0, STATE)
        k_jn = load_rows(k + group * k_stride_g, start, steps, columns_n, n, k_stride_t, k_stride_r, ROWS, RANK)
        q_ni = load_columns(q + group * q_stride_g, start, steps, columns_n, n, q_stride_t, q_stride_r, ROWS, RANK)
        scores_ji += dot(k_jn, q_ni, OPERAND, PRECISION)
        offsets = columns_p[None, :] * n + columns_n[:, None]
        g_np = tl.load(state + offsets, mask=(columns_n < n)[:, None] & (columns_p < p)[None, :], other=0.0)
        dv_jp += dot(k_jn, g_np, OPERAND, PRECISION)

    # 2) Decays and weights.
    high, low, end_high, end_low = running_decay(
        log_decay + head * a_stride_h, start, steps, a_stride_t, ROWS, RANK, ACC
    )
    into_state_j = decay_between(end_high, end_low, high, low)
    step = tl.arange(0, ROWS) // RANK
    causal = (step[:, None] <= step[None, :]) & (step < steps)[None, :]
    weight_ji = tl.where(causal, decay_between(high[None, :], low[None, :], high[:, None], low[:, None]), 0.0)
    if scale is not None:
        scale_j = load_by_step(scale + head * s_stride_h, start, steps, s_stride_t, ROWS, RANK, ACC)
        into_state_j *= scale_j
        if diagonal is not None:
            diagonal_j = load_by_step(diagonal + head * s_stride_h, start, steps, s_stride_t, ROWS, RANK, ACC)
            weight_ji *= tl.where(step[:, None] < step[None, :], scale_j[:, None], diagonal_j[:, None])
        else:
            weight_ji *= scale_j[:, None]

    # 3) What the outputs pass to the values.
    dy_ip = load_rows(dy + head * dy_stride_h, start, steps, columns_p, p, dy_stride_t, dy_stride_r, ROWS, RANK)
    dv_jp = dv_jp * into_state_j[:, None] + dot(scores_ji * weight_ji, dy_ip, OPERAND, PRECISION)
    if skip is not None:
        dv_jp += tl.load(skip + head * p + columns_p, mask=columns_p < p, other=0.0).to(ACC)[None, :] * dy_ip.to(ACC)
        v_ip = load_rows(v + head * v_stride_h, start, steps, columns_p, p, v_stride_t, v_stride_r, ROWS, RANK)
        dskip_p = tl.sum(v_ip.to(ACC) * dy_ip.to(ACC), 0)
        tl.store(dskip + (chunk * h + head) * p + columns_p, dskip_p, mask=columns_p < p)
    i = tl.arange(0, ROWS)
    offsets = (i * h * p)[:, None] + columns_p[None, :]
    mask = (i // RANK < steps)[:, None] & (columns_p < p)[None, :]
    store_rounded(dv + (start * RANK * h + head) * p + offsets, dv_jp, mask)


@triton.jit
def write_key_query_gradients(
    v,  # (tokens, RANK, h, p)
    k,  # (tokens, RANK, g, n)
    q,  # (tokens, RANK, g, n)
    log_decay,  # (tokens, h)
    scale,  # (tokens, h), or None
    diagonal,  # (tokens, h), or None
    table,  # (chunks, 2), or None
    entering,  # (chunks, h, p, n): H
    leaving,  # (chunks, h, p, n): G
    dy,  # (tokens, RANK, h, p)
    dk,  # (slices, tokens, RANK, g, n)
    dq,  # (slices, tokens, RANK, g, n)
    da,  # (tiles of n, tokens, h)
    dscale,  # (tiles of n, tokens, RANK, h), or None
    ddiagonal,  # (tiles of n, tokens, RANK, h), or None
    t,
    tokens,
    chunks_per_row,
    chunk_len,
    h,
    p,
    n,
    groups,
    heads_per_group,
    slices,
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
    dy_stride_t,
    dy_stride_r,
    dy_stride_h,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the parts of dk, dq, da and the weights' gradients; grid (chunks, groups × slices, tiles of n).

    A slice is HEADS heads of a group, whose gradients of keys and queries add up in registers. Sums over slices and
    tiles are left to the caller.
    """
    chunk = tl.program_id(0).to(tl.int64)
    group, part = tl.program_id(1) // slices, tl.program_id(1) % slices
    tile = tl.program_id(2).to(tl.int64)
    start, steps = chunk_span(table, chunk, t, chunks_per_row, chunk_len, PACKED)
    if steps <= 0:
        return
    i = tl.arange(0, ROWS)
    step, rank = i // RANK, i % RANK
    k_group, q_group = k + group * k_stride_g, q + group * q_stride_g

    # 1) Scores, over all of n, once for all heads; keys and queries of this tile.
    scores_ij = tl.zeros((ROWS, ROWS), ACC)
    for n0 in range(0, n, STATE):
        columns_n = n0 + tl.arange(0, STATE)
        q_in = load_rows(q_group, start, steps, columns_n, n, q_stride_t, q_stride_r, ROWS, RANK)
        k_nj = load_columns(k_group, start, steps, columns_n, n, k_stride_t, k_stride_r, ROWS, RANK)
        scores_ij += dot(q_in, k_nj, OPERAND, PRECISION)
    columns_n = tile.to(tl.int32) * STATE + tl.arange(0, STATE)
    k_jn = load_rows(k_group, start, steps, columns_n, n, k_stride_t, k_stride_r, ROWS, RANK)
    q_in = load_rows(q_group, start, steps, columns_n, n, q_stride_t, q_stride_r, ROWS, RANK)

    dscores_ij = tl.zeros((ROWS, ROWS), ACC)
    dk_jn = tl.zeros((ROWS, STATE), ACC)
    dq_in = tl.zeros((ROWS, STATE), ACC)
    for index in range(part * HEADS, tl.minimum((part + 1) * HEADS, heads_per_group)):
        head = group * heads_per_group + index
        state_at = (chunk * h + head) * p * n
        # 2) Products over p: D, and what the states pass to queries and keys.
        d_ij = tl.zeros((ROWS, ROWS), ACC)
        from_state_in = tl.zeros((ROWS, STATE), ACC)
        into_state_jn = tl.zeros((ROWS, STATE), ACC)
        kept_pn = tl.zeros((WIDTH, STATE), ACC)
        for p0 in range(0, p, WIDTH):
            columns_p = p0 + tl.arange(0, WIDTH)
            dy_ip = load_rows(dy + head * dy_stride_h, start, steps, columns_p, p, dy_stride_t, dy_stride_r, ROWS, RANK)
            v_jp = load_rows(v + head * v_stride_h, start, steps, columns_p, p, v_stride_t, v_stride_r, ROWS, RANK)
            offsets = columns_p[:, None] * n + columns_n[None, :]
            mask = (columns_p < p)[:, None] & (columns_n < n)[None, :]
            h_pn = tl.load(entering + state_at + offsets, mask=mask, other=0.0)
            g_pn = tl.load(leaving + state_at + offsets, mask=mask, other=0.0)
            d_ij += dot(dy_ip, tl.trans(v_jp), OPERAND, PRECISION)
            from_state_in += dot(dy_ip, h_pn, OPERAND, PRECISION)
            into_state_jn += dot(v_jp, g_pn, OPERAND, PRECISION)
            kept_pn += h_pn * g_pn

        # 3) Decays and weights.
        high, low, end_high, end_low = running_decay(
            log_decay + head * a_stride_h, start, steps, a_stride_t, ROWS, RANK, ACC
        )
        d_ij *= causal_decay(high, low, steps, ROWS, RANK)
        from_state_in *= decay_between(high, low, 0.0, 0.0)[:, None]
        into_state_jn *= decay_between(end_high, end_low, high, low)[:, None]
        out_i = tl.sum(q_in.to(ACC) * from_state_in, 1)
        in_j = tl.sum(k_jn.to(ACC) * into_state_jn, 1)
        # What belongs to no tile of n is computed by the first.
        p_ij = tl.where(tile == 0, d_ij * scores_ij, 0.0)
        e_ij = tl.where(step[:, None] > step[None, :], p_ij, 0.0)
        row_at = ((tile * tokens + start) * RANK) * h + head + i * h
        if scale is not None:
            scale_j = load_by_step(scale + head * s_stride_h, start, steps, s_stride_t, ROWS, RANK, ACC)
            if diagonal is not None:
                diagonal_j = load_by_step(diagonal + head * s_stride_h, start, steps, s_stride_t, ROWS, RANK, ACC)
                tl.store(dscale + row_at, tl.sum(e_ij, 0) + in_j, mask=step < steps)
                same_ij = tl.where(step[:, None] == step[None, :], p_ij, 0.0)
                tl.store(ddiagonal + row_at, tl.sum(same_ij, 0), mask=step < steps)
                d_ij *= tl.where(step[:, None] > step[None, :], scale_j[None, :], diagonal_j[None, :])
            else:
                tl.store(dscale + row_at, tl.sum(p_ij, 0) + in_j, mask=step < steps)
                d_ij *= scale_j[None, :]
            into_state_jn *= scale_j[:, None]
            in_j *= scale_j
            e_ij *= scale_j[None, :]
        dscores_ij += d_ij
        dq_in += from_state_in
        dk_jn += into_state_jn

        # 4) Log-decays: the sum at row j is the gradient of the next step, so no sum has to be taken back out.
        keep = decay_between(end_high, end_low, 0.0, 0.0) * tl.sum(kept_pn)
        before_ij = out_i[:, None] + tl.cumsum(e_ij, 1)
        crossing_j = tl.sum(tl.where(step[:, None] > step[None, :], before_ij, in_j[:, None]), 0)
        step_at = (tile * tokens + start) * h + head
        is_next = (rank == RANK - 1) & (step + 1 < steps)
        tl.store(da + step_at + (step + 1) * h, keep + crossing_j, mask=is_next)
        tl.store(da + step_at, keep + tl.sum(out_i))

    # 5) Keys and queries, through the scores.
    dq_in += dot(dscores_ij, k_jn, OPERAND, PRECISION)
    dk_jn += dot(tl.trans(dscores_ij), q_in, OPERAND, PRECISION)
    first_row = ((part * tokens + start) * RANK * groups + group) * n
    offsets = (i * groups * n)[:, None] + columns_n[None, :]
    mask = (step < steps)[:, None] & (columns_n < n)[None, :]
    store_rounded(dq + first_row + offsets, dq_in, mask)
    store_rounded(dk + first_row + offsets, dk_jn, mask)
