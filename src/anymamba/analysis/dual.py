"""The dual view of a block: the matrix that its scan applies to its values.

Unrolled, the recurrence of `anymamba.analysis.recurrence` is a weighted sum of all values so far,

    y_t[r] = Σ_{s ≤ t} Σ_m M[(t, r), (s, m)] v_s[m] + exp(a_1 + ... + a_t) S_0 q_t[r]

    M[(t, r), (t, m)] = γ_t q_t[r] · k_t[m]
    M[(t, r), (s, m)] = exp(a_{s+1} + ... + a_t) (γ_s + κ_{s+1}) q_t[r] · k_s[m]     for s < t, and 0 for s > t

which is attention without a softmax. With one rank M is (t, t). With several, rows and columns are pairs of a token and
a rank, the rank running fastest. For Mamba-1, where every state n of a channel decays at its own rate, the matrix of a
channel is the sum of such matrices over n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anymamba.analysis.recurrence import Recurrence, recurrence
from anymamba.blocks.base import Block
from anymamba.core.layout import shift_earlier
from anymamba.scan.chunking import causal_decay, cumulative_decay, decay_factor


def dual_matrix(
    block: Any, x: Float[Tensor, "b t d"], cache: Any = None, *, heads: Sequence[int] | None = None
) -> Float[Tensor, "b h rows rows"]:
    """Return the matrix M of every head.

    `M @ values + initial_state_term` is the output of the scan before skip, gate and norm. Memory grows with the square
    of t for every head; a Mamba-1 block has one head per channel.

    Args:
        block: Block of a family that `recurrence` knows.
        x: Input of the block.
        cache: Cache to continue from; an empty one if not given.
        heads: Heads (channels of Mamba-1) to compute; all if not given.

    Returns:
        (b, h, t, t), or (b, h, t·r, t·r) with r ranks, in float32 or wider. It is differentiable.

    Raises:
        TypeError: The argument is not a block.
        ValueError: The family is unknown, the shapes do not match, or a head does not exist.
    """
    return matrix_of(recurrence(block, x, cache), heads)


def values(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> Float[Tensor, "b h rows p"]:
    """Return what `dual_matrix` is applied to, (b, h, t·r, p); same arguments as `dual_matrix`."""
    return flatten_ranks(recurrence(block, x, cache).v)


def initial_state_term(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> Float[Tensor, "b h rows p"]:
    """Return what the state before the first token adds to each output, `exp(a_1 + ... + a_t) S_0 q_t`, (b, h, t·r, p).

    It is zero for an empty cache without learnable initial states. Same arguments as `dual_matrix`.
    """
    terms = recurrence(block, x, cache)
    factor = decay_factor(cumulative_decay(terms.log_decay, 1), terms.v.dtype)
    if factor.ndim == 3:
        factor = factor.unsqueeze(-1)
    return flatten_ranks(torch.einsum("btrhn,bhpn->btrhp", terms.q * factor.unsqueeze(2), terms.initial_state))


def flatten_ranks(x_btrhp: Float[Tensor, "b t r h p"]) -> Float[Tensor, "b h rows p"]:
    """Return one row for each pair of a token and a rank, the rank running fastest."""
    return x_btrhp.permute(0, 3, 1, 2, 4).flatten(2, 3)


def unflatten_ranks(x_bhip: Float[Tensor, "b h rows p"], ranks: int) -> Float[Tensor, "b t r h p"]:
    """Invert `flatten_ranks`."""
    return x_bhip.unflatten(2, (-1, ranks)).permute(0, 2, 3, 1, 4)


def matrix_of(terms: Recurrence, heads: Sequence[int] | None = None) -> Float[Tensor, "b h rows rows"]:
    """Return `dual_matrix` for the terms of a recurrence."""
    chosen = list(range(terms.v.shape[3])) if heads is None else list(heads)
    if invalid := [head for head in chosen if not 0 <= head < terms.v.shape[3]]:
        raise ValueError(f"dual_matrix: heads must be from 0 to {terms.v.shape[3] - 1}, got {invalid[0]}")
    ranks, acc_dtype = terms.v.shape[2], terms.v.dtype
    k_bhin, q_bhin = flatten_ranks(terms.k[:, :, :, chosen]), flatten_ranks(terms.q[:, :, :, chosen])
    total_decay = cumulative_decay(terms.log_decay[:, :, chosen], 1)
    if total_decay.ndim == 3:
        matrix_bhij = q_bhin @ k_bhin.mT * _repeat_for_ranks(causal_decay(total_decay.mT, acc_dtype), ranks)
    else:  # one decay per state: one state at a time, because all at once would take n times the memory
        matrix_bhij = q_bhin.new_zeros((*q_bhin.shape[:3], q_bhin.shape[2]))
        for n, (q_bhi, k_bhi) in enumerate(zip(q_bhin.unbind(-1), k_bhin.unbind(-1), strict=True)):
            decay_bhij = causal_decay(total_decay[..., n].mT, acc_dtype)
            matrix_bhij = matrix_bhij + decay_bhij * q_bhi.unsqueeze(3) * k_bhi.unsqueeze(2)
    gamma_bth, ahead_bth = terms.gamma[:, :, chosen], shift_earlier(terms.kappa[:, :, chosen], None)
    is_same_token = torch.eye(gamma_bth.shape[1], dtype=torch.bool, device=gamma_bth.device)
    weight_bhts = torch.where(is_same_token, gamma_bth.mT.unsqueeze(2), (gamma_bth + ahead_bth).mT.unsqueeze(2))
    return matrix_bhij * _repeat_for_ranks(weight_bhts, ranks)


def _repeat_for_ranks(by_token: Tensor, ranks: int) -> Tensor:
    """(..., t, s) -> (..., t·r, s·r): the same number for every pair of ranks."""
    return by_token if ranks == 1 else by_token.repeat_interleave(ranks, -1).repeat_interleave(ranks, -2)
