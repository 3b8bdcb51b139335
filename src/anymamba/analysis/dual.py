"""The other view of a block: the matrix that its scan applies to its values.

Unrolled, the recurrence of `anymamba.analysis.recurrence` is a weighted sum of all values so far,

    y_t[r] = Σ_{s ≤ t} Σ_m M[(t, r), (s, m)] v_s[m] + carried_t[r]

    M[(t, r), (t, m)] = γ_t q_t[r] · k_t[m]
    M[(t, r), (s, m)] = exp(a_{s+1} + ... + a_t) (γ_s + κ_{s+1}) q_t[r] · k_s[m]     for s < t, and 0 for s > t

which is attention without a softmax. With one rank M is (t, t). With several, rows and columns are pairs of a token and
a rank, the rank running fastest. For Mamba-1, where every state n of a channel decays at its own rate, a channel's
matrix is the sum over n of such matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anymamba.analysis.recurrence import Recurrence, recurrence
from anymamba.blocks.base import Block
from anymamba.core.layout import next_in_sequence
from anymamba.scan.chunking import causal_decay, cumulative_decay, decay_factor


def dual_matrix(
    block: Block, x: Float[Tensor, "b t d"], cache: Any = None, *, heads: Sequence[int] | None = None
) -> Float[Tensor, "b h rows rows"]:
    """The matrix M of every head, for which `M @ values + carried` is the scan's output before skip, gate and norm.

    Memory grows with the square of t for every head; a Mamba-1 block has as many heads as channels.

    Args:
        block: a `Mamba1`, `Mamba2` or `Mamba3`.
        x: the block's input.
        cache: what the rows continue from; a fresh start if not given.
        heads: which heads (channels of Mamba-1) to compute; all if not given.

    Returns:
        (b, h, t, t), or (b, h, t·r, t·r) with r ranks, in float32 or wider. It is differentiable.

    Raises:
        TypeError: a block of another family.
        ValueError: shapes that do not fit, or heads that do not exist.
    """
    return matrix_of(recurrence(block, x, cache), heads)


def values(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> Float[Tensor, "b h rows p"]:
    """What `dual_matrix` is applied to, (b, h, t·r, p); arguments as for `dual_matrix`."""
    return by_rows(recurrence(block, x, cache).v)


def carried(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> Float[Tensor, "b h rows p"]:
    """What the state before the first token adds to each output, `exp(a_1 + ... + a_t) S_0 q_t`, (b, h, t·r, p).

    Zero for a fresh start without learnable initial states. Arguments as for `dual_matrix`.
    """
    terms = recurrence(block, x, cache)
    factor = decay_factor(cumulative_decay(terms.log_decay, 1), terms.v.dtype)
    if factor.ndim == 3:
        factor = factor.unsqueeze(-1)
    return by_rows(torch.einsum("btrhn,bhpn->btrhp", terms.q * factor.unsqueeze(2), terms.start))


def by_rows(x_btrhp: Float[Tensor, "b t r h p"]) -> Float[Tensor, "b h rows p"]:
    """One row for each pair of a token and a rank, the rank running fastest."""
    return x_btrhp.permute(0, 3, 1, 2, 4).flatten(2, 3)


def from_rows(x_bhip: Float[Tensor, "b h rows p"], ranks: int) -> Float[Tensor, "b t r h p"]:
    """The inverse of `by_rows`."""
    return x_bhip.unflatten(2, (-1, ranks)).permute(0, 2, 3, 1, 4)


def matrix_of(terms: Recurrence, heads: Sequence[int] | None = None) -> Float[Tensor, "b h rows rows"]:
    """`dual_matrix` of a recurrence."""
    chosen = list(range(terms.v.shape[3])) if heads is None else list(heads)
    if strange := [head for head in chosen if not 0 <= head < terms.v.shape[3]]:
        raise ValueError(f"dual_matrix: heads must be from 0 to {terms.v.shape[3] - 1}, got {strange[0]}")
    ranks, wide = terms.v.shape[2], terms.v.dtype
    k_bhin, q_bhin = by_rows(terms.k[:, :, :, chosen]), by_rows(terms.q[:, :, :, chosen])
    lam = cumulative_decay(terms.log_decay[:, :, chosen], 1)
    if lam.ndim == 3:
        matrix_bhij = q_bhin @ k_bhin.mT * _spread(causal_decay(lam.mT, wide), ranks)
    else:  # a decay for each state: one state at a time, since all at once would take n times the memory
        matrix_bhij = q_bhin.new_zeros((*q_bhin.shape[:3], q_bhin.shape[2]))
        for n, (q_bhi, k_bhi) in enumerate(zip(q_bhin.unbind(-1), k_bhin.unbind(-1), strict=True)):
            matrix_bhij = matrix_bhij + causal_decay(lam[..., n].mT, wide) * q_bhi.unsqueeze(3) * k_bhi.unsqueeze(2)
    gamma_bth, ahead_bth = terms.gamma[:, :, chosen], next_in_sequence(terms.kappa[:, :, chosen], None)
    weight_bhts = (gamma_bth + ahead_bth).mT.unsqueeze(2) - torch.diag_embed(ahead_bth.mT)
    return matrix_bhij * _spread(weight_bhts, ranks)


def _spread(by_token: Tensor, ranks: int) -> Tensor:
    """(..., t, s) -> (..., t·r, s·r): the same for every pair of ranks."""
    return by_token if ranks == 1 else by_token.repeat_interleave(ranks, -1).repeat_interleave(ranks, -2)
