"""Learn a reset task, and evaluate what was learned."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from anymamba.training import (
    CheckpointSection,
    Evaluation,
    EvaluationSection,
    OptimizerSection,
    ScheduleSection,
    check_at_least,
    option,
)
from examples.command import ExampleConfig
from examples.labeled import Labeled, LabeledTask
from examples.resets.model import VARIANTS, ResetModel
from examples.resets.streams import LENGTH, SHORTEST, STREAMS

TRAINING, VALIDATION, TEST = 0, 1, 2  # their streams are drawn from different seeds


@dataclass(frozen=True, kw_only=True)
class ResetSection:
    """The section of the task and the model."""

    task: str = option("majority", "majority, rotor or spinor")
    variant: str = option("Mamba-2", "variant of the model")
    rows: int = option(64, "streams of a step")
    length: int = option(LENGTH, "length of a stream")

    def __post_init__(self) -> None:
        """Raise for values that cannot work."""
        if self.task not in STREAMS:
            raise ValueError(f"task must be one of {', '.join(STREAMS)}, got {self.task!r}")
        if self.variant not in VARIANTS[self.task]:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS[self.task])}, got {self.variant!r}")
        check_at_least(self, 1, "rows")
        check_at_least(self, SHORTEST, "length")


@dataclass(frozen=True, kw_only=True)
class ResetConfig(ExampleConfig):
    """A run on a reset task.

    The learning rate begins large, to leave the solutions without memory, and ends small, for exact angles and decays.
    """

    reset: ResetSection = field(default_factory=ResetSection)
    optimizer: OptimizerSection = field(default_factory=lambda: OptimizerSection(lr=3e-2, beta2=0.99, weight_decay=0.0))
    schedule: ScheduleSection = field(default_factory=lambda: ScheduleSection(steps=4000, warmup=100, final=0.003))
    evaluation: EvaluationSection = field(default_factory=lambda: EvaluationSection(every=200, log_every=1000))
    checkpoints: CheckpointSection = field(default_factory=lambda: CheckpointSection(every=1000, keep=1))


class ResetTask(LabeledTask):
    """One of the reset tasks.

    It is solved when there is no mistake in any family of validation streams, nor in streams of twice the length, which
    only a state with some margin reads without one.
    """

    METRICS = ("worst_accuracy",)
    config: ResetConfig

    def __init__(self, config: ResetConfig) -> None:
        """Keep the config; streams are drawn when they are read."""
        self.config = config

    @property
    def fingerprint(self) -> str:
        """Return the task's name."""
        return f"resets {self.config.reset.task}"

    def make_model(self, dtype: torch.dtype) -> ResetModel:
        """Return the variant's model."""
        return ResetModel(self.config.reset.task, self.config.reset.variant).to(dtype)

    def batches(self, step: int) -> list[Labeled]:
        """Draw new streams."""
        c = self.config.reset
        rng = np.random.default_rng([TRAINING, self.config.seed, step])
        return [_to_tensors(STREAMS[c.task].mixture(rng, c.rows, c.length))]

    def evaluate(self, model: nn.Module, step: int, dtype: torch.dtype) -> Evaluation:
        """Score the validation streams."""
        c = self.config.reset
        by_family = accuracies(model, c.task, VALIDATION, c.length, rows=512)
        text = ", ".join(f"{family} {100 * accuracy:.2f} %" for family, accuracy in by_family.items())
        worst = min(by_family.values())
        solved = worst == 1 and set(accuracies(model, c.task, VALIDATION, 2 * c.length, rows=512).values()) == {1.0}
        return Evaluation({"worst_accuracy": worst}, f"step {step}: {text}", solved=solved)


def accuracies(model: nn.Module, task: str, split: int, length: int, rows: int) -> dict[str, float]:
    """Return accuracies by family, on streams that are always the same and differ between splits."""
    by_family = {}
    for number, family in enumerate(STREAMS[task].families):
        rng = np.random.default_rng([split, length, number])
        by_family[family] = _to_tensors(STREAMS[task].draw(family, rng, rows, length)).accuracy(model)
    return by_family


def _to_tensors(drawn: tuple[np.ndarray, np.ndarray]) -> Labeled:
    symbols, labels = drawn
    return Labeled(torch.from_numpy(symbols), torch.from_numpy(labels))
