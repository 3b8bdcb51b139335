"""Batches: which tokens a step reads, as a pure function of the seed and the step.

Rows of fixed length are cut from the documents and laid end to end in one sequence, with a boundary wherever a row or a
document begins. No state crosses a boundary, except that of a row that continues in a stream.

Letters: t tokens of a batch, z sequences in it, r rows.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from anymamba.models.loss import IGNORED_LABEL
from anymamba.training.shards import Tokens


class Batch(NamedTuple):
    """Rows, packed.

    Attributes:
        inputs: tokens, (1, t).
        targets: the token after each, (1, t); `IGNORED_LABEL` at the end of a document.
        cu_seqlens: where the sequences begin, and t, (z + 1,).
        carried: the row whose state each sequence continues from, (z,); the number of rows for a fresh start.
        last: the last sequence of each row, (r,), whose state the row continues from.
    """

    inputs: Int[Tensor, "1 t"]
    targets: Int[Tensor, "1 t"]
    cu_seqlens: Int[Tensor, " z1"]
    carried: Int[Tensor, " z"]
    last: Int[Tensor, " r"]

    @property
    def tokens(self) -> int:
        """Tokens that are read."""
        return self.inputs.numel()

    @property
    def counted(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORED_LABEL).sum())

    def to(self, device: torch.device) -> Batch:
        """On another device."""
        return Batch(*(x.to(device) for x in self))


class Sequence:
    """Documents in some order, as one sequence of tokens."""

    def __init__(self, tokens: Tokens, order: Int[Tensor, " documents"] | None = None) -> None:
        """Documents that have tokens, in the order of `order`, or as they come."""
        self._tokens = tokens
        order = torch.arange(len(tokens.lengths)) if order is None else order
        order = order[tokens.lengths[order] > 0]
        places = tokens.lengths.cumsum(0) - tokens.lengths
        self._places = places[order]  # of each document in the shards
        self.ends = tokens.lengths[order].cumsum(0)  # of each document in this sequence
        self._begins = self.ends - tokens.lengths[order]

    def __len__(self) -> int:
        """How many tokens there are."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def span(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Tokens from `begin` to `end`, and where documents begin among them, counted from `begin`."""
        first = int(torch.searchsorted(self.ends, begin, right=True))
        last = int(torch.searchsorted(self._begins, end))
        pieces, starts = [], []
        for i in range(first, last):
            low, high, place = int(self._begins[i]), int(self.ends[i]), int(self._places[i])
            pieces.append(self._tokens.read(place + max(begin, low) - low, place + min(end, high) - low))
            if low >= begin:
                starts.append(low - begin)
        return torch.cat(pieces), torch.tensor(starts, dtype=torch.int64)

    def pack(self, spans: list[tuple[int, int]], fresh: bool) -> Batch:
        """Rows as a batch.

        Args:
            spans: begin and end of each row.
            fresh: no row continues from an earlier state.
        """
        inputs, targets, bounds, carried, last = [], [], [], [], []
        offset = 0
        for row, (begin, end) in enumerate(spans):
            ids, starts = self.span(begin, min(end + 1, len(self)))
            length = end - begin
            wanted = torch.full((length,), IGNORED_LABEL, dtype=torch.int64)
            wanted[: len(ids) - 1] = ids[1:]
            wanted[starts[starts > 0] - 1] = IGNORED_LABEL
            inner = [int(start) for start in starts if 0 < start < length]
            continues = not fresh and not (len(starts) and int(starts[0]) == 0)
            inputs.append(ids[:length])
            targets.append(wanted)
            bounds += [offset, *(offset + start for start in inner)]
            carried += [row if continues else len(spans), *[len(spans)] * len(inner)]
            last.append(len(bounds) - 1)
            offset += length
        return Batch(
            torch.cat(inputs).unsqueeze(0),
            torch.cat(targets).unsqueeze(0),
            torch.tensor([*bounds, offset]),
            torch.tensor(carried),
            torch.tensor(last),
        )


class Batches:
    """The batches of a run.

    "packed": the text is cut into rows, which come in a new random order every time all have been seen.
    "stream": the documents, in a new random order every time, are one text, cut into as many lanes as a step has rows;
    every row continues where the row of the step before it ended.
    """

    def __init__(
        self, tokens: Tokens, *, mode: Literal["packed", "stream"], length: int, rows: int, accumulation: int, seed: int
    ) -> None:
        """Check that there is enough text.

        Raises:
            ValueError: there is less than one row, or one step of a stream.
        """
        self._tokens, self._mode, self._seed = tokens, mode, seed
        self._length, self._rows, self._parts = length, rows, accumulation
        self._sequence, self._epoch = Sequence(tokens), -1
        needed = length if mode == "packed" else length * rows
        if len(self._sequence) < needed:
            raise ValueError(
                f"too little text to train on: expected at least {needed} tokens for batch.length = {length}"
                f"{'' if mode == 'packed' else f' and {rows} streams'}, got {len(self._sequence)}"
            )

    def step(self, step: int) -> list[Batch]:
        """The batches of a step, one for each part of the accumulation."""
        spans, fresh = self._packed(step) if self._mode == "packed" else self._stream(step)
        size = self._rows // self._parts
        return [self._sequence.pack(spans[i : i + size], fresh) for i in range(0, self._rows, size)]

    def _packed(self, step: int) -> tuple[list[tuple[int, int]], bool]:
        count, t = len(self._sequence) // self._length, self._length
        numbers = range(step * self._rows, (step + 1) * self._rows)
        rows = [int(permuted(np.array([i % count]), count, self._seed, i // count)[0]) for i in numbers]
        return [(row * t, (row + 1) * t) for row in rows], True

    def _stream(self, step: int) -> tuple[list[tuple[int, int]], bool]:
        lane = len(self._sequence) // self._rows
        steps = lane // self._length
        epoch, within = divmod(step, steps)
        if epoch != self._epoch:
            count = len(self._tokens.lengths)
            order = permuted(np.arange(count), count, self._seed, epoch)
            self._sequence, self._epoch = Sequence(self._tokens, torch.from_numpy(order)), epoch
        begins = [row * lane + within * self._length for row in range(self._rows)]
        return [(begin, begin + self._length) for begin in begins], within == 0


def segments(tokens: Tokens, length: int) -> list[Batch]:
    """All tokens in order, in batches of one row that continues from the one before it."""
    sequence = Sequence(tokens)
    begins = range(0, len(sequence), length)
    return [sequence.pack([(begin, min(begin + length, len(sequence)))], begin == 0) for begin in begins]


def permuted(index: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Where a random permutation of `count` numbers sends each of `index`, the same on every machine.

    A Feistel network over the next even power of two; what falls outside is sent on until it falls inside.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = _mix(np.array([seed & (2**64 - 1), 0], dtype=np.uint64) + np.array([0, epoch], dtype=np.uint64))
    value, outside = index.astype(np.uint64), np.ones(len(index), dtype=bool)
    while outside.any():
        left, right = value[outside] >> half, value[outside] & mask
        for round in range(4):
            key = keys[round % 2] ^ np.uint64(round)
            left, right = right, left ^ (_mix(_mix(right ^ key) ^ keys[(round + 1) % 2]) & mask)
        value[outside] = (left << half) | right
        outside = value >= count
    return value.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
