"""The scan as segment-sum masks and batched matmuls (Dao & Gu 2024, "minimal SSD"), backward by autograd.

All chunks are computed at once, each head with its own mask. The states at the chunk edges come from one matmul with
the decays between chunks, so the cost of that part is quadratic in the number of chunks.

Letters: b batch, c chunks, l, m steps of a chunk, r, j MIMO ranks, g groups, e heads of a group, p head width, n state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.scan.chunking import ChunkLayout, causal_decay, cumulative_decay, decay_factor, resolve_chunk_len
from anymamba.scan.recurrent import ScanInputs


def scan_minimal(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Compute the scan by segment sums, from `ScanInputs`."""
    v, k, q, log_decay, initial_state, cu_seqlens, chunk_len, _ = ScanInputs(*inputs)
    dtype, g, e = state_dtype(v.dtype), k.shape[3], v.shape[3] // k.shape[3]
    layout = ChunkLayout(v.shape[1], resolve_chunk_len(v, k, chunk_len), cu_seqlens)
    v_bclrgep = layout.split(v.to(dtype)).unflatten(4, (g, e))
    k_bclrgn, q_bclrgn = layout.split(k.to(dtype)), layout.split(q.to(dtype))
    a_bcgel = layout.split(log_decay.to(dtype)).movedim(2, 3).unflatten(2, (g, e))
    lam_bcgel = cumulative_decay(a_bcgel, -1)
    total_bcge = lam_bcgel[..., -1]

    # 1) Outputs within a chunk: y = (mask ∘ q kᵀ) v.
    scores_bcglrmj = torch.einsum("bclrgn,bcmjgn->bcglrmj", q_bclrgn, k_bclrgn)
    mask_bcgelm = causal_decay(lam_bcgel, dtype)
    weights_bcgelrmj = scores_bcglrmj.unsqueeze(3) * mask_bcgelm[..., :, None, :, None]
    y_bclrgep = torch.einsum("bcgelrmj,bcmjgep->bclrgep", weights_bcgelrmj, v_bclrgep)

    # 2) The state that each chunk alone adds at its end.
    to_end_bcgel = decay_factor(total_bcge.unsqueeze(-1) - lam_bcgel, dtype)
    added_bcgepn = torch.einsum("bclrgep,bcgel,bclrgn->bcgepn", v_bclrgep, to_end_bcgel, k_bclrgn)

    # 3) The states that enter the chunks, and the final one, by one matmul per sequence.
    entering, finals = [], []
    initial = layout.initial_states(initial_state.to(dtype).unflatten(1, (g, e)))
    for (first, last), state_bgepn in zip(layout.sequences, initial, strict=True):
        sources_bcgepn = torch.cat([state_bgepn.unsqueeze(1), added_bcgepn[:, first:last]], dim=1)
        ends_bgec = F.pad(total_bcge[:, first:last].movedim(1, -1), (1, 0))
        passed_bgecs = causal_decay(cumulative_decay(ends_bgec, -1), dtype)
        states_bcgepn = torch.einsum("bgecs,bsgepn->bcgepn", passed_bgecs, sources_bcgepn)
        entering.append(states_bcgepn[:, :-1])
        finals.append(states_bcgepn[:, -1])

    # 4) What the entering state adds to each output of the chunk.
    from_start_bcgel = decay_factor(lam_bcgel, dtype)
    read_bclrgep = torch.einsum("bclrgn,bcgepn->bclrgep", q_bclrgn, torch.cat(entering, dim=1))
    y_bclrgep = y_bclrgep + read_bclrgep * from_start_bcgel.movedim(-1, 2)[:, :, :, None, :, :, None]

    y = layout.join(y_bclrgep).flatten(3, 4)
    return y.to(v.dtype), torch.cat(finals).flatten(1, 2)
