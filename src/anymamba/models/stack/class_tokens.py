"""Class tokens: learned rows among the tokens of a sequence, at positions on which splits and steps agree.

A class token precedes token 0 ("start"), token ⌊L/2⌋ ("middle") or token k (a number) of a sequence of L, or follows
the last one ("end"). Several at one position are ordered start, middle, end, numbers, and then as in their list. One at
k ≥ L never appears.

There are three levels: before the input projection, before a stack, and before a layer. Each level counts the tokens
that reach it, which include the class tokens of the levels before. What one call to a stack does with them:

1. `make_layout` describes the input of the call: tokens per sequence, whole lengths, packing or padding.
2. At each level, `ClassTokens.plan_insertion` reads the cursor of each sequence (how many tokens have passed the level,
   and whether the class tokens before the next one have already run), and `insertion_order` decides which class tokens
   run in this call, and where.
3. `Insertion.insert` gathers tokens and class tokens in that order, and its layout is the input of the next level.
4. The new cursors go to the cache, so that the next call continues where this one ended.

A class token in the middle or at the end requires L.

Letters: b batch, t time, d width, m class tokens, z sequences: rows, or packed ones.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anymamba.core.layout import Padding

NAMED = ("start", "middle", "end")  # in their order at the same position
Position = str | int


def check_positions(where: str, positions: Any) -> None:
    """Raise `ValueError` unless `positions` is a list of positions for class tokens."""
    is_valid = isinstance(positions, list) and all(
        p in NAMED if isinstance(p, str) else type(p) is int and p >= 0 for p in positions
    )
    if not is_valid:
        expected = f"a list of {', '.join(map(repr, NAMED))} and numbers of tokens, 0 or more"
        raise ValueError(f"{where} must be {expected}, got {reprlib.repr(positions)}")


def _token_index(position: Position, length: int | None) -> int | None:
    """Return the token that a class token precedes; None if it never appears."""
    if position == "start":
        return 0
    if isinstance(position, int):
        return position if length is None or position < length else None
    assert length is not None
    return length if position == "end" else length // 2


def insertion_order(
    positions: Sequence[Position], seen: int, is_primed: bool, count: int, length: int | None, priming: bool = False
) -> list[int]:
    """Return what runs in a call, in order: i < m is class token i, m + j the j-th token of the call.

    Args:
        positions: Positions of the m class tokens.
        seen: Number of tokens that have passed before the call.
        is_primed: Whether the class tokens before the next token have already run.
        count: Number of tokens of the call.
        length: Length of the whole sequence, L.
        priming: Whether to run the class tokens before the token that follows the call, too.
    """
    m, end = len(positions), seen + count
    # 1) Tokens sort by their index; the 1 puts class tokens, which have a 0, before the token at the same index.
    keyed = [((seen + j, 1, 0), m + j) for j in range(count)]
    for i, position in enumerate(positions):
        index = _token_index(position, length)
        is_end = position == "end"
        # 2) Skip what never appears, and what ran when the cache was primed.
        if index is None or (index == seen and is_primed and not is_end):
            continue
        # 3) An "end" runs with the last token, never alone; the others run if their token is in the call.
        if index == end == length and is_end and count > 0 and not priming:
            runs = True
        else:
            runs = not is_end and seen <= index < end + priming
        if runs:
            rank = NAMED.index(position) if isinstance(position, str) else len(NAMED)
            keyed.append(((index, 0, rank), i))
    return [item for _, item in sorted(keyed)]


class SequenceLayout(NamedTuple):
    """Sequences that reach a level in one call.

    Attributes:
        counts: Tokens of each sequence.
        lengths: Lengths of the whole sequences, as this level counts them; None if unknown.
        cu_seqlens: Boundaries of packed sequences, (z + 1,).
        padding: Padding of rows of different lengths; the tokens of each row are at its front.
        priming: Whether the class tokens before the token that follows the call are to run, too.
    """

    counts: list[int]
    lengths: list[int] | None
    cu_seqlens: Tensor | None
    padding: Padding | None
    priming: bool = False

    def block_options(self) -> dict[str, Any]:
        """Return the keyword arguments that describe this layout to a block."""
        return {"cu_seqlens": self.cu_seqlens, "mask": self.padding}

    def last_outputs(self, y_btd: Tensor) -> Tensor:
        """Return the last output of each row, (b, d); zeros for a row without any."""
        if self.padding is None:
            return y_btd[:, -1]
        rows, last = torch.arange(len(y_btd), device=y_btd.device), self.padding.lengths - 1
        return y_btd[rows, last.clamp(min=0)] * (last >= 0).unsqueeze(1)


def make_layout(
    where: str,
    x: Tensor,
    length: int | Tensor | None,
    cu_seqlens: Tensor | None,
    padding: Padding | None,
    *,
    is_whole: bool = False,
    priming: bool = False,
) -> SequenceLayout:
    """Return the layout of the input (b, t, ...) of a call, compacted if it is padded.

    Args:
        where: Name of the function, for errors.
        x: Inputs.
        length: Length of the whole sequences, one for all or (z,); None if unknown.
        cu_seqlens: Boundaries of packed sequences.
        padding: Padding of padded rows.
        is_whole: Whether the call has whole sequences, so that their lengths are known.
        priming: Whether the class tokens before the token that follows the call are to run, too.
    """
    if cu_seqlens is not None:
        counts = cu_seqlens.diff().tolist()
    else:
        counts = [x.shape[1]] * len(x) if padding is None else padding.lengths.tolist()
    compact = None if padding is None else padding.as_compact()
    if length is None:
        return SequenceLayout(counts, counts if is_whole else None, cu_seqlens, compact, priming)
    lengths = length.tolist() if isinstance(length, Tensor) else [length] * len(counts)
    is_valid = isinstance(lengths, list) and len(lengths) == len(counts) and all(type(n) is int for n in lengths)
    if not is_valid or min(lengths, default=1) < 1:
        received = tuple(length.shape) if isinstance(length, Tensor) and not is_valid else reprlib.repr(length)
        raise ValueError(
            f"{where}: length must be the number of tokens of the whole sequences, at least 1: one integer, or a "
            f"tensor with one per sequence, ({len(counts)},); got {received}"
        )
    return SequenceLayout(counts, lengths, cu_seqlens, compact, priming)


def empty_input(where: str, batch_size: int, width: int, reference: Tensor) -> Tensor:
    """Return the input (b, 0, width) of a call that runs only class tokens, in dtype and device of `reference`."""
    if type(batch_size) is not int or batch_size < 0:
        raise ValueError(f"{where}: batch_size must be an integer, 0 or more, got {batch_size!r}")
    return torch.empty(batch_size, 0, width, device=reference.device, dtype=reference.dtype)


class Insertion(NamedTuple):
    """Order of the tokens and class tokens of one call at one level.

    Attributes:
        order: Indices into class tokens followed by tokens: (t') for all rows or packed sequences alike, or (b, t').
        layout: Layout after the level.
    """

    order: Tensor
    layout: SequenceLayout

    def insert(self, rows_md: Tensor, x_btd: Tensor) -> Tensor:
        """Return tokens and class tokens in their order, (b, t', d), with zeros after the last of each row."""
        both = torch.cat([rows_md.to(x_btd.dtype).expand(len(x_btd), -1, -1), x_btd], 1)
        if self.order.ndim == 1:
            return both.index_select(1, self.order)
        assert self.layout.padding is not None
        y_btd = both.gather(1, self.order.unsqueeze(-1).expand(-1, -1, both.shape[2]))
        return zero_padding(y_btd, self.layout.padding)


class ClassTokens(nn.Module):
    """Class tokens of one level.

    Attributes:
        weight: Learned rows, (m, d), initialized from N(0, 0.02²).
    """

    def __init__(self, positions: list[Position], width: int, **factory: Any) -> None:
        """Create the rows."""
        super().__init__()
        self.positions = list(positions)
        self.weight = nn.Parameter(torch.empty(len(positions), width, **factory))
        nn.init.normal_(self.weight, std=0.02)
        self.weight._no_weight_decay = True  # type: ignore[attr-defined]

    def plan_insertion(self, where: str, layout: SequenceLayout, cursor: Tensor | None) -> tuple[Insertion, Tensor]:
        """Return the order of tokens and class tokens in a call, and the cursor after it.

        The cursors of all sequences are (z, 2); None at the beginning. Raise `ValueError` if a class token is placed by
        a length that was not given, if there are more tokens than that length, or for cursors of other sequences.
        """
        z, lengths = len(layout.counts), layout.lengths
        if cursor is not None and cursor.shape != (z, 2):
            raise ValueError(f"{where}: the cursors of the cache must have shape {(z, 2)}, got {tuple(cursor.shape)}")
        if lengths is None and (by_length := [p for p in self.positions if p in ("middle", "end")]):
            raise ValueError(
                f"{where}: length, the number of tokens of the whole sequence, must be given for a class token at "
                f"{by_length[0]!r}, got None"
            )
        cursors = [[0, 0]] * z if cursor is None else cursor.tolist()
        maybe_lengths: list[int | None] = [None] * z if lengths is None else [*lengths]
        orders, next_cursors = [], []
        for (seen, is_primed), count, length in zip(cursors, layout.counts, maybe_lengths, strict=True):
            if length is not None and seen + count > length:
                raise ValueError(f"{where}: length is {length}, but {seen + count} tokens have come")
            orders.append(insertion_order(self.positions, seen, bool(is_primed), count, length, layout.priming))
            next_cursors.append([seen + count, int(layout.priming or (bool(is_primed) and not count))])
        lengths_after = None if lengths is None else [self._length_after(n) for n in lengths]
        layout_after = layout._replace(counts=[len(order) for order in orders], lengths=lengths_after)
        return self._as_insertion(orders, layout_after), torch.tensor(next_cursors, dtype=torch.int64).reshape(z, 2)

    def _length_after(self, length: int) -> int:
        """Return the length of a sequence of `length` tokens after this level."""
        return length + sum(_token_index(position, length) is not None for position in self.positions)

    def _as_insertion(self, orders: list[list[int]], layout: SequenceLayout) -> Insertion:
        """Return the order of each sequence as one tensor, and the layout with the boundaries or padding it implies."""
        device, m = self.weight.device, len(self.positions)
        # 1) Packed sequences: one row, each sequence's tokens at its offset in the row.
        if layout.cu_seqlens is not None:
            starts = layout.cu_seqlens.tolist()
            index = [i if i < m else i + start for row, start in zip(orders, starts, strict=False) for i in row]
            cu_seqlens = torch.tensor([0, *layout.counts], device=device).cumsum(0).to(layout.cu_seqlens.dtype)
            order = torch.tensor(index, dtype=torch.int64, device=device)
            return Insertion(order, layout._replace(cu_seqlens=cu_seqlens))
        # 2) Rows with the same order, the usual case: one index for all of them.
        if all(row == orders[0] for row in orders):
            index = orders[0] if orders else []
            return Insertion(torch.tensor(index, dtype=torch.int64, device=device), layout._replace(padding=None))
        # 3) Rows that differ: one index per row, padded at the end.
        t, lengths = max(layout.counts), torch.tensor(layout.counts, device=device)
        padded_orders = torch.tensor([row + [0] * (t - len(row)) for row in orders], device=device)
        padding = Padding(lengths, torch.arange(t, device=device) < lengths.unsqueeze(1), None, is_compact=True)
        return Insertion(padded_orders, layout._replace(padding=padding))


def zero_padding(y_btd: Tensor, padding: Padding | None) -> Tensor:
    """Return outputs with zeros after the last one of each row."""
    return y_btd if padding is None else y_btd.masked_fill(~padding.front.unsqueeze(-1), 0)


class OutputIndices(NamedTuple):
    """Indices of the outputs of a whole sequence; None for a class token that never appears.

    Attributes:
        tokens: Indices of its tokens.
        stack: Indices of the class tokens before the stack, in the order of the config.
        layers: Indices of the class tokens before each pass.
        inputs: Indices of the class tokens before the input projection, for a model that has one.
    """

    tokens: list[int]
    stack: list[int | None]
    layers: list[list[int | None]]
    inputs: list[int | None]


def find_output_indices(
    length: int, stack: Sequence[Position], layers: Sequence[Sequence[Position]], inputs: Sequence[Position] = ()
) -> OutputIndices:
    """Follow the tokens of a whole sequence through all levels and return where their outputs are."""
    if type(length) is not int or length < 1:
        raise ValueError(f"output_indices: length must be an integer number of tokens, at least 1, got {length!r}")
    levels = [inputs, stack, *layers]
    sequence: list[tuple[int, int]] = [(-1, j) for j in range(length)]  # (level, index); -1: a token
    for level, positions in enumerate(levels):
        m, order = len(positions), insertion_order(positions, 0, False, len(sequence), len(sequence))
        sequence = [(level, i) if i < m else sequence[i - m] for i in order]
    index_of = {item: index for index, item in enumerate(sequence)}
    by_level = [[index_of.get((level, i)) for i in range(len(positions))] for level, positions in enumerate(levels)]
    return OutputIndices([index_of[(-1, j)] for j in range(length)], by_level[1], by_level[2:], by_level[0])
