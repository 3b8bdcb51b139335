"""The official `selective_state_update`: one token of Mamba-1 or Mamba-2, from a state that is changed in place.

Letters: b batch, h heads, p head width, g groups, n state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymamba.compat.selective_scan_interface import raw_steps
from anymamba.core.dtypes import state_dtype
from anymamba.ops.discretization import step_sizes
from anymamba.ops.norms_and_gates import rank_gate
from anymamba.scan import selective_step, ssd


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """Run one step: update `state` in place, and return the outputs.

    Args:
        state: State, (b, d, n) or (b, h, p, n).
        x: Inputs, (b, d) or (b, h, p).
        dt: Step sizes, in the shape of x.
        A: Decay rates, (d, n) or (h, p, n), never positive.
        B: Input projections, (b, n) or (b, g, n).
        C: Output projections, in the shape of B.
        D: Skip weights, (d,) or (h, p).
        z: Gates, in the shape of x.
        dt_bias: Number added to the step sizes, in the shape of D.
        dt_softplus: Whether step sizes are the softplus of that sum. Otherwise, they must not be negative.
        state_batch_indices: Row of `state` that each row continues from, (b,).

    A, dt and dt_bias with one number per head (expanded, with strides of zero) take Mamba-2's faster path.
    """
    has_heads = state.ndim == 4
    if not has_heads:
        state, x, dt, B, C = (part.unsqueeze(1) for part in (state, x, dt, B, C))
        A, z = A.unsqueeze(0), None if z is None else z.unsqueeze(1)
        D, dt_bias = (None if part is None else part.unsqueeze(0) for part in (D, dt_bias))
    rows = slice(None) if state_batch_indices is None else state_batch_indices.long()
    acc_dtype = state_dtype(x.dtype)
    before, dt, rates = state[rows].to(acc_dtype), dt.to(acc_dtype), A.to(acc_dtype)
    B, C, z = B.to(x.dtype), C.to(x.dtype), None if z is None else z.to(x.dtype)
    is_tied = A.stride()[1:] == (0, 0) and dt.stride(-1) == 0 and (dt_bias is None or dt_bias.stride(-1) == 0)
    run = _by_head if is_tied else _by_channel
    y, after = run(before, x, dt, rates, B, C, D, z, dt_bias, dt_softplus)
    with torch.no_grad():
        state[rows] = after.to(state.dtype)
    return y if has_heads else y.squeeze(1)


def _by_head(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    rates: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Run a step with one decay per head: a sequence of one token."""
    dt_b1h = dt[:, None, :, 0]
    offset = dt.new_zeros(dt.shape[1]) if bias is None else bias[:, 0]
    sizes = step_sizes(dt_b1h, offset) if softplus else dt_b1h + offset.to(dt.dtype)
    y, state = ssd(x.unsqueeze(1), sizes, rates[:, 0, 0], b.unsqueeze(1), c.unsqueeze(1), skip, initial_state=state)
    gated = y.squeeze(1) if z is None else rank_gate(y.unsqueeze(2), z.unsqueeze(1)).squeeze(1)
    return gated, state


def _by_channel(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    rates: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Run a step with one decay per state and channel; the heads of a group share B and C."""
    (h, p), groups = x.shape[1:], b.shape[1]
    if h % groups:
        raise ValueError(f"selective_state_update: {groups} groups must divide the {h} heads")
    raw = raw_steps("selective_state_update", dt, bias, softplus)
    ys, states = [], []
    for group in range(groups):
        heads = slice(group * h // groups, (group + 1) * h // groups)
        y, new = selective_step(
            x[:, heads].flatten(1),
            raw[:, heads].flatten(1),
            rates[heads].flatten(0, 1),
            b[:, group],
            c[:, group],
            None if skip is None else skip[heads].flatten(),
            None if z is None else z[:, heads].flatten(1),
            state[:, heads].flatten(1, 2),
        )
        ys.append(y.unflatten(1, (-1, p)))
        states.append(new.unflatten(1, (-1, p)))
    return (ys[0], states[0]) if groups == 1 else (torch.cat(ys, 1), torch.cat(states, 1))
