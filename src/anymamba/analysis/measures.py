"""What a block does with a text, in numbers: how long it remembers, what it writes, what its state holds.

Letters: b batch, t time, r MIMO rank, h heads (channels of Mamba-1), p head width, n state, s rotated pairs of states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anymamba.analysis.recurrence import recurrence, state_of
from anymamba.blocks.base import Block


def half_lives(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> Float[Tensor, "b t h *n"]:
    """Return after how many tokens like this one half of a state is left: `ln 2 / -a`; infinite if nothing is lost.

    Args:
        block: Block of a family that `recurrence` knows.
        x: Input of the block.
        cache: Cache to continue from; an empty one if not given.

    Returns:
        (b, t, h); (b, t, i, n) for Mamba-1, whose channels have one decay per state.
    """
    return math.log(2) / -recurrence(block, x, cache).log_decay


def horizons(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> Float[Tensor, "b h *n"]:
    """Return the half-life of each head over a whole text: `ln 2 / mean(-a)`, since decays multiply.

    Same arguments as `half_lives`.
    """
    return math.log(2) / -recurrence(block, x, cache).log_decay.mean(1)


def step_sizes(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> Float[Tensor, "b t h"]:
    """Return Δ of every token and head: how much it writes, and how much the state decays.

    Same arguments as `half_lives`.
    """
    return recurrence(block, x, cache).dt


def rotation_angles(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> Float[Tensor, "b t h s"]:
    """Return the angles by which each token rotates the states of Mamba-3, in radians.

    Same arguments as `half_lives`.

    Returns:
        (b, t, h, s): one signed angle per pair of states; for quaternions the unsigned angle of each block of four.

    Raises:
        ValueError: The block does not rotate its states.
    """
    angles = recurrence(block, x, cache).rotation
    if angles is None:
        raise ValueError(f"rotation_angles: expected a block with rotated states, got a {type(block).__name__}")
    return angles


def step_caches(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> Iterator[Any]:
    """Yield the cache of the block after each token, by `step`. Same arguments as `half_lives`."""
    for x_bd in x.unbind(1):
        _, cache = block.step(x_bd, cache)
        yield cache


class StateMeasures(NamedTuple):
    """Size of a state over time, and of what is read from it.

    Attributes:
        norm: Frobenius norm of the state (p × n) of each head.
        rank: Number of directions the state uses: the participation ratio (Σ σ²)² / Σ σ⁴ of its singular values, from 1
            to the smaller of p and n, and 0 for an empty state. Heads of width 1 (the channels of Mamba-1) are taken
            together as one matrix (h × n), (b, t, 1).
        read: Norm of what is read from the state, over the width and ranks of a head.
        skip: Norm of what bypasses the state, D v.
    """

    norm: Float[Tensor, "b t h"]
    rank: Float[Tensor, "b t heads"]
    read: Float[Tensor, "b t h"]
    skip: Float[Tensor, "b t h"]


def state_measures(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> StateMeasures:
    """Return norm and effective rank of the state after each token, and how much the state and the skip contribute.

    Same arguments as `half_lives`.
    """
    terms = recurrence(block, x, cache)
    norms, ranks, reads = [], [], []
    for t, cache_after in enumerate(step_caches(block, x, cache)):
        state_bhpn = state_of(block, cache_after)
        norms.append(state_bhpn.flatten(2).norm(dim=-1))
        ranks.append(effective_rank(state_bhpn.transpose(1, 2) if state_bhpn.shape[2] == 1 else state_bhpn))
        reads.append(torch.einsum("bhpn,brhn->bhpr", state_bhpn, terms.q[:, t]).flatten(2).norm(dim=-1))
    skip_bth = terms.skip.movedim(3, 2).flatten(3).norm(dim=-1)
    return StateMeasures(torch.stack(norms, 1), torch.stack(ranks, 1), torch.stack(reads, 1), skip_bth)


def effective_rank(matrix: Float[Tensor, "*batch p n"]) -> Float[Tensor, "*batch"]:
    """Return the participation ratio (Σ σ²)² / Σ σ⁴ of the singular values; 0 for a matrix of zeros."""
    scale = matrix.abs().amax((-2, -1), keepdim=True)
    matrix = matrix / torch.where(scale > 0, scale, 1)
    gram = matrix @ matrix.mT if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT @ matrix
    total, squares = gram.diagonal(dim1=-2, dim2=-1).sum(-1).square(), gram.square().sum((-2, -1))
    return total / torch.where(squares > 0, squares, 1)
