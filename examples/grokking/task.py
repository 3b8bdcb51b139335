"""Learning to add modulo a prime from some of all sums, far beyond the point where those are memorized.

Letters: b sums, t = k numbers, p the modulus; of a matrix or of states x: Σ their covariance.

    participation ratio = (tr Σ)² / tr Σ²        between 1 and the rank: the number of directions in which x varies
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from anymamba import MambaLM, MambaLMConfig
from anymamba.training import Evaluation, EvaluationSection, OptimizerSection, ScheduleSection, check_at_least, option
from examples.command import ExampleConfig
from examples.labeled import Labeled, LabeledTask

COMPARED_SUMS = 512  # sums whose states are compared


@dataclass(frozen=True, kw_only=True)
class GrokkingSection:
    """The section of the sums and the model."""

    modulus: int = option(47, "p, the modulus of the sums")
    terms: int = option(2, "k, how many numbers are added")
    fraction: float = option(0.5, "fraction of all sums that is trained on")
    d_model: int = option(64, "width of the residual stream")
    d_state: int = option(32, "state size of the one head")

    def __post_init__(self) -> None:
        """Raise for values that cannot work."""
        check_at_least(self, 2, "modulus", "terms")
        check_at_least(self, 1, "d_model", "d_state")
        if not 0 < self.fraction < 1:
            raise ValueError(f"fraction must be above 0 and below 1, got {self.fraction}")
        if self.modulus**self.terms > 2**20:
            raise ValueError(f"modulus ** terms must be at most 2^20, got {self.modulus} ** {self.terms}")


@dataclass(frozen=True, kw_only=True)
class GrokkingConfig(ExampleConfig):
    """A run on sums; every step reads all sums of the training part."""

    grokking: GrokkingSection = field(default_factory=GrokkingSection)
    optimizer: OptimizerSection = field(
        default_factory=lambda: OptimizerSection(lr=2e-3, beta2=0.98, weight_decay=1.0, decay_embeddings=True)
    )
    schedule: ScheduleSection = field(
        default_factory=lambda: ScheduleSection(steps=2000, warmup=20, kind="constant", final=1.0)
    )
    evaluation: EvaluationSection = field(default_factory=lambda: EvaluationSection(every=50, log_every=250))


class GrokkingTask(LabeledTask):
    """The sum of all numbers, predicted after the last of them."""

    METRICS = ("training_accuracy", "test_accuracy", "ratio_of_states", "ratio_of_embedding", "ratio_of_head")
    config: GrokkingConfig

    def __init__(self, config: GrokkingConfig) -> None:
        """Split all sums into a training and a test part."""
        self.config = config
        c = config.grokking
        numbers = np.array(list(itertools.product(range(c.modulus), repeat=c.terms)))
        sums = numbers.sum(1) % c.modulus
        order = np.random.default_rng(config.seed).permutation(len(numbers))
        cut = round(c.fraction * len(numbers))
        training, test = (
            Labeled(torch.from_numpy(numbers[part]), torch.from_numpy(sums[part])) for part in np.split(order, [cut])
        )
        self.training = training
        self.test = test

    @property
    def fingerprint(self) -> str:
        """Return the name of the data: everything else is in the config."""
        return "sums"

    def make_model(self, dtype: torch.dtype) -> Adder:
        """Return a model of one layer with one head."""
        return Adder(self.config.grokking).to(dtype)

    def batches(self, step: int) -> list[Labeled]:
        """Return all sums of the training part."""
        return [self.training]

    @torch.no_grad()
    def evaluate(self, model: Adder, step: int, dtype: torch.dtype) -> Evaluation:
        """Return the accuracy on both parts, and the participation ratios of states and weights."""
        language = model.language
        values = {
            "training_accuracy": self.training.accuracy(model),
            "test_accuracy": self.test.accuracy(model),
            "ratio_of_states": participation_ratio(model.states(self.test.inputs[:COMPARED_SUMS])),
            "ratio_of_embedding": participation_ratio(language.backbone.embedding.weight),
            "ratio_of_head": participation_ratio(language.lm_head.weight),
        }
        training_percent, test_percent = 100 * values["training_accuracy"], 100 * values["test_accuracy"]
        return Evaluation(
            values, f"step {step}: {training_percent:.1f} % of the known sums, {test_percent:.1f} % of the others"
        )


class Adder(nn.Module):
    """A language model of one layer with one head, whose output head is not its embedding."""

    def __init__(self, config: GrokkingSection) -> None:
        """Create the parameters."""
        super().__init__()
        block = {"layer": "Mamba3", "d_state": config.d_state, "headdim": 2 * config.d_model}
        self.language = MambaLM(
            MambaLMConfig(
                d_model=config.d_model,
                n_layer=1,
                vocab_size=config.modulus,
                pad_vocab_size_multiple=1,
                tie_embeddings=False,
                ssm_cfg=block,
            )
        )

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the logits of the sum (b, p) of the numbers (b, t)."""
        return self.language(numbers).logits[:, -1]

    def states(self, numbers: Tensor) -> Tensor:
        """Return the state after the last number, (b, p n)."""
        return self.language(numbers).cache.layers[0].ssm.flatten(1)


def participation_ratio(x: Tensor) -> float:
    """Return (tr Σ)² / tr Σ² of rows (b, f), computed from the smaller of their two Gram matrices."""
    x = (x - x.mean(0)).double()
    gram = x @ x.T if len(x) < x.shape[1] else x.T @ x
    return (gram.trace().square() / gram.square().sum().clamp(min=1e-300)).item()
