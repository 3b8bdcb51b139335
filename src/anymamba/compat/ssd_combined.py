"""The official scans of Mamba-2, with the official names, arguments and layouts, on `ssd`.

Letters: b batch, l time, d channels, h heads, p head width, g groups, n state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.compat.causal_conv1d import causal_conv1d_fn
from anymamba.compat.norms import rmsnorm_fn
from anymamba.compat.seq_idx import Packing, in_one_row
from anymamba.core.dtypes import state_dtype
from anymamba.ops.discretization import step_sizes
from anymamba.ops.norms_and_gates import rank_gate
from anymamba.scan import ssd


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
    """Compute the scan of Mamba-2: `anymamba.ssd` after bias, softplus and limits of the step sizes, then the gate.

    Args:
        x: Inputs, (b, l, h, p).
        dt: Step sizes, (b, l, h).
        A: Decay rates, (h,), never positive.
        B: Input projections, (b, l, g, n).
        C: Output projections, (b, l, g, n).
        chunk_size: Chunk length of the official kernels; ours choose their own, which does not change results.
        D: Skip weights, (h,) or (h, p).
        z: Gates, (b, l, h, p).
        dt_bias: Number added to the step sizes, (h,).
        initial_states: Initial state of each row, (b, h, p, n).
        seq_idx: Sequence that each token of a row belongs to, (b, l). The first of a row starts from its initial state,
            the others from zeros.
        cu_seqlens: Boundaries of the sequences of one row, for their states.
        dt_softplus: Whether step sizes are the softplus of dt + dt_bias.
        dt_limit: Limits of the step sizes.
        return_final_states: Whether to also return the state after the last step of each row, (b, h, p, n).
        return_varlen_states: Whether to also return the state after each sequence of `cu_seqlens`.
        state_dtype: Dtype of the returned states.

    Returns:
        y, or y and the requested states, those of rows first.
    """
    where = "mamba_chunk_scan_combined"
    dt = _activate_step_sizes(dt, dt_bias, dt_softplus, dt_limit)
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


def _activate_step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool, limit: Any) -> Tensor:
    if softplus:
        zero = dt.new_zeros(dt.shape[-1], dtype=torch.float32) if bias is None else bias
        return step_sizes(dt, zero, dt_limit=tuple(limit))
    acc_dtype = dt.to(state_dtype(dt.dtype))
    return (acc_dtype if bias is None else acc_dtype + bias.to(acc_dtype.dtype)).clamp(*limit)


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
    """Return y, the state of each row, and if rows hold several sequences their boundaries and states."""
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
    """Compute a Mamba-2 block after its first projection, zxbcdt (b, l, ...) -> (b, l, channels or out).

    Args:
        zxbcdt: Gates, convolved channels and step sizes; if it is wider, gates and values of an MLP before them.
        conv1d_weight: Weights of the convolution, (h p + 2 g n, w).
        conv1d_bias: Bias of the convolution, (h p + 2 g n,), or None.
        dt_bias: Number added to the step sizes, (h,).
        A: Decay rates, (h,), never positive.
        D: Skip weights, (h, p), or (h,) with `headdim`.
        chunk_size: Chunk length of the official kernels; it does not change results.
        initial_states: Initial state of each row, (b, h, p, n).
        seq_idx: Sequence that each token of a row belongs to, (b, l).
        dt_limit: Limits of the step sizes.
        return_final_states: Whether to also return the states.
        activation: Activation after the convolution.
        rmsnorm_weight: Weight of the gated norm over groups; None to gate without a norm.
        rmsnorm_eps: Number that the norm adds to the mean square.
        outproj_weight: Weight of the last projection, or None.
        outproj_bias: Bias of the last projection.
        headdim: Head width p, if D has one entry per head.
        ngroups: Number of groups g.
        norm_before_gate: Whether the norm comes before the gate.
        state_dtype: Dtype of the returned states.
    """
    if D.ndim == 1 and headdim is None:
        raise ValueError("mamba_split_conv1d_scan_combined: headdim must be given if D has one entry per head")
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
