"""How the tokens of a batch are laid out: rows of one length, padded rows, or packed sequences.

A layout lays the tokens of a batch out for the operators, says what each sequence starts from and what its rows end
with, and puts the outputs back in their places.

Letters: b rows, t time, z sequences, d channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymamba.ground.checks import values_are_cheap
from anymamba.ground.padding import Padding
from anymamba.transformers.caches import Carried
from anymamba.transformers.packing import Packing

# A fresh start of this many sequences.
Fresh = Callable[[int], Carried]


class Layout:
    """Rows of one length."""

    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def lay(self, x: Tensor) -> Tensor:
        """(b, t, d) -> what the operators run over."""
        return x

    def start(self, before: Carried | None, fresh: Fresh, rows: int) -> Carried:
        """What each sequence starts from."""
        return fresh(rows) if before is None else before

    def end(self, after: Carried, start: Carried) -> Carried:
        """What each row ends with."""
        return after

    def put_back(self, y: Tensor) -> Tensor:
        """Undo `lay` for outputs."""
        return y


class Padded(Layout):
    """Rows of different lengths, padded anywhere; outputs at the padding are zero."""

    def __init__(self, mask: Tensor) -> None:
        """Take a boolean mask (b, t), True for real tokens."""
        self._padding = Padding.of("accelerate", mask, mask.shape[0], mask.shape[1], mask.device)
        self.lengths = self._padding.lengths

    def lay(self, x: Tensor) -> Tensor:
        """Move the real tokens to the front."""
        return self._padding.compact(x)

    def put_back(self, y: Tensor) -> Tensor:
        """Move them back."""
        return self._padding.restore(y)


class Packed(Layout):
    """Several sequences in a row; the first of a row continues its cache, and the last is what the row ends with."""

    def __init__(self, packing: Packing, shape: tuple[int, int]) -> None:
        """Take where sequences begin, for rows (b, t)."""
        if packing.shape != shape:
            raise ValueError(f"accelerate: packed sequences must have the tokens' shape, {shape}, got {packing.shape}")
        self._packing, self.cu_seqlens = packing, packing.cu_seqlens

    def lay(self, x: Tensor) -> Tensor:
        """(b, t, d) -> (1, b t, d)."""
        return x.reshape(1, -1, x.shape[-1])

    def start(self, before: Carried | None, fresh: Fresh, rows: int) -> Carried:
        """Zeros, except for the first sequence of each row."""
        start = fresh(self._packing.sequences)
        if before is None:
            return start
        first = self._packing.first
        window, state = before.window.to(start.window.dtype), before.state.to(start.state.dtype)
        return Carried(start.window.index_copy(0, first, window), start.state.index_copy(0, first, state))

    def end(self, after: Carried, start: Carried) -> Carried:
        """The state after the last sequence of each row; for a row that is all padding, what it started from."""
        first, last, real = self._packing.first, self._packing.last, self._packing.real
        pairs = zip(after, start, strict=True)
        ends = (torch.where(real.view(-1, *[1] * (x.ndim - 1)), x[last], old[first]) for x, old in pairs)
        return Carried(*ends)

    def put_back(self, y: Tensor) -> Tensor:
        """(1, b t, d) -> (b, t, d)."""
        return y.reshape(*self._packing.shape, -1)


def mask_of_new_tokens(mask: Any, t: int) -> Tensor | None:
    """The columns of the mask that belong to the last t tokens, True for real ones; None if all are real."""
    if mask is None:
        return None
    real: Tensor = mask[:, mask.shape[1] - t :].bool()
    return None if values_are_cheap(real) and bool(real.all()) else real


def layout_of(mask: Tensor | None, packing: Packing | None, shape: tuple[int, int]) -> Layout:
    """The layout of a batch (b, t) with this mask of new tokens and these packed sequences."""
    if packing is not None:
        return Packed(packing, shape)
    return Layout() if mask is None else Padded(mask)
