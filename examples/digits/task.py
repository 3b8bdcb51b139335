"""Learning to recognize digits from their pixels, one after another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anymamba.models import ResidualLayer, StackConfig, make_norm
from anymamba.training import Evaluation, OptimizerSection, ScheduleSection, option
from examples.command import ExampleConfig, ModelSizes
from examples.digits.images import BRIGHTEST, CLASSES, Digits, shift
from examples.labeled import Labeled, LabeledTask


@dataclass(frozen=True, kw_only=True)
class DigitsSection(ModelSizes):
    """The model, and the images of a step."""

    family: Literal["Mamba2", "Mamba3"] = option("Mamba3", "family of the blocks")
    n_layer: int = option(2, "layers")
    rows: int = option(32, "images of a step")


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(ExampleConfig):
    """A run on the digits."""

    digits: DigitsSection = field(default_factory=DigitsSection)
    optimizer: OptimizerSection = field(default_factory=lambda: OptimizerSection(lr=4e-3, beta2=0.99))
    schedule: ScheduleSection = field(default_factory=lambda: ScheduleSection(steps=2500, final=0.01))


class PixelReader(nn.Module):
    """Residual layers over the pixels, one per position, and a head on the last output."""

    def __init__(self, config: DigitsSection) -> None:
        """Create the parameters."""
        super().__init__()
        layers = StackConfig(
            d_model=config.d_model,
            n_layer=config.n_layer,
            ssm_cfg={"layer": config.family, "d_state": config.d_state, "headdim": config.headdim},
        )
        self.embedding = nn.Linear(1, config.d_model)
        self.layers = nn.ModuleList(ResidualLayer(layers) for _ in range(config.n_layer))
        self.norm = make_norm(layers)
        self.head = nn.Linear(config.d_model, CLASSES)

    def forward(self, images: Int[Tensor, "b t"]) -> Float[Tensor, "b k"]:
        """Return the logits of the ten digits."""
        residual = self.embedding(images.unsqueeze(-1).to(self.head.weight.dtype) * (2 / BRIGHTEST) - 1)
        for layer in self.layers:
            residual, _ = layer(residual)
        return self.head(self.norm(residual[:, -1]))


class DigitsTask(LabeledTask):
    """Classification of the digits; the test images influence nothing."""

    METRICS = ("validation_accuracy",)
    config: DigitsConfig

    def __init__(self, config: DigitsConfig, digits: Digits) -> None:
        """Keep the config and the images."""
        self.config = config
        self.digits = digits

    @property
    def fingerprint(self) -> str:
        """Return the number of images, whose order and split are fixed."""
        return f"digits {len(self.digits.training.labels)}"

    def make_model(self, dtype: torch.dtype) -> PixelReader:
        """Return a model of the config's family."""
        return PixelReader(self.config.digits).to(dtype)

    def batches(self, step: int) -> list[Labeled]:
        """Return images, half of them shifted by up to one pixel."""
        rng = np.random.default_rng([self.config.seed, step])
        images, labels = self.digits.training
        rows = torch.from_numpy(rng.choice(len(labels), self.config.digits.rows))
        still, moved = images[rows].numpy(), shift(images[rows].numpy(), rng)
        chosen = np.where(rng.random((len(rows), 1)) < 0.5, moved, still)
        return [Labeled(torch.from_numpy(chosen), labels[rows])]

    def evaluate(self, model: nn.Module, step: int, dtype: torch.dtype) -> Evaluation:
        """Score the validation images."""
        accuracy = self.digits.validation.accuracy(model)
        return Evaluation({"validation_accuracy": accuracy}, f"step {step}: validation {100 * accuracy:.1f} %")
