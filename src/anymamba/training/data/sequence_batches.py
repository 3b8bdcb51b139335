"""Batches of tasks on files: padded sequences with scaled numbers.

Letters: b sequences, t time, c numbers per step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anymamba.training.data.tables import Table


class SequenceBatch(NamedTuple):
    """Sequences, padded at the end.

    Attributes:
        inputs: Bytes as int64, (b, t), or numbers, (b, t, c).
        lengths: Length of each sequence, (b,).
        targets: What is to be predicted; the shape depends on the task.
        loss_terms: Number of terms of the loss.
    """

    inputs: Tensor
    lengths: Tensor
    targets: Tensor
    loss_terms: int

    @property
    def tokens(self) -> int:
        """Number of steps that are read, without padding."""
        return int(self.lengths.sum())

    @property
    def mask(self) -> Tensor | None:
        """Return the lengths, or None if all sequences are as long as the batch."""
        return None if bool((self.lengths == self.inputs.shape[1]).all()) else self.lengths

    def to(self, device: torch.device) -> SequenceBatch:
        """Move the batch to a device."""
        return SequenceBatch(self.inputs.to(device), self.lengths.to(device), self.targets.to(device), self.loss_terms)


class Scale(NamedTuple):
    """How numbers are scaled to mean 0 and deviation 1, each channel by itself.

    Attributes:
        mean: Mean of each channel, (c,).
        deviation: Standard deviation of each channel, (c,); 1 for one that does not vary.
    """

    mean: np.ndarray
    deviation: np.ndarray

    @staticmethod
    def of(rows: np.ndarray, enabled: bool = True) -> Scale:
        """Return the scale of rows (n, c), or one that changes nothing if not `enabled`."""
        if not enabled:
            return Scale(np.zeros(rows.shape[1]), np.ones(rows.shape[1]))
        deviation = rows.std(0)
        return Scale(rows.mean(0), np.where(deviation > 0, deviation, 1.0))

    def shrink(self, x: np.ndarray) -> np.ndarray:
        """Scale numbers to mean 0 and deviation 1."""
        return (x - self.mean) / self.deviation

    def grow(self, x: np.ndarray) -> np.ndarray:
        """Scale numbers back."""
        return x * self.deviation + self.mean


def pad_sequences(sequences: Sequence[np.ndarray], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return sequences in one tensor with zeros after each, and their lengths; bytes become int64."""
    lengths = torch.tensor([len(x) for x in sequences])
    is_text = sequences[0].ndim == 1
    shape = (len(sequences), int(lengths.max()), *sequences[0].shape[1:])
    padded = torch.zeros(shape, dtype=torch.int64 if is_text else dtype)
    for row, x in zip(padded, sequences, strict=True):
        row[: len(x)] = torch.from_numpy(np.ascontiguousarray(x)).to(padded.dtype)
    return padded, lengths


def sequences_of_step(seed: int, step: int, rows: int, count: int) -> list[int]:
    """Return the sequences that a step reads: all come once, in random order, before any comes again."""
    indices, orders = [], dict[int, np.ndarray]()
    for i in range(step * rows, (step + 1) * rows):
        epoch, position = divmod(i, count)
        if epoch not in orders:
            orders[epoch] = np.random.default_rng([seed, epoch]).permutation(count)
        indices.append(int(orders[epoch][position]))
    return indices


def split(table: Table, seed: int, fraction: float) -> tuple[list[int], list[int]]:
    """Return the indices of the sequences to train on, and of the held-out ones.

    Raises:
        ValueError: There are too few sequences.
    """
    count = len(table.sequences)
    if count < 2:
        raise ValueError(f"{table.places[0]}: expected at least 2 sequences, one of them to hold out, got {count}")
    order = np.random.default_rng(seed).permutation(count).tolist()
    held = min(count - 1, max(1, round(fraction * count)))
    return sorted(order[held:]), sorted(order[:held])


def checksum(table: Table) -> str:
    """Return a checksum of every number, byte and target."""
    digest = hashlib.blake2b(digest_size=16)
    for x, target in zip(table.sequences, table.targets, strict=True):
        digest.update(f"{x.dtype} {x.shape} {target}".encode())
        digest.update(np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()
