"""The scan in five stages, in the order of the five kernels of the reference implementation, backward by autograd.

| stage | function | result |
|---|---|---|
| K1 | `chunk_cumsum` | running log-decay in each chunk, and its total |
| K2 | `chunk_scores` | q kᵀ in each chunk, once per group |
| K3 | `chunk_states` | what each chunk alone adds to the state at its end |
| K4 | `pass_states` | the states that enter the chunks, by a loop over chunks |
| K5 | `chunk_outputs` | the outputs, from the scores and the entering states |

Letters: b batch, c chunks, l steps of a chunk, i, j = (l r) steps and MIMO ranks fused, g groups, e heads of a group,
m = (e p) the heads of a group and their width fused, h = (g e), p head width, n state.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.scan.chunking import ChunkLayout, causal_decay, cumulative_decay, decay_factor, resolve_chunk_len
from anymamba.scan.recurrent import ScanInputs


def fuse_ranks(x: Float[Tensor, "... l l"], rank: int) -> Float[Tensor, "... i i"]:
    """Repeat every row and column `rank` times, so that the ranks of a step share its decay."""
    if rank == 1:
        return x
    *batch, length, _ = x.shape
    repeated = x[..., :, None, :, None].expand(*batch, length, rank, length, rank)
    return repeated.reshape(*batch, length * rank, length * rank)


def chunk_cumsum(a_bclh: Float[Tensor, "b c l h"]) -> tuple[Float[Tensor, "b c h l"], Float[Tensor, "b c h"]]:
    """Compute K1: `Lam_l = a_0 + ... + a_l` in each chunk, and `Lam` at the chunk's end."""
    lam_bchl = cumulative_decay(a_bclh.transpose(2, 3), -1)
    return lam_bchl, lam_bchl[..., -1]


def chunk_scores(
    q_bcgin: Float[Tensor, "b c g i n"], k_bcgin: Float[Tensor, "b c g i n"]
) -> Float[Tensor, "b c g i i"]:
    """Compute K2: `<q_i, k_j>`. Heads of a group share it."""
    return q_bcgin @ k_bcgin.transpose(-1, -2)


def chunk_states(
    v_bcihp: Float[Tensor, "b c i h p"],
    k_bcgin: Float[Tensor, "b c g i n"],
    lam_bchl: Float[Tensor, "b c h l"],
    total_bch: Float[Tensor, "b c h"],
) -> Float[Tensor, "b c h p n"]:
    """Compute K3: `S[p, n] = Σ_i exp(Lam_end - Lam_i) v_i[p] k_i[n]`."""
    b, c, i, h, p = v_bcihp.shape
    g, n = k_bcgin.shape[2], k_bcgin.shape[4]
    to_end_bclh = decay_factor(total_bch.unsqueeze(-1) - lam_bchl, v_bcihp.dtype).transpose(2, 3)
    decayed_bcihp = v_bcihp * to_end_bclh.repeat_interleave(i // lam_bchl.shape[3], dim=2).unsqueeze(-1)
    decayed_bcgmi = decayed_bcihp.reshape(b, c, i, g, h // g * p).permute(0, 1, 3, 4, 2)
    return (decayed_bcgmi @ k_bcgin).reshape(b, c, h, p, n)


def pass_states(
    added_bchpn: Float[Tensor, "b c h p n"],
    total_bch: Float[Tensor, "b c h"],
    initial_state: Float[Tensor, "z h p n"],
    layout: ChunkLayout,
) -> tuple[Float[Tensor, "b c h p n"], Float[Tensor, "z h p n"]]:
    """Compute K4: `H_{c+1} = exp(Lam_end) H_c + S_c`, chunk after chunk; return entering and final states."""
    kept_bch = decay_factor(total_bch, added_bchpn.dtype)
    entering, finals = [], []
    for (first, last), state_bhpn in zip(layout.sequences, layout.initial_states(initial_state), strict=True):
        for c in range(first, last):
            entering.append(state_bhpn)
            state_bhpn = kept_bch[:, c, :, None, None] * state_bhpn + added_bchpn[:, c]
        finals.append(state_bhpn)
    return torch.stack(entering, dim=1), torch.cat(finals)


def chunk_outputs(
    v_bcihp: Float[Tensor, "b c i h p"],
    q_bcgin: Float[Tensor, "b c g i n"],
    scores_bcgii: Float[Tensor, "b c g i i"],
    lam_bchl: Float[Tensor, "b c h l"],
    entering_bchpn: Float[Tensor, "b c h p n"],
) -> Float[Tensor, "b c i h p"]:
    """Compute K5: `y_i = exp(Lam_i) H_c q_i + Σ_{j ≤ i} <q_i, k_j> exp(Lam_i - Lam_j) v_j`."""
    b, c, i, h, p = v_bcihp.shape
    g, n = q_bcgin.shape[2], q_bcgin.shape[4]
    rank, dtype = i // lam_bchl.shape[3], v_bcihp.dtype
    read_bcgim = q_bcgin @ entering_bchpn.reshape(b, c, g, h // g * p, n).transpose(-1, -2)
    from_start_bcih = decay_factor(lam_bchl, dtype).transpose(2, 3).repeat_interleave(rank, dim=2)
    y_off_bcihp = read_bcgim.transpose(2, 3).reshape(b, c, i, h, p) * from_start_bcih.unsqueeze(-1)
    mask_bchii = fuse_ranks(causal_decay(lam_bchl, dtype), rank)
    weights_bcgeii = scores_bcgii.unsqueeze(3) * mask_bchii.unflatten(2, (g, h // g))
    y_diag_bchip = weights_bcgeii.flatten(2, 3) @ v_bcihp.transpose(2, 3)
    return y_off_bcihp + y_diag_bchip.transpose(2, 3)


def scan_serial(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Compute the scan by K1 to K5, from `ScanInputs`."""
    v, k, q, log_decay, initial_state, cu_seqlens, chunk_len, _ = ScanInputs(*inputs)
    dtype, rank = state_dtype(v.dtype), v.shape[2]
    layout = ChunkLayout(v.shape[1], resolve_chunk_len(v, k, chunk_len), cu_seqlens)
    v_bcihp = layout.split(v.to(dtype)).flatten(2, 3)
    k_bcgin = layout.split(k.to(dtype)).flatten(2, 3).transpose(2, 3)
    q_bcgin = layout.split(q.to(dtype)).flatten(2, 3).transpose(2, 3)
    lam_bchl, total_bch = chunk_cumsum(layout.split(log_decay.to(dtype)))
    scores_bcgii = chunk_scores(q_bcgin, k_bcgin)
    added_bchpn = chunk_states(v_bcihp, k_bcgin, lam_bchl, total_bch)
    entering_bchpn, final_state = pass_states(added_bchpn, total_bch, initial_state.to(dtype), layout)
    y_bcihp = chunk_outputs(v_bcihp, q_bcgin, scores_bcgii, lam_bchl, entering_bchpn)
    return layout.join(y_bcihp.unflatten(2, (layout.chunk_len, rank))).to(v.dtype), final_state
