"""What a model that was trained on files predicts for others: classes, numbers, forecasts, embeddings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anymamba.core.io import read_json
from anymamba.models import LatentModel, MaskedLM, SequenceClassifier, SequenceModel, SequenceRegressor
from anymamba.training.data.sequence_batches import Scale, pad_sequences
from anymamba.training.data.tables import Table, read_tables
from anymamba.training.tasks.tabular import TASK_FILE
from anymamba.training.tasks.tabular_tasks import TASKS

_MODELS = {name: kind.MODEL for name, kind in TASKS.items()}


class Predictor:
    """A trained model, with what it knows about its files.

    Attributes:
        model: the model.
        facts: about the files, as the run wrote them.
    """

    def __init__(self, directory: str | os.PathLike[str], device: torch.device | str = "cpu") -> None:
        """Open the directory of a run, or of one of its checkpoints.

        Raises:
            ValueError: there is no such model, or it was not trained on files.
        """
        source = Path(directory)
        if not (source / TASK_FILE).is_file():
            raise ValueError(f"{source}: expected a model of `anymamba train --task`, with {TASK_FILE}; found none")
        self.facts: dict[str, Any] = read_json(source / TASK_FILE)
        wrong = [name for name in ("task", "columns", "channels", "targets", "length") if name not in self.facts]
        if wrong or self.facts["task"] not in _MODELS:
            raise ValueError(f"{source / TASK_FILE}: not what a run on files writes: {wrong or self.facts['task']!r}")
        self.model: SequenceModel = _MODELS[self.facts["task"]].from_pretrained(source, device=device)
        self._scale = _scale(self.facts.get("scale"))
        self._target_scale = _scale(self.facts.get("target_scale"))

    def read(self, path: str) -> Table:
        """The sequences of a file, which must have the same inputs as the training files.

        Raises:
            ValueError: something in it cannot be used, or it has other inputs.
        """
        return open_table(self.facts, path)

    def predict(self, table: Table, *, rows: int = 32, steps: int = 1) -> Iterator[dict[str, Any]]:
        """What the model predicts for each sequence, in order; a forecast has a line for each step.

        A line has the name of its sequence, if a column of the table names them.

        Args:
            table: from `read`.
            rows: how many sequences are computed together.
            steps: of a forecast, each predicted from those before it.
        """
        for start in range(0, len(table.sequences), rows):
            chosen = table.sequences[start : start + rows]
            if self.facts["task"] != "next-value":  # longer ones were cut in training as well
                chosen = [x[: self.facts["length"]] for x in chosen]
            if self._scale is not None:
                chosen = [self._scale.shrink(x) for x in chosen]
            weight = next(self.model.parameters())
            inputs, lengths = (x.to(weight.device) for x in pad_sequences(chosen, weight.dtype))
            mask = None if bool((lengths == inputs.shape[1]).all()) else lengths
            with torch.no_grad():
                if isinstance(self.model, LatentModel):
                    names = table.names[start : start + rows] or range(start, start + len(chosen))
                    said = list(self._forecast(self.model, inputs, mask, steps, names))
                else:
                    said = list(self._said(inputs, mask))
            if table.names and not isinstance(self.model, LatentModel):
                named = zip(table.names[start : start + rows], said, strict=True)
                said = [{"sequence": name, **line} for name, line in named]
            yield from said

    def _said(self, inputs: Tensor, mask: Tensor | None) -> Iterator[dict[str, Any]]:
        model: Any = self.model
        if isinstance(model, MaskedLM):
            for vector in model.embed(inputs, mask=mask).cpu().tolist():
                yield {"embedding": vector}
        elif isinstance(model, SequenceRegressor):
            assert self._target_scale is not None
            names = self.facts["targets"]
            for values in self._target_scale.grow(model(inputs, mask=mask).logits.double().cpu().numpy()).tolist():
                yield dict(zip(names if len(names) == len(values) else _numbered(values), values, strict=True))
        else:
            assert isinstance(model, SequenceClassifier)
            for shares in model(inputs, mask=mask).logits.double().softmax(-1).cpu().tolist():
                best = max(range(len(shares)), key=shares.__getitem__)
                said = dict(zip(model.config.labels, shares, strict=True))
                yield {"label": model.config.labels[best], "probability": shares[best], "probabilities": said}

    def _forecast(
        self, model: LatentModel, inputs: Tensor, mask: Tensor | None, steps: int, names: Sequence[str | int]
    ) -> Iterator[dict[str, Any]]:
        assert self._scale is not None
        y, cache = model.prefill(inputs, mask=mask)
        ends = torch.full((len(inputs),), inputs.shape[1], device=y.device) if mask is None else mask
        value = y[torch.arange(len(y), device=y.device), ends - 1]
        found = [value]
        for _ in range(steps - 1):
            value, cache = model.step(value, cache)
            found.append(value)
        values = self._scale.grow(torch.stack(found, 1).double().cpu().numpy())
        for name, series in zip(names, values.tolist(), strict=True):
            for step, numbers in enumerate(series):
                named = dict(zip(self.facts["channels"], numbers, strict=True))
                yield {"sequence": name, "step": step + 1, **named}


def _scale(values: Any) -> Scale | None:
    return None if values is None else Scale(*(np.array(x, dtype=np.float64) for x in values))


def _numbered(values: list[float]) -> list[str]:
    return [f"value {i}" for i in range(len(values))]


def open_table(facts: dict[str, Any], path: str) -> Table:
    """The sequences of a file to predict for, read as in training; targets in it are ignored.

    Raises:
        ValueError: something in it cannot be used, or it has other inputs.
    """
    steps = TASKS[facts["task"]].STEPS
    columns = facts["columns"] if not path.endswith(".npy") else []
    table = read_tables([path], inputs=columns, sequence=facts["sequence"], steps=steps)
    if len(table.channels) != len(facts["channels"]) or table.is_text != (facts["channels"] == ["text"]):
        expected, found = " ".join(facts["channels"]), " ".join(table.channels)
        raise ValueError(f"{path}: expected the inputs that the model was trained on, {expected}, got {found}")
    return table
