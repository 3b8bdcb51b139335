"""Predictions of a model that was trained on files: classes, numbers, forecasts, embeddings."""

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
from anymamba.training.data.tables import Table, read_tables
from anymamba.training.tasks.tabular_base import TASK_FILE, Scale, pad_sequences
from anymamba.training.tasks.tabular_tasks import TASKS


class Predictor:
    """A trained model with the metadata of its files.

    Attributes:
        model: The model.
        metadata: What the run wrote about its files.
    """

    def __init__(self, directory: str | os.PathLike[str], device: torch.device | str = "cpu") -> None:
        """Open the directory of a run, or of one of its checkpoints.

        Raises:
            ValueError: There is no such model, or it was not trained on files.
        """
        source = Path(directory)
        if not (source / TASK_FILE).is_file():
            raise ValueError(f"{source}: expected a model of `anymamba train --task`, with {TASK_FILE}; found none")
        self.metadata: dict[str, Any] = read_json(source / TASK_FILE)
        missing = [name for name in ("task", "columns", "channels", "targets", "length") if name not in self.metadata]
        if missing or self.metadata["task"] not in TASKS:
            raise ValueError(
                f"{source / TASK_FILE}: not what a run on files writes: {missing or self.metadata['task']!r}"
            )
        self.model: SequenceModel = TASKS[self.metadata["task"]].MODEL.from_pretrained(source, device=device)
        self._scale = _scale(self.metadata.get("scale"))
        self._target_scale = _scale(self.metadata.get("target_scale"))

    def read(self, path: str) -> Table:
        """Read the sequences of a file, which must have the same inputs as the training files; ignore its targets.

        Raises:
            ValueError: Something in the file cannot be used, or it has other inputs.
        """
        metadata = self.metadata
        columns = [] if path.endswith(".npy") else metadata["columns"]
        steps = TASKS[metadata["task"]].STEPS
        table = read_tables([path], inputs=columns, sequence=metadata["sequence"], steps=steps)
        if len(table.channels) != len(metadata["channels"]) or table.is_text != (metadata["channels"] == ["text"]):
            expected, actual = " ".join(metadata["channels"]), " ".join(table.channels)
            raise ValueError(f"{path}: expected the inputs that the model was trained on, {expected}, got {actual}")
        return table

    def predict(self, table: Table, *, rows: int = 32, steps: int = 1) -> Iterator[dict[str, Any]]:
        """Predict for each sequence, in order; a forecast has a line for each step.

        A line has the name of its sequence, if a column of the table names them.

        Args:
            table: Sequences, from `read`.
            rows: Number of sequences computed together.
            steps: Number of steps of a forecast, each predicted from those before it.
        """
        for start in range(0, len(table.sequences), rows):
            chosen = table.sequences[start : start + rows]
            if self.metadata["task"] != "next-value":  # longer ones were cut in training as well
                chosen = [x[: self.metadata["length"]] for x in chosen]
            if self._scale is not None:
                chosen = [self._scale.shrink(x) for x in chosen]
            weight = next(self.model.parameters())
            inputs, lengths = (x.to(weight.device) for x in pad_sequences(chosen, weight.dtype))
            mask = None if bool((lengths == inputs.shape[1]).all()) else lengths
            names = table.names[start : start + rows]
            with torch.no_grad():
                if isinstance(self.model, LatentModel):
                    numbers = range(start, start + len(chosen))
                    lines = list(self._forecast(self.model, inputs, mask, steps, names or numbers))
                else:
                    lines = list(self._predict_batch(inputs, mask))
                    if names:
                        lines = [{"sequence": name, **line} for name, line in zip(names, lines, strict=True)]
            yield from lines

    def _predict_batch(self, inputs: Tensor, mask: Tensor | None) -> Iterator[dict[str, Any]]:
        model: Any = self.model
        if isinstance(model, MaskedLM):
            for vector in model.embed(inputs, mask=mask).cpu().tolist():
                yield {"embedding": vector}
        elif isinstance(model, SequenceRegressor):
            assert self._target_scale is not None
            outputs = self._target_scale.grow(model(inputs, mask=mask).logits.double().cpu().numpy())
            names = self.metadata["targets"]
            if len(names) != outputs.shape[1]:
                names = [f"value {i}" for i in range(outputs.shape[1])]
            for values in outputs.tolist():
                yield dict(zip(names, values, strict=True))
        else:
            assert isinstance(model, SequenceClassifier)
            for probabilities in model(inputs, mask=mask).logits.double().softmax(-1).cpu().tolist():
                best = max(range(len(probabilities)), key=probabilities.__getitem__)
                by_label = dict(zip(model.config.labels, probabilities, strict=True))
                yield {
                    "label": model.config.labels[best],
                    "probability": probabilities[best],
                    "probabilities": by_label,
                }

    def _forecast(
        self, model: LatentModel, inputs: Tensor, mask: Tensor | None, steps: int, names: Sequence[str | int]
    ) -> Iterator[dict[str, Any]]:
        assert self._scale is not None
        y, cache = model.prefill(inputs, mask=mask)
        ends = torch.full((len(inputs),), inputs.shape[1], device=y.device) if mask is None else mask
        value = y[torch.arange(len(y), device=y.device), ends - 1]
        steps_bc = [value]
        for _ in range(steps - 1):
            value, cache = model.step(value, cache)
            steps_bc.append(value)
        values = self._scale.grow(torch.stack(steps_bc, 1).double().cpu().numpy())
        for name, series in zip(names, values.tolist(), strict=True):
            for step, numbers in enumerate(series):
                named = dict(zip(self.metadata["channels"], numbers, strict=True))
                yield {"sequence": name, "step": step + 1, **named}


def _scale(values: Any) -> Scale | None:
    return None if values is None else Scale(*(np.array(x, dtype=np.float64) for x in values))
