"""The official short form of Mamba-2's scan, on `scan`.

Letters: b batch, l time, h heads, p head width, g groups, n state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.scan import scan


def segsum(x: Tensor) -> Tensor:
    """Return the sums over segments, (..., l) -> (..., l, l): entry i, j is `x[j + 1] + ... + x[i]`, -inf for j > i."""
    summed = x.unsqueeze(-1).expand(*x.shape, x.shape[-1]).tril(-1).cumsum(-2)
    is_later = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device).triu(1)
    return summed.masked_fill(is_later, float("-inf"))


def ssd_minimal_discrete(
    X: Tensor, A: Tensor, B: Tensor, C: Tensor, block_len: int, initial_states: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `S_t = exp(A_t) S_{t-1} + X_t ⊗ B_t`, `Y_t = S_t C_t`.

    Args:
        X: Values, that is inputs times step sizes, (b, l, h, p).
        A: Log-decays, that is decay rates times step sizes, (b, l, h), never positive.
        B: Keys, (b, l, h, n) or (b, l, g, n).
        C: Queries, in the shape of B.
        block_len: Chunk length; it does not change results, and need not divide the length.
        initial_states: State before the first step, (b, 1, h, p, n), or None.

    Returns:
        Y, and the state after the last step, (b, h, p, n), both in the dtype of X.
    """
    acc_dtype = state_dtype(X.dtype)
    initial = None if initial_states is None else initial_states.squeeze(1).to(acc_dtype)
    y, final = scan(
        X.unsqueeze(2),
        B.to(X.dtype).unsqueeze(2),
        C.to(X.dtype).unsqueeze(2),
        A.to(acc_dtype),
        initial_state=initial,
    )
    return y.squeeze(2), final.to(X.dtype)
