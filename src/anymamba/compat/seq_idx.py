"""Sequences that share a row: from the official `seq_idx` to boundaries of sequences packed into one row.

Letters: b batch, t time, z sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """The rows of a batch laid end to end, and cut where a row begins or its sequence changes.

    Attributes:
        cu_seqlens: the cuts, (z + 1,), from 0 to b t.
        first: the first sequence of each row, (b,).
        last: the last sequence of each row, (b,).
    """

    cu_seqlens: Tensor
    first: Tensor
    last: Tensor

    @staticmethod
    def of(where: str, seq_idx: Tensor, b: int, t: int) -> Packing:
        """Read `seq_idx` (b, t), a number for each token that changes where the next sequence begins.

        Raises:
            ValueError: another shape.
        """
        if seq_idx.shape != (b, t):
            raise ValueError(f"{where}: seq_idx must have shape (b={b}, t={t}), got {tuple(seq_idx.shape)}")
        begins = torch.ones(b, t, dtype=torch.bool, device=seq_idx.device)
        begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        cuts = begins.flatten().nonzero().squeeze(1)
        ends = torch.arange(1, b + 1, device=seq_idx.device) * t
        upto = torch.searchsorted(cuts, ends)  # sequences that begin before the end of each row
        first = torch.cat([upto.new_zeros(1), upto[:-1]])
        return Packing(torch.cat([cuts, ends[-1:]]), first, upto - 1)

    def states(self, initial: Tensor | None) -> Tensor | None:
        """(b, ...) -> (z, ...): a row's state starts its first sequence; the others start from zeros."""
        if initial is None:
            return None
        fresh = initial.new_zeros((self.cu_seqlens.shape[0] - 1, *initial.shape[1:]))
        return fresh.index_copy(0, self.first, initial)


def in_one_row(x: Tensor) -> Tensor:
    """(b, t, ...) -> (1, b t, ...)."""
    return x.flatten(0, 1).unsqueeze(0)
