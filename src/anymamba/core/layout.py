"""Padded batches: rows of different lengths, padded anywhere, computed as if each were alone.

The real tokens of a row are moved to its front, in order, so that a block sees rows that are padded at the end, where a
causal model does not look; the outputs are moved back and are zero at the padding.

§ How a batch is laid out in time: one sequence per row, or several packed one after another into a batch of one.

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
    """Time, one span for all rows, or one for each packed sequence."""
    if cu_seqlens is None:
        return [Span(slice(None), 0, t)]
    pairs = itertools.pairwise(cu_seqlens.tolist())
    return [Span(slice(z, z + 1), start, stop) for z, (start, stop) in enumerate(pairs)]


def cu_seqlens_from_seq_idx(where: str, seq_idx: Any, b: int, t: int, device: torch.device) -> Tensor:
    """The boundaries of sequences that rows (b, t) hold one after another, as of all rows laid end to end, (z + 1,).

    Args:
        where: named in errors.
        seq_idx: a number for every step, (b, t): a sequence ends where it changes, and at the end of a row.
        b: rows.
        t: steps.
        device: of the inputs.

    Raises:
        TypeError: not a tensor, or not of whole numbers.
        ValueError: another shape or device.
    """
    if not isinstance(seq_idx, Tensor) or seq_idx.dtype not in (torch.int32, torch.int64):
        found = seq_idx.dtype if isinstance(seq_idx, Tensor) else type(seq_idx).__name__
        raise TypeError(f"{where}: seq_idx must be a tensor of int32 or int64, got {found}")
    if seq_idx.shape != (b, t) or seq_idx.device != device:
        found = f"{tuple(seq_idx.shape)} on {seq_idx.device}"
        raise ValueError(f"{where}: seq_idx must have shape (b={b}, t={t}) on {device}, got {found}")
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    ends = torch.tensor([b * t], device=device)
    return torch.cat([begins.flatten().nonzero().squeeze(1), ends])


def split_span(span: Span, length: int) -> Iterator[slice]:
    """A span cut into pieces of `length`; the last is as long as what is left."""
    for start in range(span.start, span.stop, length):
        yield slice(start, min(start + length, span.stop))


def split_packed(x: Tensor, start: Tensor, cu_seqlens: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """(b, t, ...) and the starts (z, ...) as one pair, or packed (1, t, ...) as one pair for each sequence."""
    if cu_seqlens is None:
        return [(x, start)]
    return list(zip(x.split(cu_seqlens.diff().tolist(), dim=1), start.split(1), strict=True))


def last_sequence_time(cu_seqlens: Tensor | None) -> slice:
    """The time of the last packed sequence, or all of it."""
    return slice(0 if cu_seqlens is None else int(cu_seqlens[-2]), None)


def first_steps(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """(b, t, ...) -> (z, ...): the first step of each sequence."""
    return x[:, 0] if cu_seqlens is None else x[0, cu_seqlens[:-1].long()]


def last_steps(x: Tensor, cu_seqlens: Tensor | None, lengths: Tensor | None, before: Tensor) -> Tensor:
    """(b, t, ...) -> (z, ...): a copy of the last real step of each sequence; `before` for rows that have none."""
    if cu_seqlens is not None:
        return x[0, cu_seqlens[1:].long() - 1]
    if lengths is None:
        return x[:, -1].clone()  # a view would keep all of x in memory as long as the cache lives
    rows = torch.arange(x.shape[0], device=x.device)
    return select_real(lengths, x[rows, (lengths - 1).clamp(min=0)], before)


def is_padding(lengths: Tensor, t: int) -> Tensor:
    """(b, t): True for the steps of each row after its `lengths` real ones."""
    return torch.arange(t, device=lengths.device) >= lengths.unsqueeze(1)


def select_real(lengths: Tensor | None, x: Tensor, before: Tensor) -> Tensor:
    """`x` (b, ...) for rows that have a real step, `before` for those that have none."""
    if lengths is None:
        return x
    return torch.where((lengths > 0).view(-1, *[1] * (x.ndim - 1)), x, before)


def shift_earlier(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """(b, t, ...) shifted one step earlier; the last step of a sequence sees zero."""
    # A roll keeps the length: a traced graph would have to distinguish a length of t - 1 from one of 1.
    last = torch.arange(x.shape[1], device=x.device) == x.shape[1] - 1
    if cu_seqlens is not None:
        last = last.index_fill(0, cu_seqlens[1:].long() - 1, True)
    return x.roll(-1, dims=1).masked_fill(last.view(-1, *[1] * (x.ndim - 2)), 0)


def shift_later(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """(b, t, ...) shifted one step later; the first step of a sequence sees zero."""
    first = torch.arange(x.shape[1], device=x.device) == 0
    if cu_seqlens is not None:
        first = first.index_fill(0, cu_seqlens[:-1].long(), True)
    return x.roll(1, dims=1).masked_fill(first.view(-1, *[1] * (x.ndim - 2)), 0)


def reversal_order(t: int, cu_seqlens: Tensor | None, lengths: Tensor | None, device: torch.device) -> Tensor | None:
    """Where each step comes from when every sequence is reversed, (b, t) or (1, t); None: a flip does it.

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
    """(b, t, d) with every sequence reversed; `order` from `reversal_order`."""
    return x.flip(1) if order is None else x.gather(1, order.unsqueeze(-1).expand_as(x))


class Padding(NamedTuple):
    """Which steps of a batch are real.

    Attributes:
        lengths: real steps of each row, (b,).
        front: True for the first `lengths` steps of each row, (b, t).
        order: where the i-th step of the compacted row comes from, (b, t); None if the rows are already compact.
        is_compact: the caller has compacted the rows and will restore them: there is nothing to do in between.
    """

    lengths: Int[Tensor, " b"]
    front: Bool[Tensor, "b t"]
    order: Int[Tensor, "b t"] | None
    is_compact: bool = False

    @staticmethod
    def from_mask(where: str, mask: Tensor | Padding, b: int, t: int, device: torch.device) -> Padding:
        """Read a boolean mask (b, t), True for real tokens, or the lengths (b,) of rows that are padded at the end."""
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
        """True for real steps, where they stand."""
        return self.front if self.order is None else torch.zeros_like(self.front).scatter(1, self.order, self.front)

    def compact(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Move the real tokens to the front and zero the rest."""
        if self.is_compact:
            return x
        if self.order is not None:
            x = x.gather(1, self.order.unsqueeze(-1).expand_as(x))
        return x.masked_fill(~self.front.unsqueeze(-1), 0)

    def restore(self, y: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Undo `compact`: every real token back in its place, zeros at the padding."""
        if self.is_compact:
            return y
        y = y.masked_fill(~self.front.unsqueeze(-1), 0)
        if self.order is None:
            return y
        return torch.zeros_like(y).scatter(1, self.order.unsqueeze(-1).expand_as(y), y)

    def as_compact(self) -> Padding:
        """The same padding for callees that receive rows which are already compact."""
        return self._replace(order=None, is_compact=True)
