"""Mamba-3's recurrence as one operator of the compiled kernels: biases, rotation, trapezoidal weights, scan and skip.

It computes what `rotation.py` and the single pathway of `mamba3.py` describe, in the chunks of the scan: keys and
queries are expanded to heads, biased and turned where they are needed, and never lie in memory. Of a token's two
weights the scan takes `gamma_t + kappa_{t+1}` from the next step on and `gamma_t` in its own step. The backward keeps
the inputs only.

Letters: b batch, t time, r MIMO rank, g groups, h heads, p head width, n state, s pairs, z sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymamba.kernels.cpu.turned_scan import turned_scan_backward, turned_scan_forward
from anymamba.operators import define_operator


def _fake(x: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    initial_state, start = arguments[10:12]
    (b, t, h, p), r, n = x.shape, k.shape[2], k.shape[4]
    return (
        x.new_empty((b, t, r, h, p)),
        torch.empty(initial_state.shape, dtype=initial_state.dtype, device=x.device),
        x.new_empty((initial_state.shape[0], r, h, n)),
        torch.empty(start.shape, dtype=start.dtype, device=x.device),
    )


# x (b, t, h, p), k and q (b, t, r, g, n) normed, biases (h, r, n), rate (b, t, s), dt, log_decay, gamma and kappa
# (b, t, h), skip (h,), value_weight (h, r, p) or none, initial_state (z, h, p, n) with the last token's pending weight
# added, start (z, h, s); lengths (b,) say which key is a row's last. Returns y (b, t, r, h, p), the final state
# (z, h, p, n), the last keys (z, r, h, n), zero for a row without tokens, and the last angles (z, h, s).
turned_scan = define_operator(
    "turned_scan_fused",
    inputs="Tensor x, Tensor k, Tensor q, Tensor k_bias, Tensor q_bias, Tensor rate, Tensor dt, Tensor log_decay, "
    "Tensor gamma, Tensor kappa, Tensor skip, Tensor? value_weight, Tensor initial_state, Tensor start, "
    "bool interleaved, SymInt chunk_len, Tensor? lengths, Tensor? cu_seqlens",
    outputs=4,
    differentiable=14,
    forward=turned_scan_forward,
    backward=turned_scan_backward,
    fake=_fake,
)
