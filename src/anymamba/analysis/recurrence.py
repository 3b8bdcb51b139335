"""The inputs of a block's scan as one recurrence, the same for every family.

    S_t = exp(a_t) (S_{t-1} + κ_t Σ_r v_{t-1}[r] ⊗ k_{t-1}[r]) + γ_t Σ_r v_t[r] ⊗ k_t[r]        y_t[r] = S_t q_t[r]

- Mamba-1: a channel is a head of width 1. Each of its n states decays at its own rate, so `a` has an axis n.
  γ = Δ, κ = 0.
- Mamba-2: γ = Δ, κ = 0.
- Mamba-3: γ and κ are the two weights of the trapezoidal rule; keys and queries are rotated.

The block itself computes its projections, convolution, step sizes and norms (`scan_inputs`); this file only brings
their results into one form. A new family joins with `register_recurrence`.

Letters: b batch, t time, r MIMO rank, h heads, p head width, n state, s rotated pairs of states (blocks of four for
quaternions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anymamba.blocks.base import Block
from anymamba.blocks.mamba1 import Mamba1, Mamba1Cache
from anymamba.blocks.mamba2 import Mamba2, Mamba2Cache
from anymamba.blocks.mamba3 import Mamba3, Mamba3Cache
from anymamba.core.checks import check_shape
from anymamba.core.dtypes import state_dtype
from anymamba.ops.rotation import cumulative_rotation, rotate
from anymamba.scan.mamba3_scan import add_outer_products, expand_ranks


class Recurrence(NamedTuple):
    """Terms of the recurrence at the top of this file, in float32 or wider.

    Attributes:
        v: Values, before any per-token weight.
        k: Keys of every head.
        q: Queries of every head.
        log_decay: Log-decays a, (b, t, h); (b, t, h, n) for Mamba-1.
        gamma: Weights of each token in its own step.
        kappa: Weights of the previous token; zeros except for Mamba-3.
        dt: Step sizes.
        initial_state: State before the first token, including the pending term of the token before it.
        skip: Term that bypasses the state and is added to y.
        rotation: Angle by which each token rotates each pair of states, or each block of four, in radians; None except
            for Mamba-3.
        finish: Function that computes the rest of the block, from y + skip (b, t, r, h, p) to its output (b, t, d).
    """

    v: Float[Tensor, "b t r h p"]
    k: Float[Tensor, "b t r h n"]
    q: Float[Tensor, "b t r h n"]
    log_decay: Float[Tensor, "b t h *n"]
    gamma: Float[Tensor, "b t h"]
    kappa: Float[Tensor, "b t h"]
    dt: Float[Tensor, "b t h"]
    initial_state: Float[Tensor, "b h p n"]
    skip: Float[Tensor, "b t r h p"]
    rotation: Float[Tensor, "b t h s"] | None
    finish: Callable[[Tensor], Tensor]


class _Reader(NamedTuple):
    """How a family is read: its recurrence, and the state (b, h, p, n) in its cache."""

    read_terms: Callable[..., Recurrence]
    read_state: Callable[[Any], Tensor]


def register_recurrence(
    family: type[Block], read_terms: Callable[..., Recurrence], read_state: Callable[[Any], Tensor] = lambda c: c.ssm
) -> None:
    """Make every function of this package, and `anymamba inspect`, work for another block family.

    Args:
        family: Class of the blocks.
        read_terms: Function from a block, its input (b, t, d) and a cache to a `Recurrence`.
        read_state: Function from a cache to its state (b, h, p, n).
    """
    _READERS[family] = _Reader(read_terms, read_state)


def recurrence(block: Any, x: Float[Tensor, "b t d"], cache: Any = None) -> Recurrence:
    """Return the inputs of the scan of `block` for `x`.

    Args:
        block: Block of a known family: Mamba-1, Mamba-2, Mamba-3 or a registered one.
        x: Input of the block: that of a layer, after its norm (`layers` collects those of a model).
        cache: Cache to continue from; an empty one if not given.

    Raises:
        TypeError: The argument is not a block.
        ValueError: The family has no registered recurrence, or the shapes do not match.
    """
    reader = _reader_of(block)
    check_shape("analysis", "x", x, "b t d", {"d": block.d_model})
    if x.shape[1] == 0:
        raise ValueError("analysis: x must have at least one step, got none")
    return reader.read_terms(block, x, block.init_cache(x.shape[0], x.dtype) if cache is None else cache)


def state_of(block: Block, cache: Any) -> Float[Tensor, "b h p n"]:
    """Return the SSM state in a cache of `block`, one matrix per head (a row vector per channel of Mamba-1)."""
    return _reader_of(block).read_state(cache)


def _reader_of(block: Any) -> _Reader:
    reader = next((reader for family, reader in _READERS.items() if isinstance(block, family)), None)
    if reader is not None:
        return reader
    names = ", ".join(family.__name__ for family in _READERS)
    if not isinstance(block, Block):
        raise TypeError(f"analysis: expected a block ({names}), got {type(block).__name__}")
    raise ValueError(
        f"analysis: expected a block whose recurrence is known ({names}), got {type(block).__name__}; "
        "anymamba.analysis.register_recurrence adds a family"
    )


def _read_mamba1(block: Mamba1, x: Tensor, cache: Mamba1Cache) -> Recurrence:
    inputs, _ = block.scan_inputs(x, cache)
    acc_dtype, heads = state_dtype(x.dtype), (-1, -1, 1, block.d_inner, -1)
    dt_bth, x_btrhp = F.softplus(inputs.dt), inputs.x.to(acc_dtype)[:, :, None, :, None]
    return Recurrence(
        v=x_btrhp,
        k=inputs.B.to(acc_dtype)[:, :, None, None].expand(heads),
        q=inputs.C.to(acc_dtype)[:, :, None, None].expand(heads),
        log_decay=dt_bth.unsqueeze(-1) * inputs.A,
        gamma=dt_bth,
        kappa=torch.zeros_like(dt_bth),
        dt=dt_bth,
        initial_state=cache.ssm.unsqueeze(2),
        skip=x_btrhp * inputs.D.to(acc_dtype).unsqueeze(-1),
        rotation=None,
        finish=lambda y: block.out_proj((y[:, :, 0, :, 0] * F.silu(inputs.z.to(acc_dtype))).to(x.dtype)),
    )


def _read_mamba2(block: Mamba2, x: Tensor, cache: Mamba2Cache) -> Recurrence:
    inputs, gates, _ = block.scan_inputs(x, cache)
    c, acc_dtype, x_btrhp = block.config, inputs.dt.dtype, inputs.x.unsqueeze(2).to(inputs.dt.dtype)
    k_btrhn, q_btrhn = (
        shared.to(acc_dtype).unsqueeze(2).repeat_interleave(c.nheads // c.ngroups, dim=3)
        for shared in (inputs.B, inputs.C)
    )
    return Recurrence(
        v=x_btrhp,
        k=k_btrhn,
        q=q_btrhn,
        log_decay=inputs.dt * inputs.A,
        gamma=inputs.dt,
        kappa=torch.zeros_like(inputs.dt),
        dt=inputs.dt,
        initial_state=cache.ssm,
        skip=x_btrhp * (inputs.D if inputs.D.ndim == 2 else inputs.D.unsqueeze(-1)).to(acc_dtype),
        rotation=None,
        finish=lambda y: block.output(y.squeeze(2).to(x.dtype), gates),
    )


def _read_mamba3(block: Mamba3, x: Tensor, cache: Mamba3Cache) -> Recurrence:
    c, (inputs, z_bthp) = block.config, block.scan_inputs(x)
    acc_dtype = inputs.dt.dtype
    rotation = cumulative_rotation(c.rotation_kind, inputs.angular_rate, inputs.dt, cache.rotation, None)
    v_btrhp = expand_ranks(inputs.x, inputs.value_weight)
    previous_brhp = expand_ranks(cache.v, inputs.value_weight)
    return Recurrence(
        v=v_btrhp.to(acc_dtype),
        k=rotate(c.rotation_kind, inputs.k, inputs.k_bias, rotation).to(acc_dtype),
        q=rotate(c.rotation_kind, inputs.q, inputs.q_bias, rotation).to(acc_dtype),
        log_decay=inputs.log_decay,
        gamma=inputs.gamma,
        kappa=inputs.kappa,
        dt=inputs.gamma + inputs.kappa,
        initial_state=add_outer_products(cache.ssm, previous_brhp, cache.k, inputs.kappa[:, 0]),
        skip=(v_btrhp * inputs.D.to(v_btrhp.dtype).unsqueeze(-1)).to(acc_dtype),
        rotation=_rotation_angles(inputs.angular_rate, inputs.dt, c.num_rotations, c.rotation == "quaternion"),
        finish=lambda y: block.output(y.to(x.dtype), z_bthp),
    )


def _rotation_angles(rate_btc: Tensor, step_bth: Tensor, count: int, is_quaternion: bool) -> Tensor:
    """Return (b, t, h, s): signed angles for pairs in their plane, angles about an axis for blocks of four."""
    if is_quaternion:
        vectors = rate_btc.unflatten(-1, (step_bth.shape[-1], count, 3)) * step_bth[..., None, None]
        return vectors.norm(dim=-1)
    return step_bth.unsqueeze(-1) * rate_btc.unsqueeze(2)


_READERS: dict[type[Block], _Reader] = {}
register_recurrence(Mamba1, _read_mamba1, lambda cache: cache.ssm.unsqueeze(2))
register_recurrence(Mamba2, _read_mamba2)
register_recurrence(Mamba3, _read_mamba3)
