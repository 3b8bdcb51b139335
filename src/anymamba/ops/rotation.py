"""Rotations of keys and queries, the part of Mamba-3 that lets a state turn.

Every token turns by its own amount; keys and queries are rotated by the running product of all turns so far, so that
the product of a query and an earlier key sees the turns between the two. With `rate_t` the speed of turning, and
`step_t` for how long a head turns at it:

- `interleaved` (official SISO) and `halves` (official MIMO): channels (2i, 2i + 1), or (i, i + n / 2), turn in their
  plane, and angles add up: `theta_t[h, s] = theta_{t-1}[h, s] + step_t[h] rate_t[s]`.
- `quaternion`: blocks of four channels turn about their own axis in each head, and turns do not commute:
  `Q_t = q_t Q_{t-1}`, with `q_t` the turn by the vector `step_t[h] rate_t[h, j]`; a block is multiplied from the left
  by the conjugate of `Q_t`.

Letters: b batch, t time, r MIMO rank, g groups, h heads, n state, c numbers that describe a token's turn, s pairs,
j blocks of four, z sequences.

§ Quaternions (w, x, y, z) in the last axis: the algebra, and running products over time.

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


def multiply(p: Quaternions, q: Quaternions) -> Quaternions:
    """The Hamilton product, broadcasting over the leading axes."""
    (a, b), (c, d) = _halves(p), _halves(q)
    # conj() only marks a tensor, and inside an operator of a compiled graph the mark is ignored.
    product = torch.stack([a * c - b * d.conj_physical(), a * d + b * c.conj_physical()], dim=-1)
    return torch.view_as_real(product).flatten(-2)


def _halves(q: Tensor) -> tuple[Tensor, ...]:
    return torch.view_as_complex(q.unflatten(-1, (2, 2)).contiguous()).unbind(-1)


def conjugate(q: Quaternions) -> Quaternions:
    """(w, -x, -y, -z), the inverse of a unit quaternion."""
    return torch.cat([q[..., :1], -q[..., 1:]], dim=-1)


def turn_about(vector: Float[Tensor, "*#batch 3"]) -> Quaternions:
    """The unit quaternion that turns by the length of a vector about its direction, smooth at zero."""
    tiny = torch.finfo(vector.dtype).tiny
    half = 0.5 * vector.square().sum(-1, keepdim=True).clamp(min=tiny).sqrt()
    # sin(half) / half, so that the direction is never divided by a length of zero.
    return torch.cat([torch.cos(half), torch.sinc(half / math.pi) * (0.5 * vector)], dim=-1)


def cumulative_products(
    q: Float[Tensor, "b t *inner 4"], start: Float[Tensor, "z *inner 4"], cu_seqlens: Int[Tensor, " z1"] | None
) -> Float[Tensor, "b t *inner 4"]:
    """`Q_t = q_t Q_{t-1}` from `start`, the newest on the left, for unit quaternions; results are kept at length 1.

    Args:
        q: unit quaternions.
        start: Q_{-1}, of each row or packed sequence.
        cu_seqlens: boundaries of packed sequences (batch 1).
    """
    products = torch.cat([_running_products(part, first) for part, first in split_packed(q, start, cu_seqlens)], dim=1)
    return products / products.norm(dim=-1, keepdim=True)


def _running_products(q_bt: Tensor, start_b: Tensor) -> Tensor:
    """`q_t ... q_0 start` for every t: within √t chunks side by side, then from chunk to chunk."""
    b, t, *inner = q_bt.shape
    length = max(1, math.isqrt(t))
    chunks = -(-t // length)
    unit = torch.zeros(4, dtype=q_bt.dtype, device=q_bt.device)
    unit[0] = 1
    padded = torch.cat([q_bt, unit.expand(b, chunks * length - t, *inner)], dim=1)
    steps = list(padded.unflatten(1, (chunks, length)).unbind(2))
    for i in range(1, length):
        steps[i] = multiply(steps[i], steps[i - 1])
    before = [start_b]
    for total in steps[-1].unbind(1)[:-1]:
        before.append(multiply(total, before[-1]))
    products = multiply(torch.stack(steps, dim=2), torch.stack(before, dim=1).unsqueeze(2))
    return products.flatten(1, 2)[:, :t]


Rotation = Literal["interleaved", "halves", "quaternion"]


def fresh_rotation(rotation: Rotation, rows: int, heads: int, turns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """No rotation yet: angles of zero (rows, heads, turns), or unit quaternions (rows, heads, turns, 4)."""
    if rotation != "quaternion":
        return like.new_zeros((rows, heads, turns), dtype=dtype)
    unit = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=dtype, device=like.device)
    return unit.expand(rows, heads, turns, 4)


def running_rotation(
    rotation: Rotation,
    rate: Float[Tensor, "b t c"],
    step: Float[Tensor, "b t h"],
    start: Float[Tensor, "z h *turn"],
    cu_seqlens: Int[Tensor, " z1"] | None,
) -> Float[Tensor, "b t h *turn"]:
    """The rotation after each token: angles in [0, 2π), or unit quaternions."""
    if rotation == "quaternion":
        vectors = rate.unflatten(-1, (*start.shape[1:3], 3)) * step[..., None, None]
        return cumulative_products(turn_about(vectors), start, cu_seqlens)
    # A long sum in float32 would lose the angle.
    wide = accumulation_dtype(step.device)
    turns = step.to(wide).unsqueeze(-1) * rate.to(wide).unsqueeze(2)
    angles = [_running_sum(part) + first.unsqueeze(1) for part, first in split_packed(turns, start, cu_seqlens)]
    return torch.cat(angles, dim=1).remainder(2 * math.pi).to(start.dtype)


def total_rotation(
    rotation: Rotation, rate: Float[Tensor, "b t c"], step: Float[Tensor, "b t h"], like: Float[Tensor, "z h *turn"]
) -> Float[Tensor, "b h *turn"]:
    """How far all tokens together turn: sums of angles in a wide dtype, or unit quaternions; `like` any rotation."""
    if rotation == "quaternion":
        vectors = rate.unflatten(-1, (*like.shape[1:3], 3)) * step[..., None, None]
        start = fresh_rotation(rotation, rate.shape[0], like.shape[1], like.shape[2], like, like.dtype)
        return cumulative_products(turn_about(vectors), start, None)[:, -1]
    wide = accumulation_dtype(step.device)
    return torch.einsum("bth,bts->bhs", step.to(wide), rate.to(wide))


def combined_rotation(
    rotation: Rotation, before: Float[Tensor, "b h *turn"], total: Float[Tensor, "b h *turn"]
) -> Float[Tensor, "b h *turn"]:
    """A rotation after some tokens, from the one before them and their `total_rotation`."""
    if rotation == "quaternion":
        product = multiply(total, before)
        return product / product.norm(dim=-1, keepdim=True)  # as `cumulative_products` does
    return (total + before).remainder(2 * math.pi).to(before.dtype)


def _running_sum(x_bt: Tensor, block: int = 64) -> Tensor:
    """`x.cumsum(1)` in blocks side by side, then from block to block: torch's own is one long chain for each column."""
    if is_tracing() or x_bt.shape[1] <= block:
        return x_bt.cumsum(1)
    padded = F.pad(x_bt, (0, 0) * (x_bt.ndim - 2) + (0, -x_bt.shape[1] % block))
    sums = padded.unflatten(1, (-1, block)).cumsum(2)
    totals = sums[:, :, -1].cumsum(1)
    before = torch.cat([torch.zeros_like(totals[:, :1]), totals[:, :-1]], dim=1)
    return (sums + before.unsqueeze(2)).flatten(1, 2)[:, : x_bt.shape[1]]


def rotate(
    rotation: Rotation,
    x: Float[Tensor, "b t r g n"],
    bias: Float[Tensor, "h r n"],
    turned: Float[Tensor, "b t h *turn"],
) -> Float[Tensor, "b t r h n"]:
    """Expand the groups of keys or queries to heads, add the bias of each, and rotate; in the dtype of `x`."""
    wide, groups = turned.dtype, x.shape[3]
    by_head_btrgen = x.to(wide).unsqueeze(4) + bias.to(wide).transpose(0, 1).unflatten(1, (groups, -1))
    return apply_rotation(rotation, by_head_btrgen.flatten(3, 4), turned).to(x.dtype)


def apply_rotation(
    rotation: Rotation, x: Float[Tensor, "*batch r h n"], turned: Float[Tensor, "*batch h *turn"]
) -> Float[Tensor, "*batch r h n"]:
    """Rotate the leading channels of `x`; the rest stays as it is."""
    if rotation == "quaternion":
        inverse, width = conjugate(turned).unsqueeze(-4), 4 * turned.shape[-2]
        blocks = x[..., :width].unflatten(-1, (-1, 4))
        return torch.cat([multiply(inverse, blocks).flatten(-2), x[..., width:]], dim=-1)
    cos, sin, pairs, n = turned.cos().unsqueeze(-3), turned.sin().unsqueeze(-3), turned.shape[-1], x.shape[-1]
    u, w = pairs_of(rotation, x, pairs)
    first, second = u * cos - w * sin, u * sin + w * cos
    if rotation == "interleaved":
        return torch.cat([torch.stack([first, second], dim=-1).flatten(-2), x[..., 2 * pairs :]], dim=-1)
    return torch.cat([first, x[..., pairs : n // 2], second, x[..., n // 2 + pairs :]], dim=-1)


def pairs_of(rotation: Rotation, x: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """The first and the second channels of the pairs, as views."""
    if rotation == "interleaved":
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    half = x.shape[-1] // 2
    return x[..., :pairs], x[..., half : half + pairs]


def stationary_key(
    rotation: Rotation,
    k: Float[Tensor, "b r h n"],
    rate: Float[Tensor, "b c"],
    step: Float[Tensor, "b h"],
    gamma: Float[Tensor, "b h"],
    beta: Float[Tensor, "b h"],
    alpha: Float[Tensor, "b h"],
    turns: int,
) -> Float[Tensor, "b r h n"]:
    """The sum over all earlier copies of a key that repeats forever, each turned once more than the next.

    With q the turn of one step: `k (γ + β q) / (1 - α q)`, for the channels that do not turn with q = 1.
    """
    eps = torch.finfo(step.dtype).eps
    still_bh1 = ((gamma + beta) / (1 - alpha).clamp(min=eps)).unsqueeze(-1)
    out = k * still_bh1.unsqueeze(1)
    if rotation == "quaternion":
        vectors = rate.unflatten(-1, (step.shape[-1], turns, 3)) * step[..., None, None]
        turn_bhj4 = turn_about(vectors)
        unit = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=step.dtype, device=step.device)
        gamma_bh11, beta_bh11, alpha_bh11 = (x[..., None, None] for x in (gamma, beta, alpha))
        below_bhj4 = unit - alpha_bh11 * turn_bhj4
        inverse_bhj4 = conjugate(below_bhj4) / below_bhj4.square().sum(-1, keepdim=True).clamp(min=eps)
        factor_bhj4 = multiply(gamma_bh11 * unit + beta_bh11 * turn_bhj4, inverse_bhj4)
        turned_brhj4 = multiply(factor_bhj4.unsqueeze(1), k[..., : 4 * turns].unflatten(-1, (turns, 4)))
        return torch.cat([turned_brhj4.flatten(-2), out[..., 4 * turns :]], dim=-1)
    phi_bhs = step.unsqueeze(-1) * rate.unsqueeze(1)
    turn_bhs = torch.polar(torch.ones_like(phi_bhs), -phi_bhs)
    gamma, beta, alpha = (x.unsqueeze(-1) for x in (gamma, beta, alpha))
    below_bhs = 1 - alpha * turn_bhs
    factor_bhs = (gamma + beta * turn_bhs) * below_bhs.conj_physical() / below_bhs.abs().square().clamp(min=eps)
    turned_brhs = torch.complex(*(x.contiguous() for x in pairs_of(rotation, k, turns))) * factor_bhs.unsqueeze(1)
    u_out, w_out = pairs_of(rotation, out, turns)
    u_out.copy_(turned_brhs.real)
    w_out.copy_(turned_brhs.imag)
    return out
