"""Rows of inputs with the labels to predict: batches, their loss, their accuracy, and tasks.

Letters: b rows, t time, k classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.training import Task

IGNORED = -100  # label of a position that is not scored


class Labeled(NamedTuple):
    """A batch of inputs with labels.

    Attributes:
        inputs: Inputs (b, t).
        labels: Label of each position (b, t), or of each row (b).
    """

    inputs: Tensor
    labels: Tensor

    @property
    def tokens(self) -> int:
        """Return the number of positions that are read."""
        return self.inputs.numel()

    @property
    def loss_terms(self) -> int:
        """Return the number of labels that are scored."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> Labeled:
        """Return the batch on another device."""
        return Labeled(self.inputs.to(device), self.labels.to(device))

    def cross_entropy_sum(self, model: nn.Module) -> Tensor:
        """Return the sum of the labels' cross entropies under the model's logits (b, t, k) or (b, k), in nats."""
        logits, labels = model(self.inputs).flatten(0, -2), self.labels.flatten()
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Return the fraction of the labels that have the largest logit."""
        is_correct = (model(self.inputs).argmax(-1) == self.labels) & (self.labels != IGNORED)
        return int(is_correct.sum()) / max(1, self.loss_terms)


class LabeledTask(Task[Labeled]):
    """A task whose loss is the cross entropy of labels."""

    def loss(self, model: nn.Module, batch: Labeled, carried: None, dtype: torch.dtype) -> tuple[Tensor, None]:
        """Return the sum of the cross entropies in nats."""
        return batch.cross_entropy_sum(model), None
