"""Sequences that share a row: from the official `seq_idx` to the boundaries of sequences packed into one row.

Letters: b batch, t time, z sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.core.layout import cu_seqlens_from_seq_idx


class Packing(NamedTuple):
    """Rows of a batch joined end to end, and cut where a row begins or its sequence changes.

    Attributes:
        cu_seqlens: Boundaries of the sequences, (z + 1,), from 0 to b t.
        first: First sequence of each row, (b,).
        last: Last sequence of each row, (b,).
    """

    cu_seqlens: Tensor
    first: Tensor
    last: Tensor

    @staticmethod
    def of(where: str, seq_idx: Tensor, b: int, t: int) -> Packing:
        """Return the packing of `seq_idx` (b, t), which changes where the next sequence begins.

        Raises:
            ValueError: Another shape, or a dtype that is not an integer one.
        """
        cu_seqlens = cu_seqlens_from_seq_idx(where, seq_idx, b, t, seq_idx.device)
        row_ends = torch.arange(1, b + 1, device=seq_idx.device) * t
        end = torch.searchsorted(cu_seqlens, row_ends)  # sequences that begin before the end of each row
        first = torch.cat([end.new_zeros(1), end[:-1]])
        return Packing(cu_seqlens, first, end - 1)

    def states(self, initial: Tensor | None) -> Tensor | None:
        """Return (b, ...) as (z, ...): the first sequence of a row starts from its state, the others from zeros."""
        if initial is None:
            return None
        zeros = initial.new_zeros((self.cu_seqlens.shape[0] - 1, *initial.shape[1:]))
        return zeros.index_copy(0, self.first, initial)


def in_one_row(x: Tensor) -> Tensor:
    """Return (b, t, ...) as (1, b t, ...)."""
    return x.flatten(0, 1).unsqueeze(0)
