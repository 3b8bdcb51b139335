"""How time is cut into chunks.

A chunk never crosses the boundary of a packed sequence, so nothing of one sequence can reach another, not even a NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.ground.operators import is_observed
from anymamba.ground.sequences import spans


class ChunkLayout:
    """Time as a table of equal chunks, padded with zeros at the end of each sequence.

    Zeros are inert: a log-decay of 0 keeps the state and a value of 0 adds nothing to it.

    Attributes:
        sequences: the range of chunks [first, last) of each sequence. Unpacked, there is one for all rows.
    """

    def __init__(self, t: int, chunk_len: int, cu_seqlens: Tensor | None) -> None:
        """Lay out `t` steps, cut at `cu_seqlens` if given, in chunks of `chunk_len`."""
        self.t = t
        self.index: Tensor | None = None
        if cu_seqlens is None:
            # In a trace the length may be a symbol, and a known chunk length is better.
            self.chunk_len = chunk_len if is_observed() else min(chunk_len, t)
            self.sequences = [(0, _ceil(t, self.chunk_len))]
            return
        lengths = [span.stop - span.start for span in spans(t, cu_seqlens)]
        self.chunk_len = min(chunk_len, max(lengths))
        counts = [_ceil(length, self.chunk_len) for length in lengths]
        ends = torch.tensor(counts).cumsum(0).tolist()
        self.sequences = [(end - count, end) for count, end in zip(counts, ends, strict=True)]
        slot = [
            torch.arange(length) + first * self.chunk_len
            for length, (first, _) in zip(lengths, self.sequences, strict=True)
        ]
        self.slot_of_time = torch.cat(slot).to(cu_seqlens.device)
        self.index = torch.full((ends[-1] * self.chunk_len,), t, device=cu_seqlens.device)
        self.index[self.slot_of_time] = torch.arange(t, device=cu_seqlens.device)

    def split(self, x: Tensor) -> Tensor:
        """(b, t, ...) -> (b, c, l, ...)."""
        if self.index is None:
            # Not `F.pad`: where the length is traced as a symbol, its gradient has other strides than were traced.
            missing = self.sequences[0][1] * self.chunk_len - self.t
            zeros = x.new_zeros((x.shape[0], missing, *x.shape[2:]))
            padded = torch.cat([x, zeros], dim=1)
        else:
            padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, 1))[:, self.index]
        return padded.unflatten(1, (self.sequences[-1][1], self.chunk_len))

    def join(self, x: Tensor) -> Tensor:
        """(b, c, l, ...) -> (b, t, ...), the inverse of `split` without the padding."""
        flat = x.flatten(1, 2)
        return flat[:, : self.t] if self.index is None else flat[:, self.slot_of_time]

    def initial_states(self, initial_state: Tensor) -> tuple[Tensor, ...]:
        """The initial state of each of `sequences`, its batch axis kept."""
        return (initial_state,) if self.index is None else initial_state.split(1)


def _ceil(length: int, chunk_len: int) -> int:
    """How many chunks a length takes. (If the length is a symbol, torch cannot negate the quotient.)"""
    return (length + chunk_len - 1) // chunk_len
