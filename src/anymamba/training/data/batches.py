"""Batches: which tokens a step reads, as a pure function of the seed and the step.

Rows of fixed length are cut from the documents and packed into one sequence, with a boundary wherever a row or a
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
    """Packed rows, or this rank's part of them (`context`) if several ranks share a batch."""

    inputs: Int[Tensor, "1 t"]
    targets: Int[Tensor, "1 t"]  # the token after each input; `IGNORED_LABEL` at the end of a document
    cu_seqlens: Int[Tensor, " z1"]  # where the sequences begin, followed by t
    carried: Int[Tensor, " z"]  # the row whose state each sequence continues from; the number of rows for a zero state
    last: Int[Tensor, " r"]  # the last sequence of each row, whose state it continues from; -1 if on another rank
    context: SequencePart | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens that are read."""
        return self.inputs.numel()

    @property
    def loss_terms(self) -> int:
        """Number of targets that are not ignored."""
        return int((self.targets != IGNORED_LABEL).sum())

    def to(self, device: torch.device) -> Batch:
        """Move the batch to a device."""
        inputs, targets, bounds, carried, last = (x.to(device) for x in self[:5])
        return Batch(inputs, targets, bounds, carried, last, self.context)


class Sequence:
    """Documents in some order, as one sequence of tokens."""

    def __init__(self, tokens: Tokens, order: Int[Tensor, " documents"] | None = None) -> None:
        """Take the documents that have tokens, in the order of `order` or else of the shards."""
        self._tokens = tokens
        order = torch.arange(len(tokens.lengths)) if order is None else order
        order = order[tokens.lengths[order] > 0]
        offsets = tokens.lengths.cumsum(0) - tokens.lengths
        self._offsets = offsets[order]  # of each document in the shards
        self.ends = tokens.lengths[order].cumsum(0)  # of each document in this sequence
        self._begins = self.ends - tokens.lengths[order]

    def __len__(self) -> int:
        """Return the number of tokens."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def span(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the tokens from `begin` to `end`, and where documents begin among them, counted from `begin`."""
        first = int(torch.searchsorted(self.ends, begin, right=True))
        last = int(torch.searchsorted(self._begins, end))
        parts, starts = [], []
        for i in range(first, last):
            low, high, offset = int(self._begins[i]), int(self.ends[i]), int(self._offsets[i])
            parts.append(self._tokens.read(offset + max(begin, low) - low, offset + min(end, high) - low))
            if low >= begin:
                starts.append(low - begin)
        return torch.cat(parts), torch.tensor(starts, dtype=torch.int64)

    def pack(self, spans: list[tuple[int, int]], fresh: bool, cp_group: ContextParallelGroup | None = None) -> Batch:
        """Pack rows, given by begin and end, into a batch, or this rank's part of one that `cp_group` shares.

        `fresh` means that no row continues from an earlier state.
        """
        if cp_group is not None:
            return self._pack_part(spans, fresh, cp_group)
        inputs, targets, bounds, carried, last = [], [], [], [], []
        offset = 0
        for row, (begin, end) in enumerate(spans):
            # 1) The tokens of the row, and the one after it, which is its last target.
            ids, starts = self.span(begin, min(end + 1, len(self)))
            length = end - begin
            # 2) Targets: the next token, but none across the end of a document.
            row_targets = torch.full((length,), IGNORED_LABEL, dtype=torch.int64)
            row_targets[: len(ids) - 1] = ids[1:]
            row_targets[starts[starts > 0] - 1] = IGNORED_LABEL
            # 3) Boundaries: one where the row begins, and one where a document begins within it.
            inner = [int(start) for start in starts if 0 < start < length]
            continues = not fresh and not (len(starts) and int(starts[0]) == 0)
            inputs.append(ids[:length])
            targets.append(row_targets)
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

    def _pack_part(self, spans: list[tuple[int, int]], fresh: bool, cp_group: ContextParallelGroup) -> Batch:
        """Pack this rank's part of rows that several ranks share: each reads as many tokens as the others."""
        # 1) Intersect the rows with this rank's part of all tokens.
        begin, end = cp_group.part_bounds(sum(stop - start for start, stop in spans))
        local_spans, rows, offset = [], [], 0
        for row, (start, stop) in enumerate(spans):
            low, high = max(begin, offset), min(end, offset + stop - start)
            if low < high:
                local_spans.append((start + low - offset, start + high - offset))
                rows.append((row, low == offset, high == offset + stop - start))
            offset += stop - start
        batch = self.pack(local_spans, fresh)
        # 2) Number rows as all ranks do, and find which of them begin, continue and end on this rank.
        carried = torch.full_like(batch.carried, len(spans))
        last = torch.full((len(spans),), -1)
        continues_inside = [False] * len(local_spans)
        for number, (row, begins, ends) in enumerate(rows):
            first = 0 if number == 0 else int(batch.last[number - 1]) + 1
            continues = not self._begins_at(local_spans[number][0])
            if begins and continues and not fresh:
                carried[first] = row
            continues_inside[number] = continues and not begins
            if ends:
                last[row] = batch.last[number]
        # 3) The part ends within a sequence if its last row continues and no document begins there.
        continues_after = not rows[-1][2] and not self._begins_at(local_spans[-1][1])
        context = SequencePart(cp_group, continues_inside[0], continues_after)
        return batch._replace(carried=carried, last=last, context=context)

    def _begins_at(self, position: int) -> bool:
        """Return whether a document begins at a position of the sequence."""
        index = int(torch.searchsorted(self._begins, position))
        return index < len(self._begins) and int(self._begins[index]) == position


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
        dp_rank: int = 0,
        dp_size: int = 1,
        cp_group: ContextParallelGroup | None = None,
    ) -> None:
        """Raise `ValueError` if there is less text than one row, or than one step of a stream.

        A step has `rows` rows over all ranks and microbatches, each of `length` tokens. Of each of the `accumulation`
        microbatches, this rank reads part `dp_rank` of `dp_size`; it shares each row with the ranks of `cp_group`.
        """
        self._tokens = tokens
        self._mode = mode
        self._length = length
        self._rows = rows
        self._accumulation = accumulation
        self._seed = seed
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._cp_group = cp_group
        self._sequence = Sequence(tokens)
        self._epoch = -1
        needed = length if mode == "packed" else length * rows
        if len(self._sequence) < needed:
            raise ValueError(
                f"too little text to train on: expected at least {needed} tokens for batch.length = {length}"
                f"{'' if mode == 'packed' else f' and {rows} streams'}, got {len(self._sequence)}"
            )

    def step(self, step: int) -> list[Batch]:
        """Return the batches of a step, one per microbatch."""
        spans, fresh = self._packed_spans(step) if self._mode == "packed" else self._stream_spans(step)
        return [self._sequence.pack(spans[rows], fresh, self._cp_group) for rows in self.local_rows()]

    def local_rows(self) -> list[slice]:
        """Return the rows of a step that this rank reads, for each microbatch."""
        rows = self._rows // self._accumulation
        size = rows // self._dp_size
        return [slice(begin, begin + size) for begin in range(self._dp_rank * size, self._rows, rows)]

    def _packed_spans(self, step: int) -> tuple[list[tuple[int, int]], bool]:
        count, t = len(self._sequence) // self._length, self._length
        numbers = range(step * self._rows, (step + 1) * self._rows)
        rows = [int(permute_indices(np.array([i % count]), count, self._seed, i // count)[0]) for i in numbers]
        return [(row * t, (row + 1) * t) for row in rows], True

    def _stream_spans(self, step: int) -> tuple[list[tuple[int, int]], bool]:
        lane = len(self._sequence) // self._rows
        steps = lane // self._length
        epoch, within = divmod(step, steps)
        if epoch != self._epoch:
            count = len(self._tokens.lengths)
            order = permute_indices(np.arange(count), count, self._seed, epoch)
            self._sequence = Sequence(self._tokens, torch.from_numpy(order))
            self._epoch = epoch
        begins = [row * lane + within * self._length for row in range(self._rows)]
        return [(begin, begin + self._length) for begin in begins], within == 0


def segments(tokens: Tokens, length: int, first: int = 0, last: int | None = None) -> list[Batch]:
    """Return tokens, by default all, in batches of one row, each of which continues the one before."""
    sequence = Sequence(tokens)
    last = len(sequence) if last is None else last
    begins = range(first, last, length)
    return [sequence.pack([(begin, min(begin + length, last))], begin == first) for begin in begins]


def permute_indices(index: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Map indices below `count` through a random permutation that is the same on every machine.

    The permutation is a Feistel network over the next even power of two; results beyond `count` are permuted again
    until they are below.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = _mix(np.array([seed & (2**64 - 1), 0], dtype=np.uint64) + np.array([0, epoch], dtype=np.uint64))
    value = index.astype(np.uint64)
    outside = np.ones(len(index), dtype=bool)
    while outside.any():
        left, right = value[outside] >> half, value[outside] & mask
        for round in range(4):
            key = keys[round % 2] ^ np.uint64(round)
            left, right = right, left ^ (_mix(_mix(right ^ key) ^ keys[(round + 1) % 2]) & mask)
        value[outside] = (left << half) | right
        outside = value >= count
    return value.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
