"""The official functions of one Mamba-3 step: the rotation of a token's keys and queries, and its change of the state.

Letters: b batch, r MIMO rank, h heads, p head width, n state, s pairs of channels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.ops.rotation import apply_rotation
from anymamba.scan import trapezoid_scan


def apply_rotary_qk_inference_fwd(
    q: Tensor,
    k: Tensor,
    angle_state: Tensor,
    angle_proj: Tensor,
    dt: Tensor,
    bias_q: Tensor | None = None,
    bias_k: Tensor | None = None,
    inplace: bool = False,
    conjugate: bool = False,
    rotate_pairwise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add their bias to the query and key of a token, and rotate both by `angle_state + π tanh(angle_proj) dt`.

    Args:
        q: Queries, (b, r, h, n).
        k: Keys, (b, r, h, n).
        angle_state: Angles before the token, (b, h, s).
        angle_proj: Angular rates before `π tanh`, (b, h, s).
        dt: Step sizes, (b, h).
        bias_q: Query bias, (r, h, n), or None.
        bias_k: Key bias, (r, h, n), or None.
        inplace: Whether to write the results to `q`, `k` and `angle_state`.
        conjugate: Whether to rotate the other way.
        rotate_pairwise: Whether channels 2i and 2i + 1 rotate together; otherwise i and i + n / 2.

    Returns:
        Queries, keys and angles; angles are not taken modulo 2π.
    """
    acc_dtype = state_dtype(angle_state.dtype)
    rate = math.pi * torch.tanh(angle_proj.to(acc_dtype))
    angle = angle_state.to(acc_dtype) + rate * dt.to(acc_dtype).unsqueeze(-1)
    results = []
    for x, bias in ((q, bias_q), (k, bias_k)):
        biased = x.to(acc_dtype) if bias is None else x.to(acc_dtype) + bias.to(acc_dtype)
        rotated = apply_rotation("interleaved" if rotate_pairwise else "halves", biased, -angle if conjugate else angle)
        results.append(rotated.to(x.dtype))
    results.append(angle.to(angle_state.dtype))
    if inplace:
        with torch.no_grad():
            results = [old.copy_(new) for old, new in zip((q, k, angle_state), results, strict=True)]
    return results[0], results[1], results[2]


def mamba3_step_fn(
    state: Tensor,
    Bstate: Tensor,
    Xstate: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    x: Tensor,
    dt: Tensor,
    trap: Tensor,
    xproj: Tensor,
    outproj: Tensor | None = None,
    state_out: Tensor | None = None,
    out: Tensor | None = None,
    z: Tensor | None = None,
    zproj: Tensor | None = None,
    tile_D: int = 64,
    num_warps: int = 2,
) -> None:
    """Run one step of the trapezoidal rule, skip, gate and sum over ranks; write the output to `out`.

    Args:
        state: State, (b, h, p, n), overwritten unless `state_out` is given.
        Bstate: Keys of the token before, (b, r, h, n).
        Xstate: Values of the token before, (b, h, p).
        A: Decay rates, (b, h), never positive.
        B: Keys, rotated, (b, r, h, n).
        C: Queries, rotated, (b, r, h, n).
        D: Skip weights, (h,).
        x: Values, (b, h, p).
        dt: Step sizes, (b, h).
        trap: Weights of the trapezoidal rule, between 0 and 1, (b, h).
        xproj: Value weights of each rank, (r, h, p).
        outproj: Output weights of each rank, (r, h, p), or None to keep the ranks apart.
        state_out: Tensor for the new state.
        out: Tensor for the output, (b, h, p), without outproj (b, r, h, p).
        z: Gates, (b, h, p), or None.
        zproj: Gate weights of each rank, (r, h, p); given if z is.
        tile_D: Option of the official kernel; it has no effect.
        num_warps: Option of the official kernel; it has no effect.

    Raises:
        ValueError: `out` is missing or of another shape, or z has no zproj.
    """
    expected = x.shape if outproj is not None else (x.shape[0], *xproj.shape)
    if out is None or out.shape != expected:
        shape = None if out is None else tuple(out.shape)
        raise ValueError(f"mamba3_step_fn: out must be a tensor of shape {tuple(expected)}, got {shape}")
    if z is not None and zproj is None:
        raise ValueError("mamba3_step_fn: z needs zproj")
    acc_dtype = state_dtype(x.dtype)
    dt_b1h, trap_b1h = dt.to(acc_dtype).unsqueeze(1), trap.to(acc_dtype).unsqueeze(1)
    v_brhp, previous_v_brhp = (value.to(acc_dtype).unsqueeze(1) * xproj.to(acc_dtype) for value in (x, Xstate))
    y_b1rhp, new_state = trapezoid_scan(
        v_brhp.unsqueeze(1),
        B.to(acc_dtype).unsqueeze(1),
        C.to(acc_dtype).unsqueeze(1),
        A.to(acc_dtype).unsqueeze(1) * dt_b1h,
        trap_b1h * dt_b1h,
        (1 - trap_b1h) * dt_b1h,
        initial_state=state.to(acc_dtype),
        previous_v=previous_v_brhp,
        previous_k=Bstate.to(acc_dtype),
    )
    y = y_b1rhp.squeeze(1) + D.to(acc_dtype).unsqueeze(-1) * v_brhp
    if z is not None and zproj is not None:
        y = y * F.silu(z.to(acc_dtype).unsqueeze(1) * zproj.to(acc_dtype))
    if outproj is not None:
        y = (y * outproj.to(acc_dtype)).sum(1)
    with torch.no_grad():
        out.copy_(y)
        (state if state_out is None else state_out).copy_(new_state)
