"""Class tokens: learned rows among the tokens of a sequence, at places that splits and steps agree on.

A class token stands before token 0 ("start"), ⌊L/2⌋ ("middle") or k (a number) of a sequence of L, or after its last
("end"). Several at one place come in the order start, middle, end, numbers, and then in the order of their list. One at
k ≥ L never appears. There are three levels: before the input projection, before a stack, and before a layer; each
counts the tokens that reach it, class tokens of the levels before it among them.

A cursor remembers how many tokens have passed a level, and whether the class tokens before the next one have been run
already. Placing one in the middle or at the end requires L.

Letters: b batch, t time, d width, m class tokens, z sequences: rows, or packed ones.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anymamba.core.layout import Padding

NAMED = ("start", "middle", "end")  # in their order at the same place
Position = str | int


def check_positions(where: str, positions: Any) -> None:
    """A list of places for class tokens.

    Raises:
        ValueError: it is not.
    """
    fine = isinstance(positions, list) and all(
        p in NAMED if isinstance(p, str) else type(p) is int and p >= 0 for p in positions
    )
    if not fine:
        expected = f"a list of {', '.join(map(repr, NAMED))} and numbers of tokens, from 0 on"
        raise ValueError(f"{where} must be {expected}, got {reprlib.repr(positions)}")


def _place(position: Position, length: int | None) -> int | None:
    """The token that a class token stands before; None: it never comes."""
    if position == "start":
        return 0
    if isinstance(position, int):
        return position if length is None or position < length else None
    assert length is not None
    return length if position == "end" else length // 2


def insertion_order(
    positions: Sequence[Position], seen: int, is_primed: bool, count: int, length: int | None, priming: bool = False
) -> list[int]:
    """What runs in a call, in order: i < m is class token i, m + j the j-th token of the call.

    Args:
        positions: of the class tokens.
        seen: tokens that have passed before.
        is_primed: the class tokens before the next token have been run.
        count: tokens of the call.
        length: of the whole sequence, L.
        priming: also run the class tokens before the token that comes after the call.
    """
    m, after = len(positions), seen + count
    keyed = [((seen + j, 1, 0), m + j) for j in range(count)]
    for i, position in enumerate(positions):
        place = _place(position, length)
        is_end = position == "end"
        if place is None or (place == seen and is_primed and not is_end):
            continue
        if place == after == length and is_end and count > 0 and not priming:
            comes = True
        else:
            comes = not is_end and seen <= place < after + priming
        if comes:
            rank = NAMED.index(position) if isinstance(position, str) else len(NAMED)
            keyed.append(((place, 0, rank), i))
    return [item for _, item in sorted(keyed)]


class SequenceLayout(NamedTuple):
    """What reaches a level in one call.

    Attributes:
        counts: tokens of each sequence.
        lengths: of the whole sequences, as this level counts them; None: unknown.
        bounds: of packed sequences, (z + 1,).
        padding: of rows of different lengths; the tokens of each row are at its front.
        priming: a token will follow, and the class tokens before it are wanted now.
    """

    counts: list[int]
    lengths: list[int] | None
    bounds: Tensor | None
    padding: Padding | None
    priming: bool = False

    def options(self) -> dict[str, Any]:
        """The options of a layer that describe it."""
        return {"cu_seqlens": self.bounds, "mask": self.padding}

    def last(self, y_btd: Tensor) -> Tensor:
        """The last output of each row, (b, d); zero where there is none."""
        if self.padding is None:
            return y_btd[:, -1]
        rows, last = torch.arange(len(y_btd), device=y_btd.device), self.padding.lengths - 1
        return y_btd[rows, last.clamp(min=0)] * (last >= 0).unsqueeze(1)


def sequence_layout(
    where: str, x: Tensor, length: int | Tensor | None, bounds: Tensor | None, padding: Padding | None, *, whole: bool
) -> SequenceLayout:
    """What comes to the first level.

    Args:
        where: named in errors.
        x: inputs (b, t, ...), compacted if they are padded.
        length: of the whole sequences, one for all or (z,).
        bounds: of packed sequences.
        padding: of padded rows.
        whole: the call has whole sequences, so that their lengths are known.

    Raises:
        ValueError: `length` is not a number of tokens.
    """
    if bounds is not None:
        counts = bounds.diff().tolist()
    else:
        counts = [x.shape[1]] * len(x) if padding is None else padding.lengths.tolist()
    cleaned = None if padding is None else padding.as_compact()
    if length is None:
        return SequenceLayout(counts, counts if whole else None, bounds, cleaned)
    lengths = length.tolist() if isinstance(length, Tensor) else [length] * len(counts)
    is_fine = isinstance(lengths, list) and len(lengths) == len(counts) and all(type(n) is int for n in lengths)
    if not is_fine or min(lengths, default=1) < 1:
        found = tuple(length.shape) if isinstance(length, Tensor) and not is_fine else reprlib.repr(length)
        raise ValueError(
            f"{where}: length must be the tokens of whole sequences, a number from 1 on or as many as there are "
            f"sequences, ({len(counts)},), got {found}"
        )
    return SequenceLayout(counts, lengths, bounds, cleaned)


def no_tokens(where: str, batch_size: int, width: int, like: Tensor) -> Tensor:
    """The input of a call that runs class tokens only, (b, 0, width), with the dtype and device of `like`.

    Raises:
        ValueError: `batch_size` is not a number of rows.
    """
    if type(batch_size) is not int or batch_size < 0:
        raise ValueError(f"{where}: batch_size must be a number of rows, 0 or more, got {batch_size!r}")
    return torch.empty(batch_size, 0, width, device=like.device, dtype=like.dtype)


class Insertion(NamedTuple):
    """Where tokens and class tokens of one call stand.

    Attributes:
        order: of the class tokens and tokens, which stand one after another, (t') for all rows or packed sequences
            alike, or (b, t').
        flow: that leaves the level.
    """

    order: Tensor
    flow: SequenceLayout

    def place(self, rows_md: Tensor, x_btd: Tensor) -> Tensor:
        """Tokens and class tokens in their order, (b, t', d); zero after the last of each row."""
        rows = rows_md.to(x_btd.dtype).expand(len(x_btd), -1, -1)
        both = torch.cat([rows, x_btd], 1)
        if self.order.ndim == 1:
            return both.index_select(1, self.order)
        assert self.flow.padding is not None
        found = both.gather(1, self.order.unsqueeze(-1).expand(-1, -1, both.shape[2]))
        return found.masked_fill(~self.flow.padding.front.unsqueeze(-1), 0)


class ClassTokens(nn.Module):
    """The class tokens of one level.

    Attributes:
        weight: the rows, (m, d), N(0, 0.02²) at first.
    """

    def __init__(
        self,
        positions: list[Position],
        width: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the rows."""
        super().__init__()
        self.positions = list(positions)
        self.weight = nn.Parameter(torch.empty(len(positions), width, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=0.02)
        self.weight._no_weight_decay = True  # type: ignore[attr-defined]

    def arrange(self, where: str, flow: SequenceLayout, cursor: Tensor | None) -> tuple[Insertion, Tensor]:
        """Where everything stands, and the cursor after the call.

        Args:
            where: named in errors.
            flow: that reaches the level.
            cursor: of each sequence, (z, 2); None: of a fresh start.

        Raises:
            ValueError: a class token is placed by the length, which was not given; there are more tokens than that; or
                the cursor is of another number of sequences.
        """
        z, m, lengths = len(flow.counts), len(self.positions), flow.lengths
        if cursor is not None and cursor.shape != (z, 2):
            raise ValueError(f"{where}: the cursors of the cache must have shape {(z, 2)}, got {tuple(cursor.shape)}")
        if lengths is None and (wanting := [p for p in self.positions if p in ("middle", "end")]):
            raise ValueError(
                f"{where}: length must be given, the tokens of the whole sequence, for a class token at "
                f"{wanting[0]!r}, got None"
            )
        before = [[0, 0]] * z if cursor is None else cursor.tolist()
        known: list[int | None] = [None] * z if lengths is None else [*lengths]
        items, after = [], []
        for (seen, primed), count, length in zip(before, flow.counts, known, strict=True):
            if length is not None and seen + count > length:
                raise ValueError(f"{where}: length says that there are {length} tokens in all, got {seen + count}")
            items.append(insertion_order(self.positions, seen, bool(primed), count, length, flow.priming))
            after.append([seen + count, int(flow.priming or (bool(primed) and not count))])
        counts = [len(row) for row in items]
        longer = None if lengths is None else [n + count_inserted(self.positions, n) for n in lengths]
        arrangement = self._indexed(items, m, flow._replace(counts=counts, lengths=longer))
        return arrangement, torch.tensor(after, dtype=torch.int64).reshape(z, 2)

    def _indexed(self, items: list[list[int]], m: int, flow: SequenceLayout) -> Insertion:
        device = self.weight.device
        if flow.bounds is not None:
            starts = flow.bounds.tolist()
            index = [i if i < m else i + start for row, start in zip(items, starts, strict=False) for i in row]
            bounds = torch.tensor([0, *flow.counts], device=device).cumsum(0).to(flow.bounds.dtype)
            return Insertion(torch.tensor(index, dtype=torch.int64, device=device), flow._replace(bounds=bounds))
        if all(row == items[0] for row in items):
            index = items[0] if items else list(range(m, m))
            return Insertion(torch.tensor(index, dtype=torch.int64, device=device), flow._replace(padding=None))
        t, lengths = max(flow.counts), torch.tensor(flow.counts, device=device)
        padded = [row + [0] * (t - len(row)) for row in items]
        padding = Padding(lengths, torch.arange(t, device=device) < lengths.unsqueeze(1), None, is_compact=True)
        return Insertion(torch.tensor(padded, device=device), flow._replace(padding=padding))


def zeroed(y_btd: Tensor, padding: Padding | None) -> Tensor:
    """Outputs, with zeros after the last one of each row."""
    return y_btd if padding is None else y_btd.masked_fill(~padding.front.unsqueeze(-1), 0)


def count_inserted(positions: Sequence[Position], length: int) -> int:
    """How many class tokens a sequence of `length` tokens gets."""
    return sum(_place(position, length) is not None for position in positions)


class OutputIndices(NamedTuple):
    """Where the outputs of a whole sequence are; None for a class token that never came.

    Attributes:
        tokens: of its tokens.
        stack: of the class tokens before the stack, in the order of the config.
        layers: of those before each pass.
        inputs: of those before the input projection, of a model that has one.
    """

    tokens: list[int]
    stack: list[int | None]
    layers: list[list[int | None]]
    inputs: list[int | None]


def output_indices(
    length: int, stack: Sequence[Position], layers: Sequence[Sequence[Position]], inputs: Sequence[Position] = ()
) -> OutputIndices:
    """Follow the tokens of a whole sequence through all levels."""
    if type(length) is not int or length < 1:
        raise ValueError(f"output_indices: length must be a whole number of tokens, at least 1, got {length!r}")
    levels = [inputs, stack, *layers]
    stream: list[tuple[int, int]] = [(-1, j) for j in range(length)]  # (level, number); -1: a token
    for level, positions in enumerate(levels):
        m, items = len(positions), insertion_order(positions, 0, False, len(stream), len(stream))
        stream = [(level, i) if i < m else stream[i - m] for i in items]
    place = {item: index for index, item in enumerate(stream)}
    found = [[place.get((level, i)) for i in range(len(positions))] for level, positions in enumerate(levels)]
    return OutputIndices([place[(-1, j)] for j in range(length)], found[1], found[2:], found[0])
