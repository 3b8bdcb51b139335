"""Quaternions (w, x, y, z) in the last axis: the algebra, and running products over time.

A quaternion is computed as two complex numbers, `w + xi` and `y + zi`, with
`(a, b) (c, d) = (a c - b d̄, a d + b c̄)`.

Letters: b batch, t time, z sequences, c chunks, l steps of a chunk; the axes between time and the four are any.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.blocks.sequences import sequences_of, starts_of
from anymamba.operators import define_operator

Quaternions = Float[Tensor, "*#batch 4"]


def multiply(p: Quaternions, q: Quaternions) -> Quaternions:
    """The Hamilton product, broadcasting over the leading axes."""
    a, b = torch.view_as_complex(p.unflatten(-1, (2, 2))).unbind(-1)
    c, d = torch.view_as_complex(q.unflatten(-1, (2, 2))).unbind(-1)
    # conj() only marks a tensor, and inside an operator of a compiled graph the mark is overlooked.
    product = torch.stack([a * c - b * d.conj_physical(), a * d + b * c.conj_physical()], dim=-1)
    return torch.view_as_real(product).flatten(-2)


def multiply_in_place(p: Quaternions, q: Quaternions) -> None:
    """Write `p q` over `q`."""
    a, b = torch.view_as_complex(p.unflatten(-1, (2, 2))).unbind(-1)
    c, d = torch.view_as_complex(q.unflatten(-1, (2, 2))).unbind(-1)
    c_conjugate = c.conj_physical()
    c.mul_(a).sub_(b * d.conj_physical())
    d.mul_(a).add_(c_conjugate.mul_(b))


def multiply_by_conjugate(p: Quaternions, q: Quaternions) -> Quaternions:
    """`p q̄`: `(a, b) (c̄, -d) = (a c̄ + b d̄, b c - a d)`."""
    a, b = torch.view_as_complex(p.unflatten(-1, (2, 2))).unbind(-1)
    c, d = torch.view_as_complex(q.unflatten(-1, (2, 2))).unbind(-1)
    product = torch.stack([a * c.conj_physical() + b * d.conj_physical(), b * c - a * d], dim=-1)
    return torch.view_as_real(product).flatten(-2)


def conjugate(q: Quaternions) -> Quaternions:
    """(w, -x, -y, -z), the inverse of a unit quaternion."""
    return torch.cat([q[..., :1], -q[..., 1:]], dim=-1)


def turn_by_vector(direction: Float[Tensor, "*#batch 3"], most: Float[Tensor, "*#batch 1"]) -> Quaternions:
    """The unit quaternion that turns by `most · tanh|r|` about `r / |r|`, smooth at r = 0 and for any length of r.

    Args:
        direction: r, (..., 3).
        most: the largest angle, (..., 1).
    """
    tiny = torch.finfo(direction.dtype).tiny
    # |r| without overflow or underflow of its squares; the scale cancels, so it needs no gradient.
    scale = direction.detach().abs().amax(-1, keepdim=True).clamp(min=math.sqrt(tiny))
    length = scale * (direction / scale).square().sum(-1, keepdim=True).clamp(min=tiny).sqrt()
    half_turn = 0.5 * most * torch.tanh(length)
    return torch.cat([torch.cos(half_turn), torch.sin(half_turn) * (direction / length)], dim=-1)


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


def _forward(q: Tensor, start: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    parts = [
        _running_products(part, first)
        for part, first in zip(sequences_of(q, cu_seqlens), starts_of(start, cu_seqlens), strict=True)
    ]
    products = torch.cat(parts, dim=1)
    return products / products.norm(dim=-1, keepdim=True)


def _backward(dproducts: Tensor, q: Tensor, start: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """With `P_t = q_t ... q_0` and `S_t = Σ_{s ≥ t} P̄_s dQ_s`: `dq_t = P_t S_t Q̄_{t-1}` and `dstart = S_0`.

    Results are kept at length 1, so of `dQ_s` only what is perpendicular to `Q_s` counts.
    """
    dqs, dstarts = [], []
    for part, first, dpart in zip(
        sequences_of(q, cu_seqlens), starts_of(start, cu_seqlens), sequences_of(dproducts, cu_seqlens), strict=True
    ):
        unit = torch.zeros_like(first)
        unit[..., 0] = 1
        alone = _running_products(part, unit)
        products = multiply(alone, first.unsqueeze(1))
        tangent = dpart - products * (products * dpart).sum(-1, keepdim=True)
        later = multiply(conjugate(alone), tangent).flip(1).cumsum(1).flip(1)
        before = torch.cat([first.unsqueeze(1), products[:, :-1]], dim=1)
        dqs.append(multiply(multiply(alone, later), conjugate(before)))
        dstarts.append(later[:, 0])
    return torch.cat(dqs, dim=1), torch.cat(dstarts)


_operator = define_operator(
    "quaternion_products",
    inputs="Tensor q, Tensor start, Tensor? cu_seqlens",
    outputs=1,
    differentiable=2,
    forward=_forward,
    backward=_backward,
    fake=lambda q, start, cu_seqlens: torch.empty(q.shape, dtype=q.dtype, device=q.device),
)


def cumulative_products(
    q: Float[Tensor, "b t *inner 4"], start: Float[Tensor, "z *inner 4"], cu_seqlens: Int[Tensor, " z1"] | None
) -> Float[Tensor, "b t *inner 4"]:
    """`Q_t = q_t Q_{t-1}` from `start`, the newest on the left, for unit quaternions; results are kept at length 1.

    Args:
        q: unit quaternions, (b, t, ..., 4).
        start: Q_{-1}, (b, ..., 4), or one per packed sequence.
        cu_seqlens: boundaries of packed sequences (batch 1).
    """
    products: Tensor = _operator(q, start, cu_seqlens)
    return products
