"""Tasks on files: classes or numbers for whole sequences, hidden bytes of texts, and the next value of a series."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.ground.files import write_json
from anymamba.models import (
    LatentModel,
    MaskedLM,
    SequenceClassifier,
    SequenceConfig,
    SequenceModel,
    SequenceRegressor,
    mask_tokens,
)
from anymamba.training.file_config import FileConfig
from anymamba.training.report import plot_metrics
from anymamba.training.sequences import Scale, SequenceBatch, checksum, order_of_step, padded, split
from anymamba.training.step import autocast
from anymamba.training.tables import Table, read_tables
from anymamba.training.task import Evaluation, Task

FACTS = "task.json"  # beside the model: what `predict` has to know of the files
MASK = 256  # the token that stands for a hidden byte
_IGNORED = -100


class FileTask(Task[SequenceBatch]):
    """Sequences from files.

    Attributes:
        table: what the files have, sequences cut to the config's length.
        scale: of the numbers that are read.
        beside: what a simpler method reaches on what is held out, by name.
    """

    KINDS: ClassVar[dict[str, type[FileTask]]] = {}
    MODEL: ClassVar[type[SequenceModel]]
    BETTER: ClassVar[str] = "lower is better"
    STEPS: ClassVar[bool] = False  # a row of a table is a step of one sequence, and not a sequence
    config: FileConfig
    beside: dict[str, float]

    def __init_subclass__(cls, kind: str, **kwargs: Any) -> None:
        """Make the class known by the name of its task."""
        super().__init_subclass__(**kwargs)
        FileTask.KINDS[kind] = cls

    def __init__(self, config: FileConfig, report: Callable[[str], None]) -> None:
        """Read the files."""
        self.config, d = config, config.data
        self.table = read_tables(d.sources, targets=d.targets, inputs=d.inputs, sequence=d.sequence, steps=self.STEPS)
        self._checksum = checksum(self.table)
        self._dtype = torch.float64 if config.precision.dtype == "float64" else torch.float32
        self.prepare(report)
        SequenceConfig(**self.make_config())  # what cannot work is refused before the first step

    @property
    def fingerprint(self) -> str:
        """The checksum of all sequences and targets."""
        return self._checksum

    @abstractmethod
    def prepare(self, report: Callable[[str], None]) -> None:
        """Bring the sequences and targets into the form that the task needs."""

    def split_and_scale(self, report: Callable[[str], None]) -> None:
        """Cut sequences that are too long, hold some out, and bring the numbers of all to one scale."""
        c, longest = self.config, max(len(x) for x in self.table.sequences)
        if longest > c.batch.length:
            cut = sum(len(x) > c.batch.length for x in self.table.sequences)
            report(f"{cut} sequences are longer than batch.length = {c.batch.length}, and are cut ({longest} at most)")
        self.table = self.table._replace(sequences=[x[: c.batch.length] for x in self.table.sequences])
        self.training, self.held_out = split(self.table, c.seed, c.data.held_out)
        self.scale: Scale | None = None
        if not self.table.is_text:
            self.scale = Scale.of(np.concatenate([self.table.sequences[i] for i in self.training]), c.data.standardise)
            scaled = [self.scale.shrink(x) for x in self.table.sequences]
            self.table = self.table._replace(sequences=scaled)
        report(f"{len(self.training)} sequences to train on, {len(self.held_out)} held out")

    def make_config(self, **fields: Any) -> dict[str, Any]:
        """Fields of the model's config."""
        m = self.config.model
        inputs = {"vocab_size": 256} if self.table.is_text else {"input_size": len(self.table.channels)}
        return {
            **inputs,
            "stack": m.stack_fields(),
            "bidirectional": self.config.both_ways,
            "pooling": m.pooling,
            **fields,
        }

    def make_model(self, dtype: torch.dtype) -> SequenceModel:
        """The task's model."""
        return self.MODEL(dtype=dtype, **self.make_config())

    def batches(self, step: int) -> list[SequenceBatch]:
        """All sequences once, in random order, before any comes again."""
        c = self.config
        numbers = order_of_step(c.seed, step, c.batch.rows, len(self.training))
        chosen = [self.training[i] for i in numbers]
        size = c.batch.rows // c.batch.accumulation
        return [self.batch(chosen[i : i + size], step) for i in range(0, len(chosen), size)]

    def batch(self, chosen: list[int], step: int) -> SequenceBatch:
        """Some sequences with their targets."""
        inputs, lengths = padded([self.table.sequences[i] for i in chosen], self._dtype)
        return SequenceBatch(inputs, lengths, self.targets(chosen), len(chosen))

    def targets(self, chosen: list[int]) -> Tensor:
        """What is to be said of some sequences."""
        raise NotImplementedError

    def held_out_batches(self) -> Iterator[SequenceBatch]:
        """What is held out."""
        rows = self.config.batch.rows
        for i in range(0, len(self.held_out), rows):
            yield self.batch(self.held_out[i : i + rows], -1)

    def facts(self) -> dict[str, Any]:
        """What `predict` has to know besides the model."""
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
        """Config, weights, and what `predict` has to know of the files."""
        write_json(directory / FACTS, self.facts())
        model.save_pretrained(directory)

    def evaluated(self, step: int, values: dict[str, float], words: str) -> Evaluation:
        """An evaluation, with what simpler methods reach."""
        beside = "; ".join(f"{name}: {x:.4f}" for name, x in self.beside.items())
        return Evaluation(values, f"step {step}: held out {words}, {self.BETTER} ({beside})")

    def plot(self, directory: Path) -> None:
        """Draw `loss.png`."""
        plot_metrics(directory / "metrics.csv", directory / "loss.png", self.NAMES[0], self.beside)


class Classification(FileTask, kind="classification"):
    """The class of each sequence."""

    NAMES = ("held_out_accuracy", "held_out_nats")
    MODEL = SequenceClassifier
    BETTER = "higher is better"

    def prepare(self, report: Callable[[str], None]) -> None:
        """Number the classes."""
        names = [_label(place, said) for place, said in zip(self.table.places, self.table.targets, strict=True)]
        self.labels = list(self.config.data.labels) or sorted(set(names))
        number = {name: i for i, name in enumerate(self.labels)}
        for place, name in zip(self.table.places, names, strict=True):
            if name not in number:
                known = ", ".join(self.labels[:10])
                raise ValueError(f"{place}: expected one of the labels {known}, got {name!r}")
        if len(self.labels) < 2:
            raise ValueError(f"{self.table.places[0]}: expected at least 2 classes, got {self.labels[0]!r} alone")
        self.numbers = [number[name] for name in names]
        self.split_and_scale(report)
        (common, _), *_ = Counter(self.numbers[i] for i in self.training).most_common(1)
        share = sum(self.numbers[i] == common for i in self.held_out) / len(self.held_out)
        self.beside = {"always the most frequent class": share}

    def make_config(self, **fields: Any) -> dict[str, Any]:
        """An output for each class."""
        return super().make_config(output_size=len(self.labels), labels=self.labels, **fields)

    def targets(self, chosen: list[int]) -> Tensor:
        """Numbers of classes, (b,)."""
        return torch.tensor([self.numbers[i] for i in chosen])

    def cost(self, model: Any, batch: SequenceBatch, carried: None, dtype: torch.dtype) -> tuple[Tensor, None]:
        """Nats."""
        with autocast(model, dtype):
            logits = model(batch.inputs, mask=batch.mask).logits
        return F.cross_entropy(_wide(logits), batch.targets, reduction="sum"), None

    @torch.no_grad()
    def evaluate(self, model: Any, step: int, dtype: torch.dtype) -> Evaluation:
        """The share of held-out sequences whose class has the largest logit, and the mean cost."""
        right, nats = 0, 0.0
        for batch in self.held_out_batches():
            batch = batch.to(next(model.parameters()).device)
            with autocast(model, dtype):
                logits = _wide(model(batch.inputs, mask=batch.mask).logits)
            right += int((logits.argmax(-1) == batch.targets).sum())
            nats += F.cross_entropy(logits, batch.targets, reduction="sum").item()
        n = len(self.held_out)
        values = {"held_out_accuracy": right / n, "held_out_nats": nats / n}
        return self.evaluated(step, values, f"accuracy {right / n:.4f} ({right} of {n})")


class Regression(FileTask, kind="regression"):
    """Some numbers for each sequence."""

    NAMES = ("held_out_rmse",)
    MODEL = SequenceRegressor

    def prepare(self, report: Callable[[str], None]) -> None:
        """Bring the targets to one scale."""
        rows, names = [], self.config.data.targets
        for place, said in zip(self.table.places, self.table.targets, strict=True):
            rows.append([_target(place, " ".join(names), x) for x in said])
            if len(rows[-1]) != len(rows[0]):
                raise ValueError(f"{place}: expected {len(rows[0])} numbers to predict, got {len(rows[-1])}")
        self.split_and_scale(report)
        values = np.array(rows)
        self.target_scale = Scale.of(values[self.training], self.config.data.standardise)
        self.numbers = self.target_scale.shrink(values)
        error = values[self.held_out] - values[self.training].mean(0)
        self.beside = {"always the mean": math.sqrt((error**2).mean())}

    def make_config(self, **fields: Any) -> dict[str, Any]:
        """An output for each number."""
        return super().make_config(output_size=self.numbers.shape[1], **fields)

    def facts(self) -> dict[str, Any]:
        """With the scale of what is predicted."""
        return {**super().facts(), "target_scale": [x.tolist() for x in self.target_scale]}

    def targets(self, chosen: list[int]) -> Tensor:
        """Numbers, (b, o)."""
        return torch.tensor(self.numbers[chosen], dtype=self._dtype)

    def cost(self, model: Any, batch: SequenceBatch, carried: None, dtype: torch.dtype) -> tuple[Tensor, None]:
        """Squared errors, the mean over the numbers of a sequence."""
        with autocast(model, dtype):
            found = model(batch.inputs, mask=batch.mask).logits
        return (_wide(found) - batch.targets).square().mean(1).sum(), None

    @torch.no_grad()
    def evaluate(self, model: Any, step: int, dtype: torch.dtype) -> Evaluation:
        """The root of the mean squared error, in the units of the files."""
        errors = []
        for batch in self.held_out_batches():
            batch = batch.to(next(model.parameters()).device)
            with autocast(model, dtype):
                found = _wide(model(batch.inputs, mask=batch.mask).logits)
            errors.append((found - batch.targets).double().cpu().numpy() * self.target_scale.deviation)
        rmse = math.sqrt((np.concatenate(errors) ** 2).mean())
        return self.evaluated(step, {"held_out_rmse": rmse}, f"root mean squared error {rmse:.5g}")


class MaskedLanguage(FileTask, kind="masked-lm"):
    """Hidden bytes of texts."""

    NAMES = ("held_out_bits_per_hidden_byte", "held_out_accuracy")
    MODEL = MaskedLM

    def prepare(self, report: Callable[[str], None]) -> None:
        """Cut texts into pieces."""
        if not self.table.is_text:
            raise ValueError(f"{self.table.places[0]}: masked-lm reads texts, a field of JSON lines, got numbers")
        length, places, pieces = self.config.batch.length, list[str](), list[np.ndarray]()
        for place, x in zip(self.table.places, self.table.sequences, strict=True):
            cut = [x[i : i + length] for i in range(0, len(x), length)]
            pieces += cut
            places += [place] * len(cut)
        self.table = self.table._replace(sequences=pieces, places=places, targets=[[]] * len(pieces))
        self.split_and_scale(report)
        counts = np.bincount(np.concatenate([pieces[i] for i in self.training]), minlength=256) + 1.0
        bits = -np.log2(counts / counts.sum())
        self.beside = {"by frequency": float(bits[np.concatenate([pieces[i] for i in self.held_out])].mean())}

    def make_config(self, **fields: Any) -> dict[str, Any]:
        """Bytes, and the token that hides one."""
        return super().make_config(**{"vocab_size": MASK + 1, **fields})

    def batch(self, chosen: list[int], step: int) -> SequenceBatch:
        """Some texts with bytes hidden, by the step or, held out, always the same."""
        ids, lengths = padded([self.table.sequences[i] for i in chosen], self._dtype)
        seed = np.random.SeedSequence([self.config.seed, step + 1, chosen[0]]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(seed) >> 1)
        hidden, labels = mask_tokens(ids, MASK, share=self.config.batch.hidden, generator=generator)
        real = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
        labels = labels.masked_fill(~real, _IGNORED)
        return SequenceBatch(torch.where(real, hidden, 0), lengths, labels, int((labels != _IGNORED).sum()))

    def cost(self, model: Any, batch: SequenceBatch, carried: None, dtype: torch.dtype) -> tuple[Tensor, None]:
        """Nats."""
        with autocast(model, dtype):
            logits = model(batch.inputs, mask=batch.mask).logits
        return _hidden_nats(logits, batch.targets), None

    @torch.no_grad()
    def evaluate(self, model: Any, step: int, dtype: torch.dtype) -> Evaluation:
        """Bits of a hidden byte, and the share of them that is found."""
        nats, count, right = 0.0, 0, 0
        for batch in self.held_out_batches():
            batch = batch.to(next(model.parameters()).device)
            with autocast(model, dtype):
                logits = model(batch.inputs, mask=batch.mask).logits
            nats += _hidden_nats(logits, batch.targets).item()
            right += int((logits.argmax(-1) == batch.targets).sum())
            count += batch.counted
        bits, share = nats / math.log(2) / max(1, count), right / max(1, count)
        values = {"held_out_bits_per_hidden_byte": bits, "held_out_accuracy": share}
        return self.evaluated(step, values, f"{bits:.4f} bits per hidden byte, {100 * share:.1f} % found")


class NextValue(FileTask, kind="next-value"):
    """The next value of each series; its end is held out."""

    NAMES = ("held_out_rmse",)
    MODEL = LatentModel
    STEPS = True

    def prepare(self, report: Callable[[str], None]) -> None:
        """Cut off the end of each series."""
        c = self.config
        if self.table.is_text:
            raise ValueError(f"{self.table.places[0]}: next-value reads numbers, got a text")
        self.cuts = []
        for place, x in zip(self.table.places, self.table.sequences, strict=True):
            held = max(1, round(c.data.held_out * len(x)))
            if len(x) - held < 2:
                raise ValueError(f"{place}: expected a series of at least 3 values, got {len(x)}")
            self.cuts.append(len(x) - held)
        known = [x[:cut] for x, cut in zip(self.table.sequences, self.cuts, strict=True)]
        self.scale = Scale.of(np.concatenate(known), c.data.standardise)
        self.series = [self.scale.shrink(x) for x in self.table.sequences]
        steps = [(x[1:] - x[:-1])[cut - 1 :] for x, cut in zip(self.table.sequences, self.cuts, strict=True)]
        self.beside = {"the last value": math.sqrt((np.concatenate(steps) ** 2).mean())}
        values = sum(len(x) for x in self.series)
        report(f"{len(self.series)} series of {values} steps, the last {values - sum(self.cuts)} of them held out")

    def make_config(self, **fields: Any) -> dict[str, Any]:
        """An output for each number of a step."""
        return super().make_config(output_size=len(self.table.channels), **fields)

    def batches(self, step: int) -> list[SequenceBatch]:
        """Windows from anywhere in the known parts, the longer series more often."""
        c = self.config
        rng = np.random.default_rng([c.seed, step])
        cuts = np.array(self.cuts)
        windows = []
        for i in rng.choice(len(cuts), c.batch.rows, p=(cuts - 1) / (cuts - 1).sum()):
            length = min(c.batch.length, cuts[i] - 1)
            start = rng.integers(cuts[i] - length)
            windows.append(self.series[i][start : start + length + 1])
        size = c.batch.rows // c.batch.accumulation
        return [self._windows(windows[i : i + size]) for i in range(0, len(windows), size)]

    def _windows(self, windows: list[np.ndarray]) -> SequenceBatch:
        values, lengths = padded(windows, self._dtype)
        return SequenceBatch(values[:, :-1], lengths - 1, values[:, 1:], int((lengths - 1).sum()))

    def cost(self, model: Any, batch: SequenceBatch, carried: None, dtype: torch.dtype) -> tuple[Tensor, None]:
        """Squared errors of the next values, the mean over the numbers of a step."""
        with autocast(model, dtype):
            found = model(batch.inputs, mask=batch.mask)
        real = torch.arange(found.shape[1], device=found.device) < batch.lengths.unsqueeze(1)
        errors = (_wide(found) - batch.targets).square().mean(-1)
        return errors.masked_fill(~real, 0).sum(), None

    @torch.no_grad()
    def evaluate(self, model: Any, step: int, dtype: torch.dtype) -> Evaluation:
        """The root of the mean squared error of the held-out values, each from all values before it."""
        assert self.scale is not None
        errors = []
        device = next(model.parameters()).device
        for x, cut in zip(self.series, self.cuts, strict=True):
            inputs = torch.tensor(x[None], dtype=self._dtype, device=device)
            cache, outputs = None, []
            with autocast(model, dtype):
                for part in inputs[:, :-1].split(self.config.batch.length, dim=1):
                    y, cache = model.prefill(part, cache)
                    outputs.append(_wide(y))
            found = torch.cat(outputs, 1)[0, cut - 1 :].double().cpu().numpy()
            errors.append((found - x[cut:]) * self.scale.deviation)
        rmse = math.sqrt((np.concatenate(errors) ** 2).mean())
        return self.evaluated(step, {"held_out_rmse": rmse}, f"root mean squared error {rmse:.5g}")


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _hidden_nats(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(_wide(logits).flatten(0, 1), labels.flatten(), ignore_index=_IGNORED, reduction="sum")


def _label(place: str, said: list[Any]) -> str:
    """The name of a class; whole numbers as such, however they are written."""
    if len(said) != 1 or isinstance(said[0], list | dict) or said[0] is None or said[0] == "":
        raise ValueError(f"{place}: expected a class, a text or a number, got {said if len(said) != 1 else said[0]!r}")
    value = said[0]
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _target(place: str, names: str, text: Any) -> float:
    try:
        value = float(text)
    except (TypeError, ValueError):
        raise ValueError(f"{place}: {names} must be a number, got {text!r:.60}") from None
    if not math.isfinite(value):
        raise ValueError(f"{place}: {names} must be a finite number, got {text!r:.60}")
    return value


def file_task(config: FileConfig, report: Callable[[str], None]) -> FileTask:
    """The task that a config asks for, with its files read.

    Raises:
        ValueError: the files or the model cannot work.
    """
    return FileTask.KINDS[config.task](config, report)


def open_table(facts: dict[str, Any], path: str) -> Table:
    """The sequences of a file to predict for, read as those of the training were; targets in it are left alone.

    Raises:
        ValueError: something in it cannot be used, or it has other inputs.
    """
    steps = FileTask.KINDS[facts["task"]].STEPS
    columns = facts["columns"] if not path.endswith(".npy") else []
    table = read_tables([path], inputs=columns, sequence=facts["sequence"], steps=steps)
    if len(table.channels) != len(facts["channels"]) or table.is_text != (facts["channels"] == ["text"]):
        expected, found = " ".join(facts["channels"]), " ".join(table.channels)
        raise ValueError(f"{path}: expected the inputs that the model was trained on, {expected}, got {found}")
    return table
