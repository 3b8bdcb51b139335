"""Batches: which tokens a step reads, as a pure function of the seed and the step.

Rows of fixed length are cut from the documents and laid end to end in one sequence, with a boundary wherever a row or a
document begins. No state crosses a boundary, except that of a row that continues a stream.

Letters: t tokens of a batch, z sequences in it, r rows.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from anymamba.core.context_parallel import ContextParallelGroup, SequencePart
from anymamba.models.loss import IGNORED_LABEL
from anymamba.training.data.shards import Tokens


class Batch(NamedTuple):
    """Rows, packed.

    Attributes:
        inputs: tokens, (1, t).
        targets: the token after each, (1, t); `IGNORED_LABEL` at the end of a document.
        cu_seqlens: where the sequences begin, and t, (z + 1,).
        carried: the row whose state each sequence continues from, (z,); the number of rows for a fresh start.
        last: the last sequence of each row, (r,), whose state the row continues from.
        context: of a batch that several workers share, of which this is a part; `last` is then -1 for rows that do not
            end here.
    """

    inputs: Int[Tensor, "1 t"]
    targets: Int[Tensor, "1 t"]
    cu_seqlens: Int[Tensor, " z1"]
    carried: Int[Tensor, " z"]
    last: Int[Tensor, " r"]
    context: SequencePart | None = None

    @property
    def tokens(self) -> int:
        """Tokens that are read."""
        return self.inputs.numel()

    @property
    def loss_terms(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORED_LABEL).sum())

    def to(self, device: torch.device) -> Batch:
        """On another device."""
        inputs, targets, bounds, carried, last = (x.to(device) for x in self[:5])
        return Batch(inputs, targets, bounds, carried, last, self.context)


class Sequence:
    """Documents in some order, as one sequence of tokens."""

    def __init__(self, tokens: Tokens, order: Int[Tensor, " documents"] | None = None) -> None:
        """Take the documents that have tokens, in the order of `order`, or in that of the shards."""
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

    def pack(self, spans: list[tuple[int, int]], fresh: bool, cp_group: ContextParallelGroup | None = None) -> Batch:
        """Rows as a batch.

        Args:
            spans: begin and end of each row.
            fresh: whether no row continues from an earlier state.
            cp_group: the workers that share the batch.
        """
        if cp_group is not None:
            return self._part(spans, fresh, cp_group)
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

    def _part(self, spans: list[tuple[int, int]], fresh: bool, cp_group: ContextParallelGroup) -> Batch:
        """This worker's part of rows that several share: as many tokens as the others have, and no others are read."""
        begin, end = cp_group.part_bounds(sum(stop - start for start, stop in spans))
        here, whole, offset = [], [], 0
        for row, (start, stop) in enumerate(spans):
            low, high = max(begin, offset), min(end, offset + stop - start)
            if low < high:
                here.append((start + low - offset, start + high - offset))
                whole.append((row, low == offset, high == offset + stop - start))
            offset += stop - start
        batch = self.pack(here, fresh)
        carried, last = torch.full_like(batch.carried, len(spans)), torch.full((len(spans),), -1)
        inner = [False] * len(here)
        for number, (row, begins, ends) in enumerate(whole):
            first = 0 if number == 0 else int(batch.last[number - 1]) + 1
            continues = not self._begins_at(here[number][0])
            if begins and continues and not fresh:
                carried[first] = row
            inner[number] = continues and not begins
            if ends:
                last[row] = batch.last[number]
        # A part ends within a sequence where its row continues and no document begins after it.
        after = not whole[-1][2] and not self._begins_at(here[-1][1])
        return batch._replace(carried=carried, last=last, context=SequencePart(cp_group, inner[0], after))

    def _begins_at(self, place: int) -> bool:
        """Whether a document begins there."""
        index = int(torch.searchsorted(self._begins, place))
        return index < len(self._begins) and int(self._begins[index]) == place


class Batches:
    """The batches of a run.

    "packed": the text is cut into rows, which come in a new random order whenever all have been seen.
    "stream": the documents, in a new random order each time, are one text, cut into as many lanes as a step has rows;
    every row continues where its lane ended in the step before.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        mode: Literal["packed", "stream"],
        length: int,
        rows: int,
        accumulation: int,
        seed: int,
        reader: int = 0,
        readers: int = 1,
        cp_group: ContextParallelGroup | None = None,
    ) -> None:
        """Check that there is enough text.

        Args:
            tokens: of all documents.
            mode: how rows are cut and follow each other.
            length: of a row.
            rows: of a step, those of all workers.
            accumulation: parts of a step.
            seed: of the order.
            reader: which of the `readers` this worker is; they divide the rows of each part.
            readers: how many there are.
            cp_group: the workers that share the same rows.

        Raises:
            ValueError: there is less text than one row, or than one step of a stream.
        """
        self._tokens, self._mode, self._seed = tokens, mode, seed
        self._length, self._rows, self._parts = length, rows, accumulation
        self._reader, self._readers, self._cp_group = reader, readers, cp_group
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
        own = size // self._readers
        begins = range(self._reader * own, self._rows, size)
        return [self._sequence.pack(spans[i : i + own], fresh, self._cp_group) for i in begins]

    def _packed(self, step: int) -> tuple[list[tuple[int, int]], bool]:
        count, t = len(self._sequence) // self._length, self._length
        numbers = range(step * self._rows, (step + 1) * self._rows)
        rows = [int(permute_indices(np.array([i % count]), count, self._seed, i // count)[0]) for i in numbers]
        return [(row * t, (row + 1) * t) for row in rows], True

    def _stream(self, step: int) -> tuple[list[tuple[int, int]], bool]:
        lane = len(self._sequence) // self._rows
        steps = lane // self._length
        epoch, within = divmod(step, steps)
        if epoch != self._epoch:
            count = len(self._tokens.lengths)
            order = permute_indices(np.arange(count), count, self._seed, epoch)
            self._sequence, self._epoch = Sequence(self._tokens, torch.from_numpy(order)), epoch
        begins = [row * lane + within * self._length for row in range(self._rows)]
        return [(begin, begin + self._length) for begin in begins], within == 0


def segments(tokens: Tokens, length: int, first: int = 0, last: int | None = None) -> list[Batch]:
    """Tokens from `first` to `last`, or all, in batches of one row, each of which continues the one before it."""
    sequence = Sequence(tokens)
    last = len(sequence) if last is None else last
    begins = range(first, last, length)
    return [sequence.pack([(begin, min(begin + length, last))], begin == first) for begin in begins]


def permute_indices(index: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Where a random permutation of `count` numbers sends each of `index`, the same on every machine.

    A Feistel network over the next even power of two; what falls outside is permuted again until it falls inside.
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
    """The finalizer of splitmix64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
