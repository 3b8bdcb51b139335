"""One recurrence for every family: the inputs of a block's scan.

    S_t = exp(a_t) (S_{t-1} + κ_t Σ_r v_{t-1}[r] ⊗ k_{t-1}[r]) + γ_t Σ_r v_t[r] ⊗ k_t[r]        y_t[r] = S_t q_t[r]

- Mamba-1: a channel is a head of width 1. Each of its n states decays at its own rate, so `a` has an axis n.
  γ = Δ, κ = 0.
- Mamba-2: γ = Δ, κ = 0.
- Mamba-3: γ and κ are the two weights of the trapezoidal rule; keys and queries are rotated.

The block computes its own projections, convolution, step sizes and norms (`scan_inputs`); none of that is repeated
here.

Letters: b batch, t time, r MIMO rank, h heads, p head width, n state, s pairs (or blocks of four) that turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anymamba.blocks.base import Block
from anymamba.blocks.mamba1 import Mamba1, Mamba1Cache
from anymamba.blocks.mamba2 import Mamba2, Mamba2Cache
from anymamba.blocks.mamba3 import Mamba3, Mamba3Cache
from anymamba.core.checks import check_shape
from anymamba.core.dtypes import state_dtype
from anymamba.ops.rotation import rotate, running_rotation
from anymamba.scan.rotated_scan import values_of_ranks
from anymamba.scan.trapezoidal_scan import add_pending_term


class Recurrence(NamedTuple):
    """The terms of the recurrence at the top of this file, in float32 or wider.

    Attributes:
        v: values, before any weight of a token.
        k: keys of every head.
        q: queries of every head.
        log_decay: a, (b, t, h); (b, t, h, n) for Mamba-1.
        gamma: weights of a token in its own step.
        kappa: weights of the token before; zeros except for Mamba-3.
        dt: step sizes.
        start: the state before the first token, including what is pending from the token before it.
        skip: what bypasses the state, to be added to y.
        turn: by how much a token turns each pair of states, or block of four, in radians; None except for Mamba-3.
        finish: the rest of the block, from y + skip (b, t, r, h, p) to its output (b, t, d).
    """

    v: Float[Tensor, "b t r h p"]
    k: Float[Tensor, "b t r h n"]
    q: Float[Tensor, "b t r h n"]
    log_decay: Float[Tensor, "b t h *n"]
    gamma: Float[Tensor, "b t h"]
    kappa: Float[Tensor, "b t h"]
    dt: Float[Tensor, "b t h"]
    start: Float[Tensor, "b h p n"]
    skip: Float[Tensor, "b t r h p"]
    turn: Float[Tensor, "b t h s"] | None
    finish: Callable[[Tensor], Tensor]


def recurrence(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> Recurrence:
    """The inputs of the scan of `block` for `x`.

    Args:
        block: a `Mamba1`, `Mamba2` or `Mamba3`.
        x: the block's input: a layer's, after its norm (`anymamba.analysis.layers` collects those of a model).
        cache: what the rows continue from; a fresh start if not given.

    Raises:
        TypeError: it is a block of another family, or not a block.
        ValueError: shapes that do not fit.
    """
    read = next((read for family, read in _FAMILIES.items() if isinstance(block, family)), None)
    if read is None:
        raise TypeError(f"inspect: block must be a Mamba1, Mamba2 or Mamba3, got {type(block).__name__}")
    check_shape("inspect", "x", x, "b t d", {"d": block.d_model})
    if x.shape[1] == 0:
        raise ValueError("inspect: x must have at least one step, got none")
    return read(block, x, block.init_cache(x.shape[0], x.dtype) if cache is None else cache)


def _mamba1(block: Mamba1, x: Tensor, cache: Mamba1Cache) -> Recurrence:
    inputs, _ = block.scan_inputs(x, cache)
    wide, heads = state_dtype(x.dtype), (-1, -1, 1, block.d_inner, -1)
    dt_bth, x_btrhp = F.softplus(inputs.dt), inputs.x.to(wide)[:, :, None, :, None]
    return Recurrence(
        v=x_btrhp,
        k=inputs.B.to(wide)[:, :, None, None].expand(heads),
        q=inputs.C.to(wide)[:, :, None, None].expand(heads),
        log_decay=dt_bth.unsqueeze(-1) * inputs.A,
        gamma=dt_bth,
        kappa=torch.zeros_like(dt_bth),
        dt=dt_bth,
        start=cache.ssm.unsqueeze(2),
        skip=x_btrhp * inputs.D.to(wide).unsqueeze(-1),
        turn=None,
        finish=lambda y: block.out_proj((y[:, :, 0, :, 0] * F.silu(inputs.z.to(wide))).to(x.dtype)),
    )


def _mamba2(block: Mamba2, x: Tensor, cache: Mamba2Cache) -> Recurrence:
    inputs, gates, _ = block.scan_inputs(x, cache)
    c, wide, x_btrhp = block.config, inputs.dt.dtype, inputs.x.unsqueeze(2).to(inputs.dt.dtype)
    k_btrhn, q_btrhn = (
        shared.to(wide).unsqueeze(2).repeat_interleave(c.nheads // c.ngroups, dim=3) for shared in (inputs.B, inputs.C)
    )
    return Recurrence(
        v=x_btrhp,
        k=k_btrhn,
        q=q_btrhn,
        log_decay=inputs.dt * inputs.A,
        gamma=inputs.dt,
        kappa=torch.zeros_like(inputs.dt),
        dt=inputs.dt,
        start=cache.ssm,
        skip=x_btrhp * (inputs.D if inputs.D.ndim == 2 else inputs.D.unsqueeze(-1)).to(wide),
        turn=None,
        finish=lambda y: block.output(y.squeeze(2).to(x.dtype), gates),
    )


def _mamba3(block: Mamba3, x: Tensor, cache: Mamba3Cache) -> Recurrence:
    c, (inputs, z_bthp) = block.config, block.scan_inputs(x)
    wide = inputs.step.dtype
    turned = running_rotation(c.rotation_kind, inputs.rate, inputs.step, cache.rotation, None)
    v_btrhp = values_of_ranks(inputs.x, inputs.value_weight)
    before_brhp = values_of_ranks(cache.v, inputs.value_weight)
    return Recurrence(
        v=v_btrhp.to(wide),
        k=rotate(c.rotation_kind, inputs.k, inputs.k_bias, turned).to(wide),
        q=rotate(c.rotation_kind, inputs.q, inputs.q_bias, turned).to(wide),
        log_decay=inputs.log_decay,
        gamma=inputs.gamma,
        kappa=inputs.kappa,
        dt=inputs.gamma + inputs.kappa,
        start=add_pending_term(cache.ssm, before_brhp, cache.k, inputs.kappa[:, 0]),
        skip=(v_btrhp * inputs.D.to(v_btrhp.dtype).unsqueeze(-1)).to(wide),
        turn=_angles(inputs.rate, inputs.step, c.turns, c.rotation == "quaternion"),
        finish=lambda y: block.output(y.to(x.dtype), z_bthp),
    )


def _angles(rate_btc: Tensor, step_bth: Tensor, turns: int, quaternion: bool) -> Tensor:
    """(b, t, h, s): signed for a pair that turns in its plane, the angle about an axis for blocks of four."""
    if quaternion:
        vectors = rate_btc.unflatten(-1, (step_bth.shape[-1], turns, 3)) * step_bth[..., None, None]
        return vectors.norm(dim=-1)
    return step_bth.unsqueeze(-1) * rate_btc.unsqueeze(2)


_FAMILIES: dict[type[nn.Module], Callable[..., Recurrence]] = {Mamba1: _mamba1, Mamba2: _mamba2, Mamba3: _mamba3}
