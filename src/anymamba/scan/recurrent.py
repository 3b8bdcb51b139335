"""The scan as its definition: one step, and the loop of steps.

This is the oracle that every other algorithm is compared with, and the decode step of the blocks.

    S_t = exp(a_t) S_{t-1} + Σ_r v_t[r] ⊗ k_t[r]        y_t[r] = S_t q_t[r]

Letters: b batch, t time, r MIMO rank, h heads, p head width, g groups, n state,
m the heads of a group and their width fused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anymamba.core.dtypes import state_dtype, without_autocast
from anymamba.core.layout import sequence_spans


class ScanInputs(NamedTuple):
    """Inputs of every algorithm of the scan, in the order of its operator (contract: `anymamba.scan.scan`)."""

    v: Tensor  # (b, t, r, h, p)
    k: Tensor  # (b, t, r, g, n)
    q: Tensor  # (b, t, r, g, n)
    log_decay: Tensor  # (b, t, h)
    initial_state: Tensor  # (z, h, p, n)
    cu_seqlens: Tensor | None
    chunk_len: int | None
    algorithm: str


def scan_step(
    v: Float[Tensor, "b r h p"],
    k: Float[Tensor, "b r g n"],
    q: Float[Tensor, "b r g n"],
    log_decay: Float[Tensor, "b h"],
    state: Float[Tensor, "b h p n"],
) -> tuple[Float[Tensor, "b r h p"], Float[Tensor, "b h p n"]]:
    """Advance the state by one token.

    Args:
        v: Values.
        k: Keys; head h uses group h // (h / g).
        q: Queries.
        log_decay: Log-decays, never positive.
        state: Float32 or wider; it is not changed.

    Returns:
        y in the dtype of `v`, and the new state.
    """
    with without_autocast(v.device):
        return _step(v, k, q, log_decay, state)


def _step(v: Tensor, k: Tensor, q: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    b, r, h, p = v.shape
    g, n = k.shape[2:]
    m = h // g * p
    dtype = state.dtype
    v_bgmr = v.to(dtype).reshape(b, r, g, m).permute(0, 2, 3, 1)
    k_bgrn, q_bgrn = k.to(dtype).transpose(1, 2), q.to(dtype).transpose(1, 2)
    kept_bhpn = state * log_decay.to(dtype).exp()[:, :, None, None]
    if r == 1:
        state_bgmn = torch.addcmul(kept_bhpn.reshape(b, g, m, n), v_bgmr, k_bgrn)
    else:
        state_bgmn = kept_bhpn.reshape(b, g, m, n) + v_bgmr @ k_bgrn
    y_bgmr = state_bgmn @ q_bgrn.transpose(2, 3)
    y = y_bgmr.permute(0, 3, 1, 2).reshape(b, r, h, p)
    return y.to(v.dtype), state_bgmn.reshape(b, h, p, n)


def scan_recurrent(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Compute the scan by its definition, from `ScanInputs`; there are no chunks."""
    v, k, q, log_decay, initial_state, cu_seqlens, _, _ = ScanInputs(*inputs)
    states, ys, finals = initial_state.to(state_dtype(v.dtype)), [], []
    for rows, start, stop in sequence_spans(v.shape[1], cu_seqlens):
        state = states[rows]
        for t in range(start, stop):
            y_brhp, state = _step(v[:, t], k[:, t], q[:, t], log_decay[:, t], state)
            ys.append(y_brhp)
        finals.append(state)
    return torch.stack(ys, dim=1), torch.cat(finals)
