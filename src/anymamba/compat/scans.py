"""The official scans by their names, arguments and layouts, on `selective_scan` and `ssd`.

Letters: b batch, l time, d channels, h heads, p head width, g groups, n state, r rank of dt.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.compat.convolutions import causal_conv1d_fn
from anymamba.compat.norms import rmsnorm_fn
from anymamba.compat.packing import Packing, in_one_row
from anymamba.ground.checks import values_are_cheap
from anymamba.ground.numerics import state_dtype
from anymamba.ops.discretise import step_sizes
from anymamba.ops.gates import rank_gate
from anymamba.ops.norms import rms_norm
from anymamba.scan import selective_scan, ssd

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
    """Mamba-1's scan: `anymamba.selective_scan` in the official layout.

    Args:
        u: inputs, (b, d, l).
        delta: step sizes, (b, d, l).
        A: decay rates, (d, n), never positive.
        B: (d, n), the same for all tokens; (b, n, l); or (b, g, n, l), one for each group of channels.
        C: as B.
        D: skip weights, (d,).
        z: gates, (b, d, l).
        delta_bias: added to the step sizes, (d,).
        delta_softplus: step sizes are the softplus of that. Without it, they must not be negative.
        return_last_state: also return the state after the last step, (b, d, n).

    Raises:
        NotImplementedError: A is complex.
        ValueError: shapes or values that do not fit.
    """
    if A.is_complex():
        raise NotImplementedError("mamba_ssm.selective_scan_fn with a complex A: there are real ones only")
    wide = state_dtype(u.dtype)
    dt_btd = _raw_steps("selective_scan_fn", delta.transpose(1, 2).to(wide), delta_bias, delta_softplus)
    x_btd, rates = u.transpose(1, 2), A.to(wide)
    z_btd = None if z is None else z.transpose(1, 2).to(u.dtype)
    if B.ndim == 2 or C.ndim == 2:
        y_btd, last = _per_channel(x_btd, dt_btd, rates, _by_channel(B, u), _by_channel(C, u), D, z_btd)
    else:
        y_btd, last = _per_group(x_btd, dt_btd, rates, B.to(u.dtype), C.to(u.dtype), D, z_btd)
    y = y_btd.transpose(1, 2)
    return (y, last) if return_last_state else y


def _raw_steps(where: str, delta: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """(..., d) -> what has the step sizes as its softplus, which is where our scans begin."""
    raw = delta if bias is None else delta + bias.to(delta.dtype)
    if softplus:
        return raw
    if values_are_cheap(raw) and raw.numel() and (least := raw.detach().min().item()) < 0:
        raise ValueError(f"{where}: step sizes without softplus must not be negative, got down to {least:.6g}")
    # A step of zero has no logarithm, but a gradient: it passes by the clamp.
    sizes = raw + (raw.detach().clamp(min=_TINY) - raw.detach())
    return sizes + torch.log(-torch.expm1(-sizes))


def _per_group(
    x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, z: Tensor | None
) -> tuple[Tensor, Tensor]:
    """B and C (b, n, l) or (b, g, n, l): one scan for each group of channels."""
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
    """B or C in any form as (1 or b, 1 or l, d, n)."""
    if x.ndim == 2:
        return x[None, None]
    if x.ndim == 3:
        x = x.unsqueeze(1)
    return x.permute(0, 3, 1, 2).repeat_interleave(u.shape[1] // x.shape[1], dim=2)


def _per_channel(
    x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, z: Tensor | None
) -> tuple[Tensor, Tensor]:
    """B or C differ from channel to channel: every state of a channel becomes a channel with one state."""
    d, n = rates.shape
    wide = rates.dtype
    each = (x.to(wide).unsqueeze(-1) * b.to(wide)).flatten(2)
    ones = each.new_ones(each.shape[0], each.shape[1], 1)
    dts = dt.repeat_interleave(n, dim=2)
    h, last = selective_scan(each, dts, rates.reshape(-1, 1), ones, ones)
    y = (h.unflatten(2, (d, n)) * c.to(wide)).sum(-1)
    if skip is not None:
        y = y + skip.to(wide) * x.to(wide)
    if z is not None:
        y = y * F.silu(z.to(wide))
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
    """A Mamba-1 block after its first projection: xz (b, 2 d, l) -> (b, l, out).

    B and C are projected from the inputs unless they are given. Where there are weights for them, dt, B and C pass RMS
    norms. `checkpoint_lvl` changes no result.
    """
    x_bdl, z_bdl = xz.chunk(2, dim=1)
    x_bdl = causal_conv1d_fn(x_bdl, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")
    rank, n = delta_proj_weight.shape[1], A.shape[-1]
    selected = F.linear(x_bdl.transpose(1, 2), x_proj_weight)
    dt_blr, rest = selected[..., :rank], selected[..., rank:]
    if B is None:
        B, rest = rest[..., :n], rest[..., n:]
        B = _normed(B if B_proj_bias is None else B + B_proj_bias.to(B.dtype), b_rms_weight, b_c_dt_rms_eps)
        B = B.transpose(1, 2)
    if C is None:
        C = rest[..., -n:]
        C = _normed(C if C_proj_bias is None else C + C_proj_bias.to(C.dtype), c_rms_weight, b_c_dt_rms_eps)
        C = C.transpose(1, 2)
    delta_bld = F.linear(_normed(dt_blr, dt_rms_weight, b_c_dt_rms_eps), delta_proj_weight)
    y_bdl = selective_scan_fn(x_bdl, delta_bld.transpose(1, 2), A, B, C, D, z_bdl, delta_bias, delta_softplus)
    return F.linear(y_bdl.transpose(1, 2), out_proj_weight, _cast(out_proj_bias, out_proj_weight))


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    # Some callers pass a weight of ones that is longer than what is normed.
    return x if weight is None else rms_norm(x, weight[: x.shape[-1]], eps=eps)


def _cast(x: Tensor | None, like: Tensor) -> Tensor | None:
    return None if x is None else x.to(like.dtype)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Any = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """Mamba-2's scan: `anymamba.ssd` after bias, softplus and limits of the step sizes, and before the gate.

    Args:
        x: inputs, (b, l, h, p).
        dt: step sizes, (b, l, h).
        A: decay rates, (h,), never positive.
        B: input projections, (b, l, g, n).
        C: output projections, (b, l, g, n).
        chunk_size: of the official kernels. Ours choose their own, which changes no result.
        D: skip weights, (h,) or (h, p).
        z: gates, (b, l, h, p).
        dt_bias: added to the step sizes, (h,).
        initial_states: of each row, (b, h, p, n).
        seq_idx: which sequence of its row a token belongs to, (b, l). Each starts from zeros, the first of a row from
            its initial state.
        cu_seqlens: boundaries of the sequences of one row, for their states.
        dt_softplus: step sizes are the softplus of dt + dt_bias.
        dt_limit: step sizes are clamped to it.
        return_final_states: also return the state after the last step of each row, (b, h, p, n).
        return_varlen_states: also return the state after each sequence of `cu_seqlens`.
        state_dtype: of the states returned.

    Returns:
        y, or y and the states that were asked for, those of rows first.
    """
    where = "mamba_chunk_scan_combined"
    dt = _step_sizes(dt, dt_bias, dt_softplus, dt_limit)
    y, final, bounds, finals = _chunk_scan(where, x, dt, A, B, C, D, initial_states, seq_idx)
    results = [y if z is None else rank_gate(y.unsqueeze(2), z.to(y.dtype))]
    if return_final_states:
        results.append(final)
    if return_varlen_states:
        if cu_seqlens is None or x.shape[0] != 1:
            raise ValueError(f"{where}: return_varlen_states needs cu_seqlens and a batch of one")
        if bounds is None or not torch.equal(bounds, cu_seqlens.to(bounds)):
            if initial_states is not None:
                raise NotImplementedError(f"mamba_ssm.{where}: cu_seqlens other than seq_idx with initial_states")
            bounded = cu_seqlens.to(x.device)
            _, finals = ssd(x, dt, A.to(dt.dtype), B.to(x.dtype), C.to(x.dtype), cu_seqlens=bounded)
        results.append(finals)
    if state_dtype is not None:
        results[1:] = [state.to(state_dtype) for state in results[1:]]
    return results[0] if len(results) == 1 else tuple(results)


def _step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool, limit: Any) -> Tensor:
    if softplus:
        zero = dt.new_zeros(dt.shape[-1], dtype=torch.float32) if bias is None else bias
        return step_sizes(dt, zero, dt_limit=tuple(limit))
    wide = dt.to(state_dtype(dt.dtype))
    return (wide if bias is None else wide + bias.to(wide.dtype)).clamp(*limit)


def _chunk_scan(
    where: str,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    initial: Tensor | None,
    seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """y, the state of each row, and where rows hold several sequences their boundaries and states."""
    dt = dt.to(state_dtype(x.dtype))
    a, b, c = a.to(dt.dtype), b.to(x.dtype), c.to(x.dtype)
    initial = None if initial is None else initial.to(dt.dtype)
    if seq_idx is None:
        y, final = ssd(x, dt, a, b, c, skip, initial_state=initial)
        return y, final, None, final
    rows, t = x.shape[:2]
    packing = Packing.of(where, seq_idx, rows, t)
    x, dt, b, c = (in_one_row(part) for part in (x, dt, b, c))
    starts = packing.states(initial)
    y, finals = ssd(x, dt, a, b, c, skip, initial_state=starts, cu_seqlens=packing.cu_seqlens)
    return y.squeeze(0).unflatten(0, (rows, t)), finals[packing.last], packing.cu_seqlens, finals


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: Any = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """A Mamba-2 block after its first projection: zxbcdt (b, l, ...) -> (b, l, channels or out).

    Args:
        zxbcdt: gates, convolved channels and step sizes; before them, where it is wider, gates and values of an MLP.
        conv1d_weight: (h p + 2 g n, w).
        conv1d_bias: (h p + 2 g n,), or none.
        dt_bias: (h,).
        A: (h,).
        D: (h,), with `headdim`, or (h, p).
        chunk_size: as for `mamba_chunk_scan_combined`, like the next four.
        initial_states: of each row.
        seq_idx: which sequence of its row a token belongs to.
        dt_limit: of the step sizes.
        return_final_states: also return the states.
        activation: of the convolution.
        rmsnorm_weight: of the gated norm, over groups; without one, the outputs are gated only.
        rmsnorm_eps: of that norm.
        outproj_weight: of the last projection, if there is to be one.
        outproj_bias: of that projection.
        headdim: p, where D has one entry a head.
        ngroups: g.
        norm_before_gate: the order of the two.
        state_dtype: of the states returned.
    """
    if D.ndim == 1 and headdim is None:
        raise ValueError("mamba_split_conv1d_scan_combined: headdim must be given where D has one entry a head")
    h, p = (D.shape[0], headdim) if D.ndim == 1 else D.shape
    assert p is not None
    width = h * p
    n = (conv1d_weight.shape[0] - width) // (2 * ngroups)
    mlp = (zxbcdt.shape[-1] - width - conv1d_weight.shape[0] - h) // 2
    z0, x0, z, xbc, dt = zxbcdt.split([mlp, mlp, width, conv1d_weight.shape[0], h], dim=-1)
    xbc = causal_conv1d_fn(xbc.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation)
    x, b, c = xbc.transpose(1, 2).split([width, ngroups * n, ngroups * n], dim=-1)
    y, final = mamba_chunk_scan_combined(
        x.unflatten(-1, (h, p)),
        dt,
        A,
        b.unflatten(-1, (ngroups, n)),
        c.unflatten(-1, (ngroups, n)),
        chunk_size,
        D,
        z.unflatten(-1, (h, p)) if rmsnorm_weight is None else None,
        dt_bias,
        initial_states,
        seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=True,
        state_dtype=state_dtype,
    )
    y = y.flatten(2)
    if rmsnorm_weight is not None:
        y = rmsnorm_fn(y, rmsnorm_weight, None, z, rmsnorm_eps, width // ngroups, norm_before_gate)
    if mlp:
        y = torch.cat([F.silu(z0) * x0, y], dim=-1)
    if outproj_weight is not None:
        y = F.linear(y, outproj_weight, outproj_bias)
    return (y, final) if return_final_states else y
