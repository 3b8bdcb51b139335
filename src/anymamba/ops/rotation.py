"""Rotations of keys and queries, the part of Mamba-3 that lets a state rotate.

Every token has its own rotation. Keys and queries are multiplied by the running product of all rotations so far, so
that the product of a query and an earlier key depends on the rotations between the two. With `angular_rate_t` per token
and `dt_t` per head:

- `interleaved` (official SISO) and `halves` (official MIMO): channels (2i, 2i + 1), or (i, i + n / 2), rotate in their
  plane, and angles add up: `theta_t[h, s] = theta_{t-1}[h, s] + dt_t[h] angular_rate_t[s]`.
- `quaternion`: blocks of four channels rotate about their own axis in each head, and rotations do not commute:
  `Q_t = q_t Q_{t-1}`, with `q_t` the rotation by the vector `dt_t[h] angular_rate_t[h, j]`; a block is multiplied from
  the left by the conjugate of `Q_t`.

The gradient: portable code leaves it to autograd through scan/mamba3_scan.py; the compiled scan computes it in
kernels/cpu/csrc/scan/scan_rotation.h (`RotationGradient`), driven by scan_backward.h.

Letters: b batch, t time, r MIMO rank, g groups, h heads, n state, c numbers that describe a token's rotation, s pairs,
j blocks of four, z sequences.

Quaternions (w, x, y, z) in the last axis: the algebra, and running products over time.

A quaternion is computed as two complex numbers, `w + xi` and `y + zi`, with
`(a, b) (c, d) = (a c - b d̄, a d + b c̄)`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.core.dtypes import accumulation_dtype
from anymamba.core.layout import split_packed
from anymamba.core.operators import is_tracing

Quaternions = Float[Tensor, "*#batch 4"]
RotationKind = Literal["interleaved", "halves", "quaternion"]


def multiply(p: Quaternions, q: Quaternions) -> Quaternions:
    """Return the Hamilton product, broadcasting over the leading axes."""
    (a, b), (c, d) = _complex_parts(p), _complex_parts(q)
    # conj() only marks a tensor, and inside an operator of a compiled graph the mark is ignored.
    product = torch.stack([a * c - b * d.conj_physical(), a * d + b * c.conj_physical()], dim=-1)
    return torch.view_as_real(product).flatten(-2)


def _complex_parts(q: Tensor) -> tuple[Tensor, ...]:
    return torch.view_as_complex(q.unflatten(-1, (2, 2)).contiguous()).unbind(-1)


def conjugate(q: Quaternions) -> Quaternions:
    """Return (w, -x, -y, -z), the inverse of a unit quaternion."""
    return torch.cat([q[..., :1], -q[..., 1:]], dim=-1)


def quaternion_from_vector(vector: Float[Tensor, "*#batch 3"]) -> Quaternions:
    """Return the unit quaternion of a rotation vector (its direction is the axis, its length the angle).

    It is smooth at zero.
    """
    tiny = torch.finfo(vector.dtype).tiny
    half_angle = 0.5 * vector.square().sum(-1, keepdim=True).clamp(min=tiny).sqrt()
    # sin(half_angle) / half_angle, so that the direction is never divided by a length of zero.
    return torch.cat([torch.cos(half_angle), torch.sinc(half_angle / math.pi) * (0.5 * vector)], dim=-1)


def cumulative_products(
    q: Float[Tensor, "b t *inner 4"], initial: Float[Tensor, "z *inner 4"], cu_seqlens: Int[Tensor, " z1"] | None
) -> Float[Tensor, "b t *inner 4"]:
    """Return `Q_t = q_t Q_{t-1}`, the newest factor on the left, for unit quaternions, normalized to length 1."""
    products = [_multiply_cumulatively(q_bt, q_b) for q_bt, q_b in split_packed(q, initial, cu_seqlens)]
    return _normalize(torch.cat(products, dim=1))


def _normalize(q: Tensor) -> Tensor:
    return q / q.norm(dim=-1, keepdim=True)


def _multiply_cumulatively(q_bt: Tensor, initial_b: Tensor) -> Tensor:
    """Return `q_t ... q_0 initial` for every t."""
    b, t, *inner = q_bt.shape
    chunk_len = max(1, math.isqrt(t))
    num_chunks = -(-t // chunk_len)
    # 1) Pad with the identity to √t chunks of √t steps.
    identity = _identity_quaternion(q_bt, q_bt.dtype)
    padded = torch.cat([q_bt, identity.expand(b, num_chunks * chunk_len - t, *inner)], dim=1)
    # 2) Multiply within all chunks at once, step by step.
    steps = list(padded.unflatten(1, (num_chunks, chunk_len)).unbind(2))
    for i in range(1, chunk_len):
        steps[i] = multiply(steps[i], steps[i - 1])
    # 3) Carry the product from chunk to chunk.
    entering = [initial_b]
    for total in steps[-1].unbind(1)[:-1]:
        entering.append(multiply(total, entering[-1]))
    # 4) Apply what enters each chunk to its steps.
    products = multiply(torch.stack(steps, dim=2), torch.stack(entering, dim=1).unsqueeze(2))
    return products.flatten(1, 2)[:, :t]


def identity_rotation(
    kind: RotationKind, rows: int, heads: int, num_rotations: int, like: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return angles of zero (rows, heads, num_rotations), or unit quaternions (rows, heads, num_rotations, 4)."""
    if kind != "quaternion":
        return like.new_zeros((rows, heads, num_rotations), dtype=dtype)
    return _identity_quaternion(like, dtype).expand(rows, heads, num_rotations, 4)


def _identity_quaternion(like: Tensor, dtype: torch.dtype) -> Tensor:
    return F.pad(like.new_ones(1, dtype=dtype), (0, 3))


def _step_quaternions(angular_rate: Tensor, dt: Tensor, num_rotations: int) -> Tensor:
    """Return the rotation of each step about the axes of its heads, (..., h·j·3), (..., h) -> (..., h, j, 4)."""
    vectors = angular_rate.unflatten(-1, (dt.shape[-1], num_rotations, 3)) * dt[..., None, None]
    return quaternion_from_vector(vectors)


def cumulative_rotation(
    kind: RotationKind,
    angular_rate: Float[Tensor, "b t c"],
    dt: Float[Tensor, "b t h"],
    initial: Float[Tensor, "z h *angle"],
    cu_seqlens: Int[Tensor, " z1"] | None,
) -> Float[Tensor, "b t h *angle"]:
    """Return the rotation after each token: angles in [0, 2π), or unit quaternions."""
    if kind == "quaternion":
        return cumulative_products(_step_quaternions(angular_rate, dt, initial.shape[2]), initial, cu_seqlens)
    # A long sum in float32 would lose the angle.
    acc_dtype = accumulation_dtype(dt.device)
    angles = dt.to(acc_dtype).unsqueeze(-1) * angular_rate.to(acc_dtype).unsqueeze(2)
    sums = [_blocked_cumsum(part) + before.unsqueeze(1) for part, before in split_packed(angles, initial, cu_seqlens)]
    return torch.cat(sums, dim=1).remainder(2 * math.pi).to(initial.dtype)


def total_rotation(
    kind: RotationKind,
    angular_rate: Float[Tensor, "b t c"],
    dt: Float[Tensor, "b t h"],
    like: Float[Tensor, "z h *angle"],
) -> Float[Tensor, "b h *angle"]:
    """Return the rotation by all tokens together: unit quaternions, or sums of angles in the accumulation dtype.

    `like` is any rotation of the same shape.
    """
    if kind == "quaternion":
        identity = identity_rotation(kind, angular_rate.shape[0], like.shape[1], like.shape[2], like, like.dtype)
        return cumulative_products(_step_quaternions(angular_rate, dt, like.shape[2]), identity, None)[:, -1]
    acc_dtype = accumulation_dtype(dt.device)
    return torch.einsum("bth,bts->bhs", dt.to(acc_dtype), angular_rate.to(acc_dtype))


def compose_rotations(
    kind: RotationKind, initial: Float[Tensor, "b h *angle"], total: Float[Tensor, "b h *angle"]
) -> Float[Tensor, "b h *angle"]:
    """Return the rotation after some tokens, from the one before them and their `total_rotation`."""
    if kind == "quaternion":
        return _normalize(multiply(total, initial))
    return (total + initial).remainder(2 * math.pi).to(initial.dtype)


def _blocked_cumsum(x_bt: Tensor, block: int = 64) -> Tensor:
    """Return `x.cumsum(1)`, summed within all blocks at once and then from block to block.

    In torch's own every column is one long chain of additions.
    """
    if is_tracing() or x_bt.shape[1] <= block:
        return x_bt.cumsum(1)
    padded = F.pad(x_bt, (0, 0) * (x_bt.ndim - 2) + (0, -x_bt.shape[1] % block))
    sums = padded.unflatten(1, (-1, block)).cumsum(2)
    totals = sums[:, :, -1].cumsum(1)
    entering = torch.cat([torch.zeros_like(totals[:, :1]), totals[:, :-1]], dim=1)
    return (sums + entering.unsqueeze(2)).flatten(1, 2)[:, : x_bt.shape[1]]


def rotate(
    kind: RotationKind,
    x: Float[Tensor, "b t r g n"],
    bias: Float[Tensor, "h r n"],
    rotation: Float[Tensor, "b t h *angle"],
) -> Float[Tensor, "b t r h n"]:
    """Expand the groups of keys or queries to heads, add the bias of each, and rotate; in the dtype of `x`."""
    acc_dtype, groups = rotation.dtype, x.shape[3]
    by_head_btrgen = x.to(acc_dtype).unsqueeze(4) + bias.to(acc_dtype).transpose(0, 1).unflatten(1, (groups, -1))
    return apply_rotation(kind, by_head_btrgen.flatten(3, 4), rotation).to(x.dtype)


def apply_rotation(
    kind: RotationKind, x: Float[Tensor, "*batch r h n"], rotation: Float[Tensor, "*batch h *angle"]
) -> Float[Tensor, "*batch r h n"]:
    """Rotate the leading channels of `x`; the rest stays as it is."""
    if kind == "quaternion":
        inverse, width = conjugate(rotation).unsqueeze(-4), 4 * rotation.shape[-2]
        blocks = x[..., :width].unflatten(-1, (-1, 4))
        return torch.cat([multiply(inverse, blocks).flatten(-2), x[..., width:]], dim=-1)
    cos, sin = rotation.cos().unsqueeze(-3), rotation.sin().unsqueeze(-3)
    pairs, n = rotation.shape[-1], x.shape[-1]
    u, w = split_pairs(kind, x, pairs)
    first, second = u * cos - w * sin, u * sin + w * cos
    if kind == "interleaved":
        return torch.cat([torch.stack([first, second], dim=-1).flatten(-2), x[..., 2 * pairs :]], dim=-1)
    return torch.cat([first, x[..., pairs : n // 2], second, x[..., n // 2 + pairs :]], dim=-1)


def split_pairs(kind: RotationKind, x: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Return views of the first and the second channels of the pairs."""
    if kind == "interleaved":
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    half = x.shape[-1] // 2
    return x[..., :pairs], x[..., half : half + pairs]


def stationary_key(
    kind: RotationKind,
    k: Float[Tensor, "b r h n"],
    angular_rate: Float[Tensor, "b c"],
    dt: Float[Tensor, "b h"],
    gamma: Float[Tensor, "b h"],
    beta: Float[Tensor, "b h"],
    alpha: Float[Tensor, "b h"],
    num_rotations: int,
) -> Float[Tensor, "b r h n"]:
    """Return the sum over all earlier copies of a key that repeats forever, each rotated once more than the next.

    With q the rotation of one step it is `k (γ + β q) / (1 - α q)`, and q = 1 for channels that do not rotate.
    """
    eps = torch.finfo(dt.dtype).eps
    unrotated_bh1 = ((gamma + beta) / (1 - alpha).clamp(min=eps)).unsqueeze(-1)
    k_sum_brhn = k * unrotated_bh1.unsqueeze(1)
    if kind == "quaternion":
        q_bhj4, identity = _step_quaternions(angular_rate, dt, num_rotations), _identity_quaternion(dt, dt.dtype)
        gamma_bh11, beta_bh11, alpha_bh11 = (x[..., None, None] for x in (gamma, beta, alpha))
        denominator_bhj4 = identity - alpha_bh11 * q_bhj4
        inverse_bhj4 = conjugate(denominator_bhj4) / denominator_bhj4.square().sum(-1, keepdim=True).clamp(min=eps)
        factor_bhj4 = multiply(gamma_bh11 * identity + beta_bh11 * q_bhj4, inverse_bhj4)
        blocks_brhj4 = multiply(factor_bhj4.unsqueeze(1), k[..., : 4 * num_rotations].unflatten(-1, (num_rotations, 4)))
        return torch.cat([blocks_brhj4.flatten(-2), k_sum_brhn[..., 4 * num_rotations :]], dim=-1)
    angle_bhs = dt.unsqueeze(-1) * angular_rate.unsqueeze(1)
    q_bhs = torch.polar(torch.ones_like(angle_bhs), -angle_bhs)
    gamma, beta, alpha = (x.unsqueeze(-1) for x in (gamma, beta, alpha))
    denominator_bhs = 1 - alpha * q_bhs
    factor_bhs = (
        (gamma + beta * q_bhs) * denominator_bhs.conj_physical() / denominator_bhs.abs().square().clamp(min=eps)
    )
    pairs_brhs = torch.complex(*(x.contiguous() for x in split_pairs(kind, k, num_rotations))) * factor_bhs.unsqueeze(1)
    u_out, w_out = split_pairs(kind, k_sum_brhn, num_rotations)
    u_out.copy_(pairs_brhs.real)
    w_out.copy_(pairs_brhs.imag)
    return k_sum_brhn
