"""Packed sequences: pieces, starts, ends and shifts along time.

Unpacked, a batch (b, t, ...) is one piece for all rows; packed, (1, t, ...) has one piece per sequence z.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequences_of(x: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """(b, t, ...) as one piece, or packed (1, t, ...) as one per sequence."""
    return [x] if cu_seqlens is None else list(x.split(cu_seqlens.diff().tolist(), dim=1))


def starts_of(start: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """The start (z, ...) of each of `sequences_of`, its batch axis kept."""
    return [start] if cu_seqlens is None else list(start.split(1))


def first_of(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """(b, t, ...) -> (z, ...): the first step of each sequence."""
    return x[:, 0] if cu_seqlens is None else x[0, cu_seqlens[:-1].long()]


def last_of(x: Tensor, cu_seqlens: Tensor | None, lengths: Tensor | None, before: Tensor) -> Tensor:
    """(b, t, ...) -> (z, ...): a copy of the last real step of each sequence; `before` for rows that have none."""
    if cu_seqlens is not None:
        return x[0, cu_seqlens[1:].long() - 1]
    if lengths is None:
        return x[:, -1].clone()  # a view would keep all of x in memory for as long as the cache lives
    rows = torch.arange(x.shape[0], device=x.device)
    last = x[rows, (lengths - 1).clamp(min=0)]
    return torch.where((lengths > 0).view(-1, *[1] * (last.ndim - 1)), last, before)


def previous(x: Tensor, before: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """(b, t, ...) shifted one step later; the first step of a sequence sees its `before` (z, ...)."""
    # A roll keeps the length: a traced graph would have to tell a length of t - 1 from one of 1.
    if cu_seqlens is None:
        first = torch.arange(x.shape[1], device=x.device) == 0
        return torch.where(first.view(-1, *[1] * (x.ndim - 2)), before.unsqueeze(1), x.roll(1, dims=1))
    return x.roll(1, dims=1).index_copy(1, cu_seqlens[:-1].long(), before.unsqueeze(0))


def following(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """(b, t, ...) shifted one step earlier; the last step of a sequence sees zero."""
    shifted = x.roll(-1, dims=1)
    if cu_seqlens is None:
        last = torch.arange(x.shape[1], device=x.device) == x.shape[1] - 1
        return shifted.masked_fill(last.view(-1, *[1] * (x.ndim - 2)), 0)
    return shifted.index_fill(1, cu_seqlens[1:].long() - 1, 0)
