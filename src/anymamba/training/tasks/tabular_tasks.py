"""The tasks on files: classes and numbers of sequences, hidden bytes of texts, and the next value of a series."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.models import LatentModel, MaskedLM, SequenceClassifier, SequenceRegressor, mask_tokens
from anymamba.models.loss import IGNORED_LABEL
from anymamba.training.config.tabular_config import TabularConfig
from anymamba.training.data.tables import parse_number
from anymamba.training.tasks.tabular_base import Scale, SequenceBatch, TabularTask, pad_sequences
from anymamba.training.tasks.task import Evaluation, at_least_float32, autocast


class Classification(TabularTask):
    """The class of each sequence."""

    METRICS = ("held_out_accuracy", "held_out_nats")
    MODEL = SequenceClassifier
    BETTER = "higher is better"

    def prepare(self, report: Callable[[str], None]) -> None:
        """Number the classes."""
        names = [_label(origin, target) for origin, target in zip(self.table.origins, self.table.targets, strict=True)]
        self.labels = list(self.config.data.labels) or sorted(set(names))
        number = {name: i for i, name in enumerate(self.labels)}
        for origin, name in zip(self.table.origins, names, strict=True):
            if name not in number:
                known = ", ".join(self.labels[:10])
                raise ValueError(f"{origin}: expected one of the labels {known}, got {name!r}")
        if len(self.labels) < 2:
            raise ValueError(f"{self.table.origins[0]}: expected at least 2 classes, got {self.labels[0]!r} alone")
        self.numbers = [number[name] for name in names]
        self.split_and_scale(report)
        (common, _), *_ = Counter(self.numbers[i] for i in self.training).most_common(1)
        fraction = sum(self.numbers[i] == common for i in self.held_out) / len(self.held_out)
        self.baselines = {"always the most frequent class": fraction}

    def make_config(self, **fields: Any) -> dict[str, Any]:
        """Add an output for each class."""
        return super().make_config(output_size=len(self.labels), labels=self.labels, **fields)

    def targets(self, chosen: list[int]) -> Tensor:
        """Return numbers of classes, (b,)."""
        return torch.tensor([self.numbers[i] for i in chosen])

    def loss(self, model: Any, batch: SequenceBatch, carried: None, dtype: torch.dtype) -> tuple[Tensor, None]:
        """Compute the cross-entropy in nats."""
        return F.cross_entropy(_logits(model, batch, dtype), batch.targets, reduction="sum"), None

    @torch.no_grad()
    def evaluate(self, model: Any, step: int, dtype: torch.dtype) -> Evaluation:
        """Compute the fraction of held-out sequences whose class has the largest logit, and the mean loss."""
        right, nats = 0, 0.0
        for batch, logits in _held_out_logits(self, model, dtype):
            right += int((logits.argmax(-1) == batch.targets).sum())
            nats += F.cross_entropy(logits, batch.targets, reduction="sum").item()
        n = len(self.held_out)
        values = {"held_out_accuracy": right / n, "held_out_nats": nats / n}
        return self.make_evaluation(step, values, f"accuracy {right / n:.4f} ({right} of {n})")


class Regression(TabularTask):
    """Some numbers for each sequence."""

    METRICS = ("held_out_rmse",)
    MODEL = SequenceRegressor

    def prepare(self, report: Callable[[str], None]) -> None:
        """Scale the targets."""
        rows, names = [], self.config.data.targets
        for origin, target in zip(self.table.origins, self.table.targets, strict=True):
            rows.append([parse_number(origin, " ".join(names), x, allow_bool=True) for x in target])
            if len(rows[-1]) != len(rows[0]):
                raise ValueError(f"{origin}: expected {len(rows[0])} numbers to predict, got {len(rows[-1])}")
        self.split_and_scale(report)
        values = np.array(rows)
        self.target_scale = Scale.of(values[self.training], self.config.data.standardize)
        self.numbers = self.target_scale.shrink(values)
        error = values[self.held_out] - values[self.training].mean(0)
        self.baselines = {"always the mean": math.sqrt((error**2).mean())}

    def make_config(self, **fields: Any) -> dict[str, Any]:
        """Add an output for each number."""
        return super().make_config(output_size=self.numbers.shape[1], **fields)

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of all tasks, with the scale of the targets."""
        return {**super().metadata(), "target_scale": [x.tolist() for x in self.target_scale]}

    def targets(self, chosen: list[int]) -> Tensor:
        """Return numbers, (b, o)."""
        return torch.tensor(self.numbers[chosen], dtype=self._dtype)

    def loss(self, model: Any, batch: SequenceBatch, carried: None, dtype: torch.dtype) -> tuple[Tensor, None]:
        """Compute the squared error, averaged over the numbers of a sequence."""
        return (_logits(model, batch, dtype) - batch.targets).square().mean(1).sum(), None

    @torch.no_grad()
    def evaluate(self, model: Any, step: int, dtype: torch.dtype) -> Evaluation:
        """Compute the root of the mean squared error, in the units of the files."""
        errors = []
        for batch, outputs in _held_out_logits(self, model, dtype):
            errors.append((outputs - batch.targets).double().cpu().numpy() * self.target_scale.deviation)
        rmse = math.sqrt((np.concatenate(errors) ** 2).mean())
        return self.make_evaluation(step, {"held_out_rmse": rmse}, f"root mean squared error {rmse:.5g}")


def _label(origin: str, target: list[Any]) -> str:
    """Return the name of a class: a text as it is written; an integer of JSON or of an array without decimals."""
    if len(target) != 1 or isinstance(target[0], list | dict) or target[0] is None or target[0] == "":
        raise ValueError(
            f"{origin}: expected a class, a text or a number, got {target if len(target) != 1 else target[0]!r}"
        )
    value = target[0]
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


MASK_ID = 256  # the token that stands for a hidden byte


class MaskedLanguage(TabularTask):
    """Hidden bytes of texts."""

    METRICS = ("held_out_bits_per_hidden_byte", "held_out_accuracy")
    MODEL = MaskedLM

    def prepare(self, report: Callable[[str], None]) -> None:
        """Cut texts into chunks."""
        if not self.table.is_text:
            raise ValueError(f"{self.table.origins[0]}: masked-lm reads texts, a field of JSON lines, got numbers")
        length, origins, chunks = self.config.batch.length, list[str](), list[np.ndarray]()
        for origin, x in zip(self.table.origins, self.table.sequences, strict=True):
            cut = [x[i : i + length] for i in range(0, len(x), length)]
            chunks += cut
            origins += [origin] * len(cut)
        self.table = self.table._replace(sequences=chunks, origins=origins, targets=[[]] * len(chunks))
        self.split_and_scale(report)
        counts = np.bincount(np.concatenate([chunks[i] for i in self.training]), minlength=256) + 1.0
        bits = -np.log2(counts / counts.sum())
        self.baselines = {"by frequency": float(bits[np.concatenate([chunks[i] for i in self.held_out])].mean())}

    def make_config(self, **fields: Any) -> dict[str, Any]:
        """Set the vocabulary: bytes, and the token that hides one."""
        return super().make_config(**{"vocab_size": MASK_ID + 1, **fields})

    def batch(self, chosen: list[int], step: int) -> SequenceBatch:
        """Return some texts with hidden bytes: others at each step, but for held-out texts always the same."""
        ids, lengths = pad_sequences([self.table.sequences[i] for i in chosen], self._dtype)
        seed = np.random.SeedSequence([self.config.seed, step + 1, chosen[0]]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(seed) >> 1)
        hidden, labels = mask_tokens(ids, MASK_ID, share=self.config.batch.hidden, generator=generator)
        real = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
        labels = labels.masked_fill(~real, IGNORED_LABEL)
        return SequenceBatch(torch.where(real, hidden, 0), lengths, labels, int((labels != IGNORED_LABEL).sum()))

    def loss(self, model: Any, batch: SequenceBatch, carried: None, dtype: torch.dtype) -> tuple[Tensor, None]:
        """Compute the cross-entropy in nats."""
        return _masked_cross_entropy_sum(_logits(model, batch, dtype), batch.targets), None

    @torch.no_grad()
    def evaluate(self, model: Any, step: int, dtype: torch.dtype) -> Evaluation:
        """Compute bits per hidden byte, and the fraction of hidden bytes that is predicted right."""
        nats, count, right = 0.0, 0, 0
        for batch, logits in _held_out_logits(self, model, dtype):
            nats += _masked_cross_entropy_sum(logits, batch.targets).item()
            right += int((logits.argmax(-1) == batch.targets).sum())
            count += batch.loss_terms
        bits, accuracy = nats / math.log(2) / max(1, count), right / max(1, count)
        values = {"held_out_bits_per_hidden_byte": bits, "held_out_accuracy": accuracy}
        return self.make_evaluation(step, values, f"{bits:.4f} bits per hidden byte, {100 * accuracy:.1f} % found")


class NextValue(TabularTask):
    """The next value of each series, whose end is held out."""

    METRICS = ("held_out_rmse",)
    MODEL = LatentModel
    STEPS = True

    def prepare(self, report: Callable[[str], None]) -> None:
        """Cut off the end of each series."""
        c = self.config
        if self.table.is_text:
            raise ValueError(f"{self.table.origins[0]}: next-value reads numbers, got a text")
        self.cuts = []
        for origin, x in zip(self.table.origins, self.table.sequences, strict=True):
            held = max(1, round(c.data.held_out * len(x)))
            if len(x) - held < 2:
                raise ValueError(f"{origin}: expected a series of at least 3 values, got {len(x)}")
            self.cuts.append(len(x) - held)
        known = [x[:cut] for x, cut in zip(self.table.sequences, self.cuts, strict=True)]
        self.scale = Scale.of(np.concatenate(known), c.data.standardize)
        self.series = [self.scale.shrink(x) for x in self.table.sequences]
        steps = [(x[1:] - x[:-1])[cut - 1 :] for x, cut in zip(self.table.sequences, self.cuts, strict=True)]
        self.baselines = {"the last value": math.sqrt((np.concatenate(steps) ** 2).mean())}
        values = sum(len(x) for x in self.series)
        report(f"{len(self.series)} series of {values} steps, the last {values - sum(self.cuts)} of them held out")

    def make_config(self, **fields: Any) -> dict[str, Any]:
        """Add an output for each number of a step."""
        return super().make_config(output_size=len(self.table.channels), **fields)

    def batches(self, step: int) -> list[SequenceBatch]:
        """Return windows from anywhere in the training parts; longer series come more often."""
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
        values, lengths = pad_sequences(windows, self._dtype)
        return SequenceBatch(values[:, :-1], lengths - 1, values[:, 1:], int((lengths - 1).sum()))

    def loss(self, model: Any, batch: SequenceBatch, carried: None, dtype: torch.dtype) -> tuple[Tensor, None]:
        """Compute the squared errors of the next values, averaged over the numbers of a step."""
        with autocast(model, dtype):
            outputs = model(batch.inputs, mask=batch.mask)
        real = torch.arange(outputs.shape[1], device=outputs.device) < batch.lengths.unsqueeze(1)
        errors = (at_least_float32(outputs) - batch.targets).square().mean(-1)
        return errors.masked_fill(~real, 0).sum(), None

    @torch.no_grad()
    def evaluate(self, model: Any, step: int, dtype: torch.dtype) -> Evaluation:
        """Compute the root mean squared error of the held-out values, each predicted from all values before it."""
        assert self.scale is not None
        errors = []
        device = next(model.parameters()).device
        for x, cut in zip(self.series, self.cuts, strict=True):
            inputs = torch.tensor(x[None], dtype=self._dtype, device=device)
            cache, outputs = None, []
            with autocast(model, dtype):
                for part in inputs[:, :-1].split(self.config.batch.length, dim=1):
                    y, cache = model.prefill(part, cache)
                    outputs.append(at_least_float32(y))
            predicted = torch.cat(outputs, 1)[0, cut - 1 :].double().cpu().numpy()
            errors.append((predicted - x[cut:]) * self.scale.deviation)
        rmse = math.sqrt((np.concatenate(errors) ** 2).mean())
        return self.make_evaluation(step, {"held_out_rmse": rmse}, f"root mean squared error {rmse:.5g}")


def _logits(model: Any, batch: SequenceBatch, dtype: torch.dtype) -> Tensor:
    with autocast(model, dtype):
        return at_least_float32(model(batch.inputs, mask=batch.mask).logits)


def _held_out_logits(task: TabularTask, model: Any, dtype: torch.dtype) -> Iterator[tuple[SequenceBatch, Tensor]]:
    """Yield the held-out batches, on the model's device, with what the model returns for them."""
    device = next(model.parameters()).device
    for batch in task.held_out_batches():
        batch = batch.to(device)
        yield batch, _logits(model, batch, dtype)


def _masked_cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


TASKS: dict[str, type[TabularTask]] = {
    "classification": Classification,
    "regression": Regression,
    "masked-lm": MaskedLanguage,
    "next-value": NextValue,
}


def make_task(config: TabularConfig, report: Callable[[str], None]) -> TabularTask:
    """Create the task that a config names, with its files read.

    Raises:
        ValueError: The files or the model cannot be used.
    """
    return TASKS[config.task](config, report)
