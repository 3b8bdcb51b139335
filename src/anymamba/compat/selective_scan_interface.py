"""The official scans of Mamba-1, with the official names, arguments and layouts, on `selective_scan`.

Letters: b batch, l time, d channels, g groups, n state, r rank of dt.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.compat.causal_conv1d import causal_conv1d_fn
from anymamba.core.checks import can_read_values
from anymamba.core.dtypes import state_dtype
from anymamba.ops.norms_and_gates import rms_norm
from anymamba.scan import selective_scan

_TINY = 1e-30  # the least step size that has a logarithm in float32


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """Compute the scan of Mamba-1: `anymamba.selective_scan` in the official layout.

    Args:
        u: Inputs, (b, d, l).
        delta: Step sizes, (b, d, l).
        A: Decay rates, (d, n), never positive.
        B: Input projections: (d, n), the same for all tokens; (b, n, l); or (b, g, n, l), one per group of channels.
        C: Output projections, in a layout of B.
        D: Skip weights, (d,).
        z: Gates, (b, d, l).
        delta_bias: Number added to the step sizes, (d,).
        delta_softplus: Whether step sizes are the softplus of that sum. Otherwise, they must not be negative.
        return_last_state: Whether to also return the state after the last step, (b, d, n).

    Raises:
        NotImplementedError: A is complex.
        ValueError: A shape or value is invalid.
    """
    if A.is_complex():
        raise NotImplementedError("mamba_ssm.selective_scan_fn with a complex A: only real ones are supported")
    acc_dtype = state_dtype(u.dtype)
    dt_btd = raw_steps("selective_scan_fn", delta.transpose(1, 2).to(acc_dtype), delta_bias, delta_softplus)
    x_btd, rates = u.transpose(1, 2), A.to(acc_dtype)
    z_btd = None if z is None else z.transpose(1, 2).to(u.dtype)
    if B.ndim == 2 or C.ndim == 2:
        y_btd, last = _per_channel(x_btd, dt_btd, rates, _by_channel(B, u), _by_channel(C, u), D, z_btd)
    else:
        y_btd, last = _per_group(x_btd, dt_btd, rates, B.to(u.dtype), C.to(u.dtype), D, z_btd)
    y = y_btd.transpose(1, 2)
    return (y, last) if return_last_state else y


def raw_steps(where: str, delta: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Return numbers (..., d) whose softplus is the step sizes, which our scans take."""
    raw = delta if bias is None else delta + bias.to(delta.dtype)
    if softplus:
        return raw
    if can_read_values(raw) and raw.numel() and (least := raw.detach().min().item()) < 0:
        raise ValueError(f"{where}: step sizes without softplus must not be negative, got down to {least:.6g}")
    # A step of zero has no logarithm, but it has a gradient, which bypasses the clamp.
    sizes = raw + (raw.detach().clamp(min=_TINY) - raw.detach())
    return sizes + torch.log(-torch.expm1(-sizes))


def _per_group(
    x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, z: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scan with B and C (b, n, l) or (b, g, n, l): one scan per group of channels."""
    groups = max(b.shape[1] if b.ndim == 4 else 1, c.shape[1] if c.ndim == 4 else 1)
    if x.shape[2] % groups:
        raise ValueError(f"selective_scan_fn: {groups} groups must divide the {x.shape[2]} channels")
    ys, states = [], []
    for group in range(groups):
        width = x.shape[2] // groups
        part = slice(group * width, (group + 1) * width)
        keys, queries = ((t if t.ndim == 3 else t[:, group if t.shape[1] > 1 else 0]).transpose(1, 2) for t in (b, c))
        y, state = selective_scan(
            x[:, :, part],
            dt[:, :, part],
            rates[part],
            keys,
            queries,
            None if skip is None else skip[part],
            None if z is None else z[:, :, part],
        )
        ys.append(y)
        states.append(state)
    return (ys[0], states[0]) if groups == 1 else (torch.cat(ys, 2), torch.cat(states, 1))


def _by_channel(x: Tensor, u: Tensor) -> Tensor:
    """Return B or C in any layout as (1 or b, 1 or l, d, n)."""
    if x.ndim == 2:
        return x[None, None]
    if x.ndim == 3:
        x = x.unsqueeze(1)
    return x.permute(0, 3, 1, 2).repeat_interleave(u.shape[1] // x.shape[1], dim=2)


def _per_channel(
    x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, z: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scan with one B or C per channel: every state of a channel becomes a channel with one state."""
    d, n = rates.shape
    acc_dtype = rates.dtype
    each = (x.to(acc_dtype).unsqueeze(-1) * b.to(acc_dtype)).flatten(2)
    ones = each.new_ones(each.shape[0], each.shape[1], 1)
    dts = dt.repeat_interleave(n, dim=2)
    h, last = selective_scan(each, dts, rates.reshape(-1, 1), ones, ones)
    y = (h.unflatten(2, (d, n)) * c.to(acc_dtype)).sum(-1)
    if skip is not None:
        y = y + skip.to(acc_dtype) * x.to(acc_dtype)
    if z is not None:
        y = y * F.silu(z.to(acc_dtype))
    return y.to(x.dtype), last.unflatten(1, (d, n)).squeeze(-1)


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """Compute a Mamba-1 block after its first projection, xz (b, 2 d, l) -> (b, l, out).

    B and C are projected from the inputs unless they are given. dt, B and C are RMS-normalized if weights for that are
    given. `checkpoint_lvl` does not change results.
    """
    inputs = _scan_inputs(
        xz,
        conv1d_weight,
        conv1d_bias,
        x_proj_weight,
        delta_proj_weight,
        A.shape[-1],
        B,
        C,
        B_proj_bias,
        C_proj_bias,
        norm_weights=(b_rms_weight, c_rms_weight, dt_rms_weight),
        eps=b_c_dt_rms_eps,
    )
    y_bdl = _scan_with_rates(inputs, A, D, delta_bias, delta_softplus)
    return F.linear(y_bdl.transpose(1, 2), out_proj_weight, _cast(out_proj_bias, out_proj_weight))


def mamba_inner_fn_no_out_proj(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
) -> Tensor:
    """Compute `mamba_inner_fn` up to its last projection, xz (b, 2 d, l) -> (b, d, l); from Vim's mamba_ssm."""
    inputs = _scan_inputs(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A.shape[-1], B, C, B_proj_bias, C_proj_bias
    )
    return _scan_with_rates(inputs, A, D, delta_bias, delta_softplus)


def bimamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    A_b: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
) -> Tensor:
    """Compute `mamba_inner_fn` with a second scan, from the last input to the first; from Vim's mamba_ssm.

    Both scans read the same convolved inputs, step sizes, B and C; the second one has its own decay rates `A_b`. Their
    gated outputs are added before the last projection.
    """
    inputs = _scan_inputs(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A.shape[-1], B, C, B_proj_bias, C_proj_bias
    )
    reversed_inputs = _ScanInputs(*(part if part.ndim == 2 else part.flip(-1) for part in inputs))
    y_bdl = _scan_with_rates(inputs, A, D, delta_bias, delta_softplus)
    y_bdl = y_bdl + _scan_with_rates(reversed_inputs, A_b, D, delta_bias, delta_softplus).flip(-1)
    return F.linear(y_bdl.transpose(1, 2), out_proj_weight, _cast(out_proj_bias, out_proj_weight))


class _ScanInputs(NamedTuple):
    """Inputs of `selective_scan_fn` that a block computes: x, step sizes, z (b, d, l), and B and C in any layout."""

    x: Tensor
    delta: Tensor
    B: Tensor
    C: Tensor
    z: Tensor


def _scan_inputs(
    xz: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    n: int,
    b: Tensor | None = None,
    c: Tensor | None = None,
    b_bias: Tensor | None = None,
    c_bias: Tensor | None = None,
    norm_weights: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    eps: float = 1e-6,
) -> _ScanInputs:
    """Convolve xz (b, 2 d, l), and project it to step sizes, and to B and C unless they are given."""
    x_bdl, z_bdl = xz.chunk(2, dim=1)
    x_bdl = causal_conv1d_fn(x_bdl, conv_weight.squeeze(1), conv_bias, activation="silu")
    b_norm, c_norm, dt_norm = norm_weights
    rank = delta_proj_weight.shape[1]
    selected = F.linear(x_bdl.transpose(1, 2), x_proj_weight)
    if b is None:
        b = selected[..., rank : rank + n]
        b = _normalize(b if b_bias is None else b + b_bias.to(b.dtype), b_norm, eps).transpose(1, 2)
    if c is None:
        c = selected[..., -n:]
        c = _normalize(c if c_bias is None else c + c_bias.to(c.dtype), c_norm, eps).transpose(1, 2)
    delta_bld = F.linear(_normalize(selected[..., :rank], dt_norm, eps), delta_proj_weight)
    return _ScanInputs(x_bdl, delta_bld.transpose(1, 2), b, c, z_bdl)


def _scan_with_rates(
    inputs: _ScanInputs, rates: Tensor, skip: Tensor | None, delta_bias: Tensor | None, delta_softplus: bool
) -> Tensor:
    x, delta, b, c, z = inputs
    y: Tensor = selective_scan_fn(x, delta, rates, b, c, skip, z, delta_bias, delta_softplus)
    return y


def _normalize(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    # Some callers pass a weight of ones that is longer than what is normed.
    return x if weight is None else rms_norm(x, weight[: x.shape[-1]], eps=eps)


def _cast(x: Tensor | None, like: Tensor) -> Tensor | None:
    return None if x is None else x.to(like.dtype)
