"""The official scans of Mamba-3, with the official names, arguments and layouts, on `trapezoid_scan`.

Letters: b batch, t time, r MIMO rank, g groups of heads, h heads, p head width, n state, s pairs of channels, z rows or
packed sequences.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.core.dtypes import accumulation_dtype, state_dtype
from anymamba.core.layout import last_steps
from anymamba.ops.norms_and_gates import rank_gate, rms_norm
from anymamba.ops.rotation import RotationKind, cumulative_rotation, rotate
from anymamba.scan import trapezoid_scan
from anymamba.scan.mamba3_scan import expand_ranks


class _States(NamedTuple):
    """What a sequence carries from one token to the next, in the official order.

    Attributes:
        angle: Running angles, (z, h, s).
        ssm: State, (z, h, p, n).
        k: Last key, after bias and rotation, (z, r, h, n).
        v: Last value, (z, h, p).
    """

    angle: Tensor
    ssm: Tensor
    k: Tensor
    v: Tensor


def mamba3_siso_combined(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    Angles: Tensor,
    D: Tensor | None = None,
    Z: Tensor | None = None,
    Input_States: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    chunk_size: int = 64,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Any:
    """Compute the scan of Mamba-3 with one rank: bias and rotation of keys and queries, trapezoidal rule, skip, gate.

    The official function rounds its inputs to bfloat16; this one computes in the dtype of V.

    Args:
        Q: Queries, (b, t, g, n).
        K: Keys, (b, t, g, n).
        V: Values, (b, t, h, p).
        ADT: Log-decays A dt, (b, h, t), never positive.
        DT: Step sizes, (b, h, t).
        Trap: Weights of the trapezoidal rule before their sigmoid, (b, h, t).
        Q_bias: Query bias, (h, n).
        K_bias: Key bias, (h, n).
        Angles: Angular rates before `π tanh`, (b, t, h, s). Channels 2i and 2i + 1 rotate together.
        D: Skip weights, (h,), or None.
        Z: Gates, (b, t, h, p), or None.
        Input_States: Angles (z, h, s), state (z, h, p, n), last key (z, h, n) and last value (z, h, p) before the first
            token, or None.
        chunk_size: Chunk length of the official kernels; it does not change results.
        return_final_states: Whether to also return these states after the last token.
        cu_seqlens: Boundaries of sequences packed into a batch of one, (z + 1,).

    Returns:
        y (b, t, h, p), or y and the four states.
    """
    states = None
    if Input_States is not None:
        angle, ssm, k, v = Input_States
        states = _States(angle, ssm, k.unsqueeze(1), v)
    keys = (K.unsqueeze(2), K_bias.unsqueeze(1), Q.unsqueeze(2), Q_bias.unsqueeze(1))
    y_btrhp, final = _rotated_scan("interleaved", V, None, keys, (ADT, DT, Trap), Angles, D, states, cu_seqlens)
    y = y_btrhp.squeeze(2) if Z is None else rank_gate(y_btrhp, Z.to(V.dtype))
    return (y, *final._replace(k=final.k.squeeze(1))) if return_final_states else y


def mamba3_mimo(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    MIMO_V: Tensor,
    MIMO_Z: Tensor | None,
    MIMO_Out: Tensor | None,
    Angles: Tensor,
    D: Tensor | None,
    Z: Tensor | None,
    chunk_size: int,
    rotary_dim_divisor: int,
    dtype: torch.dtype,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    fuse_pregate_headwise_rms_norm: bool = False,
    outproj_norm_weight: Tensor | None = None,
    outproj_norm_eps: float = 1e-5,
) -> Any:
    """Compute the scan of Mamba-3 with several ranks, and the gate, norm and sum over ranks after it.

    Args:
        Q: Queries, (b, t, r, g, n).
        K: Keys, (b, t, r, g, n).
        V: Values, (b, t, h, p).
        ADT: Log-decays A dt, (b, h, t), never positive.
        DT: Step sizes, (b, h, t).
        Trap: Weights of the trapezoidal rule before their sigmoid, (b, h, t).
        Q_bias: Query bias, (h, r, n).
        K_bias: Key bias, (h, r, n).
        MIMO_V: Value weights of each rank, (h, r, p).
        MIMO_Z: Gate weights of each rank, (h, r, p); not used without Z.
        MIMO_Out: Output weights of each rank, (h, r, p). If None, ranks are not summed.
        Angles: Angular rates before `π tanh`, (b, t, h, s). Channels i and i + n / 2 rotate together.
        D: Skip weights, (h,), or None.
        Z: Gates, (b, t, h, p), or None.
        chunk_size: Chunk length of the official kernels; it does not change results.
        rotary_dim_divisor: n / s, 2 or 4.
        dtype: Dtype of products in the official kernels; ours compute in the dtype of V.
        return_state: Whether to also return the states after the last token, which are differentiable here.
        cu_seqlens: Boundaries of sequences packed into a batch of one, (z + 1,).
        fuse_pregate_headwise_rms_norm: Whether to normalize each head and rank before the gate; needs Z and MIMO_Out.
        outproj_norm_weight: Weight of that norm, (h, p) or (h p,). Default: ones.
        outproj_norm_eps: Number that the norm adds to the mean square.

    Returns:
        y (b, t, h, p), without MIMO_Out (b, t, r, h, p); or y, angles, state, last key (z, r, h, n) and last value.

    Raises:
        ValueError: Arguments do not match.
    """
    if Q.shape[-1] != rotary_dim_divisor * Angles.shape[-1]:
        raise ValueError(
            f"mamba3_mimo: rotary_dim_divisor must be {Q.shape[-1]} / {Angles.shape[-1]}, the state size by the number "
            f"of angles, got {rotary_dim_divisor}"
        )
    if Z is not None and MIMO_Z is None:
        raise ValueError("mamba3_mimo: Z needs MIMO_Z")
    keys = (K, K_bias, Q, Q_bias)
    y_btrhp, final = _rotated_scan("halves", V, MIMO_V, keys, (ADT, DT, Trap), Angles, D, None, cu_seqlens)
    if fuse_pregate_headwise_rms_norm:
        if Z is None or MIMO_Out is None:
            raise ValueError("mamba3_mimo: fuse_pregate_headwise_rms_norm needs Z and MIMO_Out")
        y_btrhp = _normalize_heads(y_btrhp, outproj_norm_weight, outproj_norm_eps)
    if Z is not None and MIMO_Out is not None:
        y = rank_gate(y_btrhp, Z.to(V.dtype), MIMO_Z, MIMO_Out)
    else:
        acc_dtype = state_dtype(V.dtype)
        y = y_btrhp.to(acc_dtype)
        if Z is not None and MIMO_Z is not None:
            y = y * torch.nn.functional.silu(expand_ranks(Z.to(acc_dtype), MIMO_Z))
        if MIMO_Out is not None:
            y = (y * MIMO_Out.transpose(0, 1).to(acc_dtype)).sum(2)
        y = y.to(V.dtype)
    return (y, *final) if return_state else y


def _normalize_heads(y_btrhp: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    h, p = y_btrhp.shape[3:]
    weight = y_btrhp.new_ones(h * p) if weight is None else weight.flatten()
    return rms_norm(y_btrhp.flatten(3), weight, group_size=p, eps=eps).unflatten(3, (h, p))


def _rotated_scan(
    kind: RotationKind,
    v_bthp: Tensor,
    value_weight_hrp: Tensor | None,
    keys: tuple[Tensor, Tensor, Tensor, Tensor],
    steps: tuple[Tensor, Tensor, Tensor],
    angles_bths: Tensor,
    skip_h: Tensor | None,
    states: _States | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, _States]:
    """Return y (b, t, r, h, p) before the gate, and the states after the last token.

    Args:
        kind: Which channels rotate together.
        v_bthp: Values.
        value_weight_hrp: Value weights of each rank, or None for one rank.
        keys: Keys (b, t, r, g, n), their bias (h, r, n), queries and their bias.
        steps: Log-decays, step sizes and weights before their sigmoid, each (b, h, t).
        angles_bths: Angular rates before `π tanh`. Unlike those of `rotated_trapezoid_scan`, each head has its own.
        skip_h: Skip weights, or None.
        states: States before the first token, or None.
        cu_seqlens: Boundaries of packed sequences.
    """
    acc_dtype = state_dtype(v_bthp.dtype)
    log_decay_bth, dt_bth, trapezoid_logit_bth = (x.to(acc_dtype).transpose(1, 2) for x in steps)
    current_weight_bth = torch.sigmoid(trapezoid_logit_bth)
    rotation_bths = _sum_angles(angles_bths, dt_bth, None if states is None else states.angle, cu_seqlens)
    k, k_bias, q, q_bias = keys
    k_btrhn = rotate(kind, k.to(v_bthp.dtype), k_bias, rotation_bths)
    q_btrhn = rotate(kind, q.to(v_bthp.dtype), q_bias, rotation_bths)
    v_btrhp = expand_ranks(v_bthp, value_weight_hrp)
    y_btrhp, ssm = trapezoid_scan(
        v_btrhp,
        k_btrhn,
        q_btrhn,
        log_decay_bth,
        current_weight_bth * dt_bth,
        (1 - current_weight_bth) * dt_bth,
        initial_state=None if states is None else states.ssm.to(acc_dtype),
        previous_v=None if states is None else expand_ranks(states.v.to(v_bthp.dtype), value_weight_hrp),
        previous_k=None if states is None else states.k.to(v_bthp.dtype),
        cu_seqlens=cu_seqlens,
    )
    if skip_h is not None:
        y_btrhp = torch.addcmul(y_btrhp, skip_h.to(y_btrhp.dtype).unsqueeze(-1), v_btrhp)
    last_angle, last_k, last_v = (last_steps(x, cu_seqlens, None, x) for x in (rotation_bths, k_btrhn, v_bthp))
    return y_btrhp, _States(last_angle, ssm, last_k, last_v)


def _sum_angles(angles_bths: Tensor, dt_bth: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return the angle of each token, (b, t, h, s): all pairs of all heads as those of one head with steps of one."""
    acc_dtype = accumulation_dtype(dt_bth.device)
    rate_bths = math.pi * torch.tanh(angles_bths.to(dt_bth.dtype)).to(acc_dtype) * dt_bth.to(acc_dtype).unsqueeze(-1)
    if initial is None:
        rows = dt_bth.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial = dt_bth.new_zeros(rows, *angles_bths.shape[2:])
    start_z1c = initial.to(dt_bth.dtype).flatten(1).unsqueeze(1)
    ones_bt1 = torch.ones_like(dt_bth[..., :1])
    sums_bt1c = cumulative_rotation("interleaved", rate_bths.flatten(2), ones_bt1, start_z1c, cu_seqlens)
    return sums_bt1c.squeeze(2).unflatten(2, angles_bths.shape[2:])
