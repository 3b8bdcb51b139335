"""Rows of inputs with the labels to predict: batches, their cost, the share of labels that is predicted, and tasks.

Letters: b rows, t time, k classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.training.tasks.task import Task

IGNORED = -100  # the label of a position that is not scored


class Labeled(NamedTuple):
    """A batch.

    Attributes:
        inputs: (b, t).
        labels: of each position (b, t), or of each row (b).
    """

    inputs: Tensor
    labels: Tensor

    @property
    def tokens(self) -> int:
        """Positions that are read."""
        return self.inputs.numel()

    @property
    def loss_terms(self) -> int:
        """Labels that are scored."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> Labeled:
        """On another device."""
        return Labeled(self.inputs.to(device), self.labels.to(device))

    def nats(self, model: nn.Module, smoothing: float = 0.0) -> Tensor:
        """The cross entropy of the labels under the model's logits (b, t, k) or (b, k), added up.

        With `smoothing`, that share of each label's probability is spread evenly over all classes.
        """
        logits, labels = model(self.inputs).flatten(0, -2), self.labels.flatten()
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """The share of the labels that have the largest logit."""
        right = (model(self.inputs).argmax(-1) == self.labels) & (self.labels != IGNORED)
        return int(right.sum()) / max(1, self.loss_terms)


class LabeledTask(Task[Labeled]):
    """Labels to predict from rows of inputs."""

    def loss(self, model: nn.Module, batch: Labeled, carried: None, dtype: torch.dtype) -> tuple[Tensor, None]:
        """Nats."""
        return batch.nats(model), None
