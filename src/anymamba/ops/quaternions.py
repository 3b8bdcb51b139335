"""Quaternions (w, x, y, z) in the last axis: the algebra, and running products over time.

A quaternion is computed as two complex numbers, `w + xi` and `y + zi`, with
`(a, b) (c, d) = (a c - b d̄, a d + b c̄)`.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.ground.sequences import pieces

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
    products = torch.cat([_running_products(part, first) for part, first in pieces(q, start, cu_seqlens)], dim=1)
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
