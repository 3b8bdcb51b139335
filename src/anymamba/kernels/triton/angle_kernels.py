"""Mamba-3's rotation of keys and queries in planes, forward and backward (ops/rotation.py has the definition).

    theta_t[h, s] = theta_{t-1}[h, s] + dt_t[h] rate_t[s]            reduced to [0, 2π)
    (u', w') = (u cos - w sin, u sin + w cos)                        of key or query plus the bias of its head

Pairs are channels (2s, 2s + 1), or (s, s + n / 2) if HALVES. The channels that do not rotate are pairs with an angle of
zero, and an odd last channel is a pair without a second. The gradient:

    (du, dw) = (du' cos + dw' sin, dw' cos - du' sin)                dtheta = Σ (dw' u' - du' w'), over ranks, k and q
    dangle_t = Σ_{s ≥ t} dtheta_s                                    drate = Σ_h dt dangle        ddt = Σ_s rate dangle

Angles are summed in float64: a long sum in float32 would lose the angle.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anymamba.kernels.triton.elementwise import store_rounded
from anymamba.kernels.triton.selective_kernels import sequence_span

TWO_PI = tl.constexpr(6.283185307179586)


@triton.jit
def sum_angles(
    rate,  # (tokens, s)
    dt,  # (tokens, h)
    initial,  # (sequences, h, s)
    bounds,  # (sequences + 1,), or None
    theta,  # (tokens, h, s)
    final,  # (sequences, h, s)
    t,
    h,
    pairs,
    rate_stride,
    dt_stride,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Compute theta; grid (sequences, h, tiles of pairs), each with a loop over blocks of time."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s = tl.program_id(2) * PAIRS + tl.arange(0, PAIRS)
    i = tl.arange(0, BLOCK)
    start, steps = sequence_span(bounds, sequence, t, PACKED)
    angle_s = tl.load(initial + (sequence * h + head) * pairs + s, mask=s < pairs, other=0.0).to(tl.float64)
    for first in range(0, steps, BLOCK):
        token = start + first + i
        is_step = first + i < steps
        mask = is_step[:, None] & (s < pairs)[None, :]
        dt_i = tl.load(dt + token * dt_stride + head, mask=is_step, other=0.0).to(tl.float64)
        rate_is = tl.load(rate + token[:, None] * rate_stride + s[None, :], mask=mask, other=0.0).to(tl.float64)
        added_is = dt_i[:, None] * rate_is
        theta_is = tl.cumsum(added_is, 0) + angle_s[None, :]
        theta_is -= tl.floor(theta_is / TWO_PI) * TWO_PI
        at = (token[:, None] * h + head) * pairs + s[None, :]
        store_rounded(theta + at, theta_is, mask)
        angle_s += tl.sum(added_is, 0)
        angle_s -= tl.floor(angle_s / TWO_PI) * TWO_PI
    at = (sequence * h + head) * pairs + s
    store_rounded(final + at, angle_s, s < pairs)


@triton.jit
def pair_channels(s, n, HALVES: tl.constexpr):
    """Return the first and the second channel of pairs; the second may be n or more, if there is none."""
    if HALVES:
        return tl.where(s < n // 2, s, n - 1), tl.where(s < n // 2, s + n // 2, n)
    return 2 * s, 2 * s + 1


@triton.jit
def rotate_keys(
    k,  # (tokens, r, g, n)
    bias,  # (h, r, n)
    theta,  # (tokens, h, pairs)
    rotated,  # (tokens, r, h, n)
    tokens,
    h,
    n,
    pairs,
    ranks,
    heads_per_group,
    k_stride_t,
    k_stride_r,
    k_stride_g,
    HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute rotated keys, or queries; grid (blocks of tokens, h × r, tiles of pairs)."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head, rank = tl.program_id(1) // ranks, tl.program_id(1) % ranks
    s = tl.program_id(2) * PAIRS + tl.arange(0, PAIRS)
    is_pair = s < (n + 1) // 2
    u, w = pair_channels(s, n, HALVES)
    is_u = (token < tokens)[:, None] & is_pair[None, :]
    is_w = is_u & (w < n)[None, :]
    key = k + rank * k_stride_r + (head // heads_per_group) * k_stride_g
    row = token[:, None] * k_stride_t
    bias_row = bias + (head * ranks + rank) * n
    u_ts = tl.load(key + row + u[None, :], mask=is_u, other=0.0).to(ACC)
    w_ts = tl.load(key + row + w[None, :], mask=is_w, other=0.0).to(ACC)
    u_ts += tl.load(bias_row + u, mask=is_pair, other=0.0).to(ACC)[None, :]
    w_ts += tl.load(bias_row + w, mask=is_pair & (w < n), other=0.0).to(ACC)[None, :]
    angle = theta + (token[:, None] * h + head) * pairs + s[None, :]
    theta_ts = tl.load(angle, mask=(token < tokens)[:, None] & (s < pairs)[None, :], other=0.0)
    cos, sin = tl.cos(theta_ts), tl.sin(theta_ts)
    out = rotated + ((token[:, None] * ranks + rank) * h + head) * n
    store_rounded(out + u[None, :], u_ts * cos - w_ts * sin, is_u)
    store_rounded(out + w[None, :], u_ts * sin + w_ts * cos, is_w)


@triton.jit
def rotate_keys_backward(
    rotated,  # (tokens, r, h, n)
    drotated,  # (tokens, r, h, n)
    theta,  # (tokens, h, pairs)
    dk,  # (tokens, r, g, n)
    dbias,  # (blocks of tokens, h, r, n)
    dtheta,  # (r, tokens, h, pairs)
    tokens,
    h,
    groups,
    n,
    pairs,
    ranks,
    heads_per_group,
    ADD: tl.constexpr,  # add to dtheta, rather than write it
    HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute dk of a group, and parts of dbias and dtheta; grid (blocks of tokens, g × r, tiles of pairs)."""
    block = tl.program_id(0).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    group, rank = tl.program_id(1) // ranks, tl.program_id(1) % ranks
    s = tl.program_id(2) * PAIRS + tl.arange(0, PAIRS)
    is_pair = s < (n + 1) // 2
    u, w = pair_channels(s, n, HALVES)
    is_u = (token < tokens)[:, None] & is_pair[None, :]
    is_w = is_u & (w < n)[None, :]
    is_angle = (token < tokens)[:, None] & (s < pairs)[None, :]
    du_sum_ts = tl.zeros((BLOCK, PAIRS), ACC)
    dw_sum_ts = tl.zeros((BLOCK, PAIRS), ACC)
    for index in range(heads_per_group):
        head = group * heads_per_group + index
        row = ((token[:, None] * ranks + rank) * h + head) * n
        angle = (token[:, None] * h + head) * pairs + s[None, :]
        theta_ts = tl.load(theta + angle, mask=is_angle, other=0.0)
        cos, sin = tl.cos(theta_ts), tl.sin(theta_ts)
        du_out_ts = tl.load(drotated + row + u[None, :], mask=is_u, other=0.0)
        dw_out_ts = tl.load(drotated + row + w[None, :], mask=is_w, other=0.0)
        u_out_ts = tl.load(rotated + row + u[None, :], mask=is_u, other=0.0).to(ACC)
        w_out_ts = tl.load(rotated + row + w[None, :], mask=is_w, other=0.0).to(ACC)
        at = dtheta + rank * tokens * h * pairs + angle
        dtheta_ts = dw_out_ts * u_out_ts - du_out_ts * w_out_ts
        if ADD:
            dtheta_ts += tl.load(at, mask=is_angle, other=0.0)
        tl.store(at, dtheta_ts, mask=is_angle)
        du_ts = du_out_ts * cos + dw_out_ts * sin
        dw_ts = dw_out_ts * cos - du_out_ts * sin
        bias_row = dbias + ((block * h + head) * ranks + rank) * n
        tl.store(bias_row + u, tl.sum(du_ts, 0), mask=is_pair)
        tl.store(bias_row + w, tl.sum(dw_ts, 0), mask=is_pair & (w < n))
        du_sum_ts += du_ts
        dw_sum_ts += dw_ts
    out = dk + ((token[:, None] * ranks + rank) * groups + group) * n
    store_rounded(out + u[None, :], du_sum_ts, is_u)
    store_rounded(out + w[None, :], dw_sum_ts, is_w)


@triton.jit
def sum_angle_gradients(
    dtheta,  # (tokens, h, s): on return, dangle
    dfinal,  # (sequences, h, s)
    bounds,  # (sequences + 1,), or None
    dinitial,  # (sequences, h, s)
    t,
    h,
    pairs,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Sum dtheta backward in time, in place; grid (sequences, h, tiles of pairs)."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s = tl.program_id(2) * PAIRS + tl.arange(0, PAIRS)
    i = tl.arange(0, BLOCK)
    start, steps = sequence_span(bounds, sequence, t, PACKED)
    state_at = (sequence * h + head) * pairs + s
    sum_s = tl.load(dfinal + state_at, mask=s < pairs, other=0.0).to(tl.float64)
    for first in range(0, steps, BLOCK):
        step = steps - 1 - first - i  # the latest first
        mask = (step >= 0)[:, None] & (s < pairs)[None, :]
        at = dtheta + ((start + step)[:, None] * h + head) * pairs + s[None, :]
        dtheta_is = tl.load(at, mask=mask, other=0.0).to(tl.float64)
        store_rounded(at, tl.cumsum(dtheta_is, 0) + sum_s[None, :], mask)
        sum_s += tl.sum(dtheta_is, 0)
    store_rounded(dinitial + state_at, sum_s, s < pairs)


@triton.jit
def rate_gradients(
    dangle,  # (tokens, h, s)
    rate,  # (tokens, s)
    dt,  # (tokens, h)
    drate,  # (tokens, s)
    ddt,  # (tokens, h)
    tokens,
    h,
    pairs,
    rate_stride,
    dt_stride,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute drate and ddt; grid (blocks of tokens,), with a loop over heads."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < tokens
    for head in range(h):
        ddt_t = tl.zeros((BLOCK,), ACC)
        dt_t = tl.load(dt + token * dt_stride + head, mask=is_token, other=0.0)
        for first in range(0, pairs, PAIRS):
            s = first + tl.arange(0, PAIRS)
            mask = is_token[:, None] & (s < pairs)[None, :]
            dangle_ts = tl.load(dangle + (token[:, None] * h + head) * pairs + s[None, :], mask=mask, other=0.0)
            rate_ts = tl.load(rate + token[:, None] * rate_stride + s[None, :], mask=mask, other=0.0)
            ddt_t += tl.sum(dangle_ts * rate_ts, 1)
        tl.store(ddt + token * h + head, ddt_t, mask=is_token)
    for first in range(0, pairs, PAIRS):
        s = first + tl.arange(0, PAIRS)
        mask = is_token[:, None] & (s < pairs)[None, :]
        drate_ts = tl.zeros((BLOCK, PAIRS), ACC)
        for head in range(h):
            dt_t = tl.load(dt + token * dt_stride + head, mask=is_token, other=0.0)
            dangle_ts = tl.load(dangle + (token[:, None] * h + head) * pairs + s[None, :], mask=mask, other=0.0)
            drate_ts += dangle_ts * dt_t[:, None]
        tl.store(drate + token[:, None] * pairs + s[None, :], drate_ts, mask=mask)
