"""Rotations of keys and queries, the part of Mamba-3 that lets a state turn.

Every token turns by its own amount; keys and queries are rotated by the running product of all turns so far, so that
the product of a query and an earlier key sees the turns between the two.

- `ComplexRotation` (official): pairs of channels turn in their plane. Angles add up:
  `theta_t[h, s] = theta_{t-1}[h, s] + dt_t[h] · range · π · tanh(angle_t[s])`.
- `QuaternionRotation`: blocks of four channels turn about an axis of their own per head, and turns do not commute:
  `Q_t = q_t Q_{t-1}`, with `q_t` the turn by the vector `dt_t[h] · range · π · tanh|r| r/|r|`; a block is multiplied
  from the left by the conjugate of `Q_t`.
- `FixedRotation`: for comparison, pairs turn by the same angle at every token, whatever it is, as in RoPE:
  `theta_t[h, s] = theta_{t-1}[h, s] + 10000^(-s / pairs)`.

Letters: b batch, t time, r MIMO rank, g groups, h heads, e heads of a group, n state, s pairs, j blocks of four,
m rows (batch and time fused), z sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.blocks.quaternions import (
    conjugate,
    cumulative_products,
    multiply,
    multiply_by_conjugate,
    multiply_in_place,
    turn_by_vector,
)
from anymamba.blocks.sequences import sequences_of, starts_of
from anymamba.blocks.turning import Turning, turning_operator
from anymamba.operators import define_operator

_Keys = tuple[Float[Tensor, "b t r h n"], Float[Tensor, "b t r h n"]]


@dataclass(frozen=True)
class ComplexRotation:
    """Rotation of pairs of channels in the plane.

    Attributes:
        pairs: how many pairs turn, s.
        interleaved: pairs are (2i, 2i + 1), else (i, i + n / 2).
        range: the largest turn per unit of dt, in half circles (of a fixed rotation: of a token, in radians).
    """

    pairs: int
    interleaved: bool
    range: int | float

    def channels(self, heads: int) -> int:
        """Channels of the projection that control the rotation; the heads share them."""
        return self.pairs

    def start(self, rows: int, heads: int, like: Tensor, dtype: torch.dtype) -> Float[Tensor, "z h s"]:
        """The rotation of a fresh start: angles of zero."""
        return like.new_zeros((rows, heads, self.pairs), dtype=dtype)

    def advance(
        self,
        raw: Float[Tensor, "b t c"],
        dt: Float[Tensor, "b t h"],
        start: Float[Tensor, "z h s"],
        cu_seqlens: Int[Tensor, " z1"] | None,
    ) -> Float[Tensor, "b t h s"]:
        """The angles after each token, in [0, 2π), from the projection's channels and the step sizes."""
        turned: Tensor = _advance_angles(*self._rates(raw, dt), start, cu_seqlens)
        return turned

    def rotate(
        self,
        k: Float[Tensor, "b t r g n"],
        q: Float[Tensor, "b t r g n"],
        k_bias: Float[Tensor, "h r n"],
        q_bias: Float[Tensor, "h r n"],
        turned: Float[Tensor, "b t h s"],
    ) -> _Keys:
        """Expand groups to heads, add the biases and rotate."""
        operator = _rotate_interleaved if self.interleaved else _rotate_halves
        k_rotated, q_rotated = operator(k, q, k_bias, q_bias, turned)
        return k_rotated, q_rotated

    def stationary(
        self,
        k: Float[Tensor, "b r h n"],
        raw: Float[Tensor, "b c"],
        dt: Float[Tensor, "b h"],
        gamma: Float[Tensor, "b h"],
        beta: Float[Tensor, "b h"],
        alpha: Float[Tensor, "b h"],
    ) -> Float[Tensor, "b r h n"]:
        """The sum over all earlier copies of a key, each turned once more: times (γ + β e^{-iφ}) / (1 - α e^{-iφ})."""
        phi_bhs = self._turns(raw.unsqueeze(1), dt.unsqueeze(1)).squeeze(1)
        turn_bhs = torch.polar(torch.ones_like(phi_bhs), -phi_bhs)
        gamma, beta, alpha = (x.unsqueeze(-1) for x in (gamma, beta, alpha))
        eps = torch.finfo(dt.dtype).eps
        below_bhs = 1 - alpha * turn_bhs
        factor_bhs = (gamma + beta * turn_bhs) * below_bhs.conj_physical() / below_bhs.abs().square().clamp(min=eps)
        still_bh1 = (gamma + beta) / (1 - alpha).clamp(min=eps)
        u_brhs, w_brhs = _pairs(k, self.pairs, self.interleaved)
        turned_brhs = torch.complex(u_brhs, w_brhs) * factor_bhs.unsqueeze(1)
        out = k * still_bh1.unsqueeze(1)
        u_out, w_out = _pairs(out, self.pairs, self.interleaved)
        u_out.copy_(turned_brhs.real)
        w_out.copy_(turned_brhs.imag)
        return out

    def _rates(self, raw: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
        """Two factors of the turns of each token: (b, t, h) and (b, t, s)."""
        return dt, (self.range * math.pi) * torch.tanh(raw.to(dt.dtype))

    def _turns(self, raw: Tensor, dt: Tensor) -> Tensor:
        step_bth, rate_bts = self._rates(raw, dt)
        return step_bth.unsqueeze(-1) * rate_bts.unsqueeze(2)


@dataclass(frozen=True)
class FixedRotation(ComplexRotation):
    """Rotation of pairs of channels in the plane by angles that no token changes."""

    def channels(self, heads: int) -> int:
        """Channels of the projection that control the rotation: none."""
        return 0

    def _rates(self, raw: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
        number_s = torch.arange(self.pairs, dtype=dt.dtype, device=dt.device)
        rate_s = self.range * 10000 ** (-number_s / max(1, self.pairs))
        return torch.ones_like(dt), rate_s.expand(*raw.shape[:2], -1)


@dataclass(frozen=True)
class QuaternionRotation:
    """Rotation of blocks of four channels by unit quaternions.

    Attributes:
        blocks: how many blocks turn, j.
        range: the largest turn per unit of dt, in half circles.
    """

    blocks: int
    range: int | float

    def channels(self, heads: int) -> int:
        """Channels of the projection that control the rotation: an axis per head and block."""
        return heads * self.blocks * 3

    def start(self, rows: int, heads: int, like: Tensor, dtype: torch.dtype) -> Float[Tensor, "z h j 4"]:
        """The rotation of a fresh start: unit quaternions."""
        unit = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=dtype, device=like.device)
        return unit.expand(rows, heads, self.blocks, 4)

    def turns(self, raw: Float[Tensor, "*bt c"], dt: Float[Tensor, "*bt h"]) -> Float[Tensor, "*bt h j 4"]:
        """The turn of each token."""
        raw = raw.to(dt.dtype).unflatten(-1, (dt.shape[-1], self.blocks, 3))
        return turn_by_vector(raw, dt[..., None, None] * (self.range * math.pi))

    def advance(
        self,
        raw: Float[Tensor, "b t c"],
        dt: Float[Tensor, "b t h"],
        start: Float[Tensor, "z h j 4"],
        cu_seqlens: Int[Tensor, " z1"] | None,
    ) -> Float[Tensor, "b t h j 4"]:
        """The unit quaternions after each token, from the projection's channels and the step sizes."""
        return cumulative_products(self.turns(raw, dt), start, cu_seqlens)

    def rotate(
        self,
        k: Float[Tensor, "b t r g n"],
        q: Float[Tensor, "b t r g n"],
        k_bias: Float[Tensor, "h r n"],
        q_bias: Float[Tensor, "h r n"],
        turned: Float[Tensor, "b t h j 4"],
    ) -> _Keys:
        """Expand groups to heads, add the biases and rotate."""
        k_rotated, q_rotated = _rotate_blocks(k, q, k_bias, q_bias, turned)
        return k_rotated, q_rotated

    def stationary(
        self,
        k: Float[Tensor, "b r h n"],
        raw: Float[Tensor, "b c"],
        dt: Float[Tensor, "b h"],
        gamma: Float[Tensor, "b h"],
        beta: Float[Tensor, "b h"],
        alpha: Float[Tensor, "b h"],
    ) -> Float[Tensor, "b r h n"]:
        """The sum over all earlier copies of a key, each turned once more: times (γ + β q) (1 - α q)⁻¹."""
        turn_bhj4 = self.turns(raw, dt)
        unit = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=dt.dtype, device=dt.device)
        gamma_bh11, beta_bh11, alpha_bh11 = (x[..., None, None] for x in (gamma, beta, alpha))
        eps = torch.finfo(dt.dtype).eps
        below_bhj4 = unit - alpha_bh11 * turn_bhj4
        inverse_bhj4 = conjugate(below_bhj4) / below_bhj4.square().sum(-1, keepdim=True).clamp(min=eps)
        factor_bhj4 = multiply(gamma_bh11 * unit + beta_bh11 * turn_bhj4, inverse_bhj4)
        still_bh1 = (gamma + beta).unsqueeze(-1) / (1 - alpha).unsqueeze(-1).clamp(min=eps)
        width = 4 * self.blocks
        turned_brhj4 = multiply(factor_bhj4.unsqueeze(1), k[..., :width].unflatten(-1, (self.blocks, 4)))
        return torch.cat([turned_brhj4.flatten(-2), k[..., width:] * still_bh1.unsqueeze(1)], dim=-1)


Rotation = ComplexRotation | QuaternionRotation


def _increments(dt_bth: Tensor, rate_bts: Tensor) -> Tensor:
    """Turns per token, in float64 where the device has it: a long sum in float32 would lose the angle."""
    wide = torch.float32 if dt_bth.device.type == "mps" else torch.float64
    return dt_bth.to(wide).unsqueeze(-1) * rate_bts.to(wide).unsqueeze(2)


def _running_sum(x_bt: Tensor, block: int = 64) -> Tensor:
    """`x.cumsum(1)` in blocks side by side, then from block to block: torch's own is one long chain for each column."""
    t = x_bt.shape[1]
    if t <= block:
        return x_bt.cumsum(1)
    padding = -t % block
    padded = F.pad(x_bt, (0, 0) * (x_bt.ndim - 2) + (0, padding)) if padding else x_bt
    sums = padded.unflatten(1, (-1, block)).cumsum(2)
    sums[:, 1:] += sums[:, :-1, -1].cumsum(1).unsqueeze(2)
    return sums.flatten(1, 2)[:, :t]


def _advance_forward(dt: Tensor, rate: Tensor, start: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    parts = [
        _running_sum(part).add_(first.unsqueeze(1))
        for part, first in zip(
            sequences_of(_increments(dt, rate), cu_seqlens), starts_of(start, cu_seqlens), strict=True
        )
    ]
    return torch.cat(parts, dim=1).remainder_(2 * math.pi).to(start.dtype)


def _advance_backward(
    dturned: Tensor, dt: Tensor, rate: Tensor, start: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    parts = [_running_sum(part.flip(1)).flip(1) for part in sequences_of(dturned, cu_seqlens)]
    dincrement = torch.cat(parts, dim=1)
    ddt = torch.einsum("bths,bts->bth", dincrement, rate)
    drate = torch.einsum("bths,bth->bts", dincrement, dt)
    return ddt, drate, torch.cat([part[:, 0] for part in parts])


_advance_angles = define_operator(
    "advance_angles",
    inputs="Tensor dt, Tensor rate, Tensor start, Tensor? cu_seqlens",
    outputs=1,
    differentiable=3,
    forward=_advance_forward,
    backward=_advance_backward,
    fake=lambda dt, rate, start, cu_seqlens: start.new_empty((*dt.shape, rate.shape[-1])),
)


def _pairs(x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second channels of the pairs, as views."""
    if interleaved:
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    half = x.shape[-1] // 2
    return x[..., :pairs], x[..., half : half + pairs]


class _Phase(NamedTuple):
    cos_mrhs: Tensor
    sin_mrhs: Tensor

    def turn(self, x: Tensor, interleaved: bool, sign: float) -> Tensor:
        """Rotate the pairs of `x` (m, r, h, n) in place, forwards or backwards."""
        pairs = self.cos_mrhs.shape[-1]
        if pairs == 0:
            return x
        if interleaved:
            plane = torch.view_as_complex(x[..., : 2 * pairs].unflatten(-1, (pairs, 2)))
            plane.mul_(torch.complex(self.cos_mrhs, sign * self.sin_mrhs))
            return x
        u, w = _pairs(x, pairs, interleaved)
        turned_u = (u * self.cos_mrhs).addcmul_(w, self.sin_mrhs, value=-sign)
        w.mul_(self.cos_mrhs).addcmul_(u, self.sin_mrhs, value=sign)
        u.copy_(turned_u)
        return x


def _pair_turning(interleaved: bool) -> Turning:
    def gradient(x: Tensor, drotated: Tensor, dx: Tensor, phase: _Phase) -> Tensor:
        # u' dw' - w' du' of the rotated pair and its gradient; turning both back leaves it as it is.
        u, w = _pairs(x, phase.cos_mrhs.shape[-1], interleaved)
        du, dw = _pairs(dx, phase.cos_mrhs.shape[-1], interleaved)
        return (u * dw).addcmul_(w, du, value=-1).sum(1)

    return Turning(
        prepare=lambda angle_mhs: _Phase(angle_mhs.unsqueeze(1).cos(), angle_mhs.unsqueeze(1).sin()),
        turn=lambda x, phase: phase.turn(x, interleaved, 1.0),
        turn_back=lambda x, phase: phase.turn(x, interleaved, -1.0),
        gradient=gradient,
    )


def _turn_blocks(x: Tensor, q_mhj4: Tensor) -> Tensor:
    """Multiply the leading blocks of four of `x` (m, r, h, n) from the left by `q`, in place."""
    blocks = q_mhj4.shape[-2]
    multiply_in_place(q_mhj4.unsqueeze(1), x[..., : 4 * blocks].unflatten(-1, (blocks, 4)))
    return x


def _block_gradient(x: Tensor, drotated: Tensor, dx: Tensor, q_mhj4: Tensor) -> Tensor:
    """`o = Q̄ x` gives `dQ = x dō`."""
    blocks = q_mhj4.shape[-2]
    x_mrhj4, do_mrhj4 = (m[..., : 4 * blocks].unflatten(-1, (blocks, 4)) for m in (x, drotated))
    return multiply_by_conjugate(x_mrhj4, do_mrhj4).sum(1)


_rotate_interleaved = turning_operator("rotate_interleaved", _pair_turning(interleaved=True))
_rotate_halves = turning_operator("rotate_halves", _pair_turning(interleaved=False))
_rotate_blocks = turning_operator(
    "rotate_blocks",
    Turning(
        prepare=lambda q_mhj4: q_mhj4,
        turn=lambda x, q_mhj4: _turn_blocks(x, conjugate(q_mhj4)),
        turn_back=_turn_blocks,
        gradient=_block_gradient,
    ),
)
