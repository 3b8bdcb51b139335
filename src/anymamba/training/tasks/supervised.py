"""Tasks on files with one answer for each sequence: a class, or numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.models import SequenceClassifier, SequenceRegressor
from anymamba.training.data.sequence_batches import Scale, SequenceBatch
from anymamba.training.tasks.lm_step import autocast
from anymamba.training.tasks.tabular import FileTask, wide
from anymamba.training.tasks.task import Evaluation


class Classification(FileTask):
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
        """The cross-entropy in nats."""
        with autocast(model, dtype):
            logits = model(batch.inputs, mask=batch.mask).logits
        return F.cross_entropy(wide(logits), batch.targets, reduction="sum"), None

    @torch.no_grad()
    def evaluate(self, model: Any, step: int, dtype: torch.dtype) -> Evaluation:
        """The share of held-out sequences whose class has the largest logit, and the mean cost."""
        right, nats = 0, 0.0
        for batch in self.held_out_batches():
            batch = batch.to(next(model.parameters()).device)
            with autocast(model, dtype):
                logits = wide(model(batch.inputs, mask=batch.mask).logits)
            right += int((logits.argmax(-1) == batch.targets).sum())
            nats += F.cross_entropy(logits, batch.targets, reduction="sum").item()
        n = len(self.held_out)
        values = {"held_out_accuracy": right / n, "held_out_nats": nats / n}
        return self.evaluated(step, values, f"accuracy {right / n:.4f} ({right} of {n})")


class Regression(FileTask):
    """Some numbers for each sequence."""

    NAMES = ("held_out_rmse",)
    MODEL = SequenceRegressor

    def prepare(self, report: Callable[[str], None]) -> None:
        """Scale the targets."""
        rows, names = [], self.config.data.targets
        for place, said in zip(self.table.places, self.table.targets, strict=True):
            rows.append([_target(place, " ".join(names), x) for x in said])
            if len(rows[-1]) != len(rows[0]):
                raise ValueError(f"{place}: expected {len(rows[0])} numbers to predict, got {len(rows[-1])}")
        self.split_and_scale(report)
        values = np.array(rows)
        self.target_scale = Scale.of(values[self.training], self.config.data.standardize)
        self.numbers = self.target_scale.shrink(values)
        error = values[self.held_out] - values[self.training].mean(0)
        self.beside = {"always the mean": math.sqrt((error**2).mean())}

    def make_config(self, **fields: Any) -> dict[str, Any]:
        """An output for each number."""
        return super().make_config(output_size=self.numbers.shape[1], **fields)

    def facts(self) -> dict[str, Any]:
        """As for other tasks, with the scale of the targets."""
        return {**super().facts(), "target_scale": [x.tolist() for x in self.target_scale]}

    def targets(self, chosen: list[int]) -> Tensor:
        """Numbers, (b, o)."""
        return torch.tensor(self.numbers[chosen], dtype=self._dtype)

    def cost(self, model: Any, batch: SequenceBatch, carried: None, dtype: torch.dtype) -> tuple[Tensor, None]:
        """The squared error, averaged over the numbers of a sequence."""
        with autocast(model, dtype):
            found = model(batch.inputs, mask=batch.mask).logits
        return (wide(found) - batch.targets).square().mean(1).sum(), None

    @torch.no_grad()
    def evaluate(self, model: Any, step: int, dtype: torch.dtype) -> Evaluation:
        """The root of the mean squared error, in the units of the files."""
        errors = []
        for batch in self.held_out_batches():
            batch = batch.to(next(model.parameters()).device)
            with autocast(model, dtype):
                found = wide(model(batch.inputs, mask=batch.mask).logits)
            errors.append((found - batch.targets).double().cpu().numpy() * self.target_scale.deviation)
        rmse = math.sqrt((np.concatenate(errors) ** 2).mean())
        return self.evaluated(step, {"held_out_rmse": rmse}, f"root mean squared error {rmse:.5g}")


def _label(place: str, said: list[Any]) -> str:
    """The name of a class: a text as it is written; a whole number of JSON or an array without decimals."""
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
