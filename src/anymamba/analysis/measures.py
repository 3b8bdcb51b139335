"""What a block does with a text, in numbers: how long it remembers, what it writes, what its state holds.

Letters: b batch, t time, r MIMO rank, h heads (channels of Mamba-1), p head width, n state, s pairs that turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anymamba.analysis.recurrence import recurrence
from anymamba.blocks.base import Block
from anymamba.blocks.mamba1 import Mamba1


def half_lives(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> Float[Tensor, "b t h *n"]:
    """After how many tokens like this one half of a state is left: `ln 2 / -a`; infinite if nothing is lost.

    Args:
        block: a `Mamba1`, `Mamba2` or `Mamba3`.
        x: the block's input.
        cache: what the rows continue from; a fresh start if not given.

    Returns:
        (b, t, h); (b, t, i, n) for Mamba-1, whose channels have a decay for each state.
    """
    return math.log(2) / -recurrence(block, x, cache).log_decay


def horizons(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> Float[Tensor, "b h *n"]:
    """The half-life of each head over a whole text: `ln 2 / mean(-a)`, since decays multiply.

    Arguments as for `half_lives`.
    """
    return math.log(2) / -recurrence(block, x, cache).log_decay.mean(1)


def step_sizes(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> Float[Tensor, "b t h"]:
    """Δ of every token and head: how much it writes, and how much the state decays. Arguments as for `half_lives`."""
    return recurrence(block, x, cache).dt


def turns(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> Float[Tensor, "b t h s"]:
    """By how much each token turns the states of Mamba-3, in radians; arguments as for `half_lives`.

    Returns:
        (b, t, h, s): for each pair of states that turns in its plane; for quaternions the size of the turn of each
        block of four.

    Raises:
        ValueError: the states of this block do not turn.
    """
    found = recurrence(block, x, cache).turn
    if found is None:
        raise ValueError(f"turns: only the states of Mamba3 turn, got a {type(block).__name__}")
    return found


def caches(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> Iterator[Any]:
    """The caches after each token, by `step`: what the block itself keeps. Arguments as for `half_lives`."""
    for x_bd in x.unbind(1):
        _, cache = block.step(x_bd, cache)
        yield cache


class StateMeasures(NamedTuple):
    """A state over time, and what is read from it.

    Attributes:
        norm: of each head's state (p × n), the root of the sum of its squares.
        rank: how many directions it uses, the participation ratio (Σ σ²)² / Σ σ⁴ of its singular values: from 1 to the
            smaller of p and n, and 0 for an empty state. A channel of Mamba-1 is a single direction, so the rank is
            taken over all channels together (i × n), (b, t, 1).
        read: what is read from the state, the norm of y over a head's width and ranks.
        skip: what bypasses the state, the norm of D v.
    """

    norm: Float[Tensor, "b t h"]
    rank: Float[Tensor, "b t heads"]
    read: Float[Tensor, "b t h"]
    skip: Float[Tensor, "b t h"]


def state_measures(block: Block, x: Float[Tensor, "b t d"], cache: Any = None) -> StateMeasures:
    """Norm and effective rank of the state after each token, and how much of the output it and the skip give.

    Arguments as for `half_lives`.
    """
    terms = recurrence(block, x, cache)
    found: list[tuple[Tensor, ...]] = []
    for t, after in enumerate(caches(block, x, cache)):
        state_bhpn = after.ssm.unsqueeze(2) if isinstance(block, Mamba1) else after.ssm
        rank_bh = effective_rank(after.ssm).unsqueeze(1) if isinstance(block, Mamba1) else effective_rank(after.ssm)
        read_bhpr = torch.einsum("bhpn,brhn->bhpr", state_bhpn, terms.q[:, t])
        found.append((state_bhpn.flatten(2).norm(dim=-1), rank_bh, read_bhpr.flatten(2).norm(dim=-1)))
    skip_bth = terms.skip.movedim(3, 2).flatten(3).norm(dim=-1)
    norm_bth, rank_bth, read_bth = (torch.stack(parts, 1) for parts in zip(*found, strict=True))
    return StateMeasures(norm_bth, rank_bth, read_bth, skip_bth)


def effective_rank(matrix: Float[Tensor, "*batch p n"]) -> Float[Tensor, "*batch"]:
    """The participation ratio (Σ σ²)² / Σ σ⁴ of the singular values; 0 for a matrix of zeros."""
    scale = matrix.abs().amax((-2, -1), keepdim=True)
    matrix = matrix / torch.where(scale > 0, scale, 1)
    gram = matrix @ matrix.mT if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT @ matrix
    total, squares = gram.diagonal(dim1=-2, dim2=-1).sum(-1).square(), gram.square().sum((-2, -1))
    return total / torch.where(squares > 0, squares, 1)
