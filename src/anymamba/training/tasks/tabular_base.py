"""The base of all tasks on files: sequences are read, cut, held out, scaled and batched.

Letters: b sequences, t time, c numbers per step.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anymamba.core.io import write_json
from anymamba.models import SequenceConfig, SequenceModel
from anymamba.training.config.tabular_config import TabularConfig
from anymamba.training.data.tables import Table, read_tables
from anymamba.training.metrics.loggers import plot_metrics
from anymamba.training.tasks.task import Evaluation, Task

TASK_FILE = "task.json"  # next to the model: what `predict` must know about the files


class SequenceBatch(NamedTuple):
    """Sequences, padded at the end."""

    inputs: Tensor  # bytes as int64, (b, t), or numbers, (b, t, c)
    lengths: Tensor  # length of each sequence, (b,)
    targets: Tensor  # what is to be predicted; the shape depends on the task
    loss_terms: int  # number of terms of the loss

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
    """How numbers are scaled to mean 0 and deviation 1, each channel by itself."""

    mean: np.ndarray  # mean of each channel, (c,)
    deviation: np.ndarray  # standard deviation of each channel, (c,); 1 for one that does not vary

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


class TabularTask(Task[SequenceBatch]):
    """A task on sequences from files.

    Attributes:
        MODEL: Class of the model.
        BETTER: Direction of the first metric, for the user.
        STEPS: Whether a row of a table is a step of a sequence rather than a sequence.
        table: Content of the files, with sequences cut to the config's length.
        scale: Scale of the numbers that are read; None for texts.
        baselines: Scores of simpler methods on the held-out data, by name.
    """

    MODEL: ClassVar[type[SequenceModel]]
    BETTER: ClassVar[str] = "lower is better"
    STEPS: ClassVar[bool] = False
    config: TabularConfig
    baselines: dict[str, float]

    def __init__(self, config: TabularConfig, report: Callable[[str], None]) -> None:
        """Read the files.

        Raises:
            ValueError: The files or the model cannot be used.
        """
        self.config = config
        d = config.data
        self.table = read_tables(d.sources, targets=d.targets, inputs=d.inputs, sequence=d.sequence, steps=self.STEPS)
        self._checksum = checksum(self.table)
        self._dtype = torch.float64 if config.precision.dtype == "float64" else torch.float32
        self.prepare(report)
        SequenceConfig(**self.make_config())  # raises before the first step

    @property
    def fingerprint(self) -> str:
        """Checksum of all sequences and targets."""
        return self._checksum

    @abstractmethod
    def prepare(self, report: Callable[[str], None]) -> None:
        """Bring the sequences and targets into the form that the task needs."""

    def split_and_scale(self, report: Callable[[str], None]) -> None:
        """Cut sequences that are too long, hold some out, and scale all numbers."""
        c, longest = self.config, max(len(x) for x in self.table.sequences)
        if longest > c.batch.length:
            cut = sum(len(x) > c.batch.length for x in self.table.sequences)
            report(f"{cut} sequences are cut to batch.length = {c.batch.length} steps; the longest has {longest}")
        self.table = self.table._replace(sequences=[x[: c.batch.length] for x in self.table.sequences])
        training, held_out = split(self.table, c.seed, c.data.held_out)
        self.training = training
        self.held_out = held_out
        self.scale: Scale | None = None
        if not self.table.is_text:
            self.scale = Scale.of(np.concatenate([self.table.sequences[i] for i in self.training]), c.data.standardize)
            scaled = [self.scale.shrink(x) for x in self.table.sequences]
            self.table = self.table._replace(sequences=scaled)
        report(f"{len(self.training)} sequences to train on, {len(self.held_out)} held out")

    def make_config(self, **fields: Any) -> dict[str, Any]:
        """Return the fields of the model's config."""
        m = self.config.model
        inputs = {"vocab_size": 256} if self.table.is_text else {"input_size": len(self.table.channels)}
        return {
            **inputs,
            "stack": m.stack_fields(),
            "bidirectional": self.config.is_bidirectional,
            "pooling": m.pooling,
            **fields,
        }

    def make_model(self, dtype: torch.dtype) -> SequenceModel:
        """Create the task's model."""
        return self.MODEL(dtype=dtype, **self.make_config())

    def batches(self, step: int) -> list[SequenceBatch]:
        """Return the microbatches of a step: all sequences once, in random order, before any comes again."""
        c = self.config
        numbers = sequences_of_step(c.seed, step, c.batch.rows, len(self.training))
        chosen = [self.training[i] for i in numbers]
        size = c.batch.rows // c.batch.accumulation
        return [self.batch(chosen[i : i + size], step) for i in range(0, len(chosen), size)]

    def batch(self, chosen: list[int], step: int) -> SequenceBatch:
        """Return some sequences with their targets."""
        inputs, lengths = pad_sequences([self.table.sequences[i] for i in chosen], self._dtype)
        return SequenceBatch(inputs, lengths, self.targets(chosen), len(chosen))

    def targets(self, chosen: list[int]) -> Tensor:
        """Return what is to be predicted for some sequences."""
        raise NotImplementedError

    def held_out_batches(self) -> Iterator[SequenceBatch]:
        """Yield the held-out sequences."""
        rows = self.config.batch.rows
        for i in range(0, len(self.held_out), rows):
            yield self.batch(self.held_out[i : i + rows], -1)

    def metadata(self) -> dict[str, Any]:
        """Return what `predict` must know besides the model."""
        d, scale = self.config.data, self.scale
        return {
            "task": self.config.task,
            "columns": self.table.columns,
            "channels": self.table.channels,
            "targets": list(d.targets),
            "sequence": d.sequence,
            "length": self.config.batch.length,
            "scale": None if scale is None else [scale.mean.tolist(), scale.deviation.tolist()],
        }

    def write_model(self, model: SequenceModel, directory: Path) -> None:
        """Write config, weights, and what `predict` must know about the files."""
        write_json(directory / TASK_FILE, self.metadata())
        model.save_pretrained(directory)

    def make_evaluation(self, step: int, values: dict[str, float], words: str) -> Evaluation:
        """Return an evaluation, with the scores of the baselines in its text."""
        baselines = "; ".join(f"{name}: {x:.4f}" for name, x in self.baselines.items())
        return Evaluation(values, f"step {step}: held out {words}, {self.BETTER} ({baselines})")

    def plot(self, directory: Path) -> None:
        """Draw `loss.png`."""
        plot_metrics(directory / "metrics.csv", directory / "loss.png", self.METRICS[0], self.baselines)


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
    """Return the indices of the sequences to train on, and of the held-out ones."""
    count = len(table.sequences)
    if count < 2:
        raise ValueError(f"{table.origins[0]}: expected at least 2 sequences, one of them to hold out, got {count}")
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
