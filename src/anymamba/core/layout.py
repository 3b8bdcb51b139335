"""Layout of a batch in time: one sequence per row, padded rows of different lengths, or packed sequences.

Packed sequences follow one another in a batch of one row. In padded rows, the real tokens are moved to the front, in
order, so that a block sees padding at the end alone, where a causal model does not look; the outputs are moved back and
are zero at the padding.

Letters: b batch, t time, z sequences: the rows of a batch, or the packed sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anymamba.core.checks import can_read_values, check_tensor


class Span(NamedTuple):
    """A stretch of time [start, stop) of the sequences in `rows`: all rows at once, or one packed sequence."""

    rows: slice
    start: int
    stop: int


def sequence_spans(t: int, cu_seqlens: Tensor | None) -> list[Span]:
    """Return one span of time for all rows, or one per packed sequence."""
    if cu_seqlens is None:
        return [Span(slice(None), 0, t)]
    pairs = itertools.pairwise(cu_seqlens.tolist())
    return [Span(slice(z, z + 1), start, stop) for z, (start, stop) in enumerate(pairs)]


def cu_seqlens_from_seq_idx(where: str, seq_idx: Any, b: int, t: int, device: torch.device) -> Tensor:
    """Return the boundaries (z + 1,) of the sequences in rows (b, t), as if all rows were laid end to end.

    `seq_idx` (b, t) numbers the sequence of every step: a sequence ends where the number changes, and at the end of a
    row.
    """
    if not isinstance(seq_idx, Tensor) or seq_idx.dtype not in (torch.int32, torch.int64):
        kind = seq_idx.dtype if isinstance(seq_idx, Tensor) else type(seq_idx).__name__
        raise TypeError(f"{where}: seq_idx must be a tensor of int32 or int64, got {kind}")
    if seq_idx.shape != (b, t) or seq_idx.device != device:
        shape = f"{tuple(seq_idx.shape)} on {seq_idx.device}"
        raise ValueError(f"{where}: seq_idx must have shape (b={b}, t={t}) on {device}, got {shape}")
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    ends = torch.tensor([b * t], device=device)
    return torch.cat([begins.flatten().nonzero().squeeze(1), ends])


def split_span(span: Span, length: int) -> Iterator[slice]:
    """Yield a span in chunks of `length`; the last one may be shorter."""
    for start in range(span.start, span.stop, length):
        yield slice(start, min(start + length, span.stop))


def split_packed(x: Tensor, start: Tensor, cu_seqlens: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Return (b, t, ...) and the start values (z, ...) as one pair, or packed (1, t, ...) as one pair per sequence."""
    if cu_seqlens is None:
        return [(x, start)]
    return list(zip(x.split(cu_seqlens.diff().tolist(), dim=1), start.split(1), strict=True))


def last_sequence_time(cu_seqlens: Tensor | None) -> slice:
    """Return the time of the last packed sequence, or all of it."""
    return slice(0 if cu_seqlens is None else int(cu_seqlens[-2]), None)


def first_steps(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the first step of each sequence: (b, t, ...) -> (z, ...)."""
    return x[:, 0] if cu_seqlens is None else x[0, cu_seqlens[:-1].long()]


def last_steps(x: Tensor, cu_seqlens: Tensor | None, lengths: Tensor | None, before: Tensor) -> Tensor:
    """Return a copy of the last real step of each sequence, (b, t, ...) -> (z, ...); `before` for rows without one."""
    if cu_seqlens is not None:
        return x[0, cu_seqlens[1:].long() - 1]
    if lengths is None:
        return x[:, -1].clone()  # a view would keep all of x in memory as long as the cache lives
    rows = torch.arange(x.shape[0], device=x.device)
    return select_real(lengths, x[rows, (lengths - 1).clamp(min=0)], before)


def is_padding(lengths: Tensor, t: int) -> Tensor:
    """Return (b, t), True for the steps of each row after its `lengths` real ones."""
    return torch.arange(t, device=lengths.device) >= lengths.unsqueeze(1)


def select_real(lengths: Tensor | None, x: Tensor, before: Tensor) -> Tensor:
    """Return `x` (b, ...) for rows that have a real step, `before` for those that have none."""
    if lengths is None:
        return x
    return torch.where((lengths > 0).view(-1, *[1] * (x.ndim - 1)), x, before)


def shift_earlier(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Shift (b, t, ...) one step earlier; the last step of a sequence becomes zero."""
    # A roll keeps the length: a traced graph would have to distinguish a length of t - 1 from one of 1.
    last = torch.arange(x.shape[1], device=x.device) == x.shape[1] - 1
    if cu_seqlens is not None:
        last = last.index_fill(0, cu_seqlens[1:].long() - 1, True)
    return x.roll(-1, dims=1).masked_fill(last.view(-1, *[1] * (x.ndim - 2)), 0)


def shift_later(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Shift (b, t, ...) one step later; the first step of a sequence becomes zero."""
    first = torch.arange(x.shape[1], device=x.device) == 0
    if cu_seqlens is not None:
        first = first.index_fill(0, cu_seqlens[:-1].long(), True)
    return x.roll(1, dims=1).masked_fill(first.view(-1, *[1] * (x.ndim - 2)), 0)


def reversal_order(t: int, cu_seqlens: Tensor | None, lengths: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the index (b, t) or (1, t) of each step's source when every sequence is reversed; None if a flip does it.

    Padding after the `lengths` stays where it is. The order is its own inverse.
    """
    if cu_seqlens is not None:
        ends = cu_seqlens[1:].long()
        number = torch.bucketize(torch.arange(t, device=device), ends, right=True)
        return (cu_seqlens[:-1].long()[number] + ends[number] - 1 - torch.arange(t, device=device)).unsqueeze(0)
    if lengths is None:
        return None
    time = torch.arange(t, device=device)
    return torch.where(time < lengths.unsqueeze(1), lengths.unsqueeze(1) - 1 - time, time)


def reverse_time(x: Tensor, order: Tensor | None) -> Tensor:
    """Reverse every sequence of (b, t, d); `order` comes from `reversal_order`."""
    return x.flip(1) if order is None else x.gather(1, order.unsqueeze(-1).expand_as(x))


class Padding(NamedTuple):
    """The padding of a batch: which steps are real."""

    lengths: Int[Tensor, " b"]  # real steps of each row
    front: Bool[Tensor, "b t"]  # True for the first `lengths` steps of each row
    order: Int[Tensor, "b t"] | None  # source of each step of the compacted row; None if the padding is at the end
    is_compact: bool = False  # True if the caller has compacted the rows and will restore them: callees do neither

    @staticmethod
    def from_mask(where: str, mask: Tensor | Padding, b: int, t: int, device: torch.device) -> Padding:
        """Return the padding of a boolean mask (b, t), True for real tokens, or of the lengths (b,) of rows."""
        if isinstance(mask, Padding):
            return mask
        check_tensor(where, "mask", mask)
        if mask.device != device:
            raise ValueError(f"{where}: mask must be on {device}, got {mask.device}")
        time = torch.arange(t, device=device)
        if mask.dtype == torch.bool:
            if mask.shape != (b, t):
                raise ValueError(f"{where}: a boolean mask must have shape (b={b}, t={t}), got {tuple(mask.shape)}")
            lengths = mask.sum(1)
            order = torch.argsort(mask.logical_not().to(torch.uint8), dim=1, stable=True)
            return Padding(lengths, time < lengths.unsqueeze(1), order)
        if mask.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{where}: mask must be boolean (b, t) or integer lengths (b,), got {mask.dtype}")
        if mask.shape != (b,):
            raise ValueError(
                f"{where}: lengths given as mask must have shape (b={b},), got {tuple(mask.shape)}; "
                "pass a mask of ones and zeros as mask.bool()"
            )
        if can_read_values(mask) and mask.numel() and not (int(mask.min()) >= 0 and int(mask.max()) <= t):
            raise ValueError(f"{where}: lengths must be between 0 and t = {t}, got {mask.tolist()}")
        return Padding(mask.long(), time < mask.unsqueeze(1), None)

    def real_mask(self) -> Bool[Tensor, "b t"]:
        """Return (b, t), True for real steps, in their original positions."""
        return self.front if self.order is None else torch.zeros_like(self.front).scatter(1, self.order, self.front)

    def compact(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Move the real tokens to the front and zero the rest."""
        if self.is_compact:
            return x
        if self.order is not None:
            x = x.gather(1, self.order.unsqueeze(-1).expand_as(x))
        return x.masked_fill(~self.front.unsqueeze(-1), 0)

    def restore(self, y: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Undo `compact`: move every real token back, with zeros at the padding."""
        if self.is_compact:
            return y
        y = y.masked_fill(~self.front.unsqueeze(-1), 0)
        if self.order is None:
            return y
        return torch.zeros_like(y).scatter(1, self.order.unsqueeze(-1).expand_as(y), y)

    def as_compact(self) -> Padding:
        """Return the padding for callees that receive rows which are already compact."""
        return self._replace(order=None, is_compact=True)
