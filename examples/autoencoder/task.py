"""Learn to reconstruct digits from a few numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.training import Evaluation, OptimizerSection, ScheduleSection, check_at_least, option
from examples.autoencoder.model import Autoencoder
from examples.command import ExampleConfig, ModelSizes
from examples.digits.images import BRIGHTEST, Digits
from examples.labeled import Labeled, LabeledTask


@dataclass(frozen=True, kw_only=True)
class AutoencoderSection(ModelSizes):
    """The model, and the images of a step."""

    code: int = option(16, "numbers that encode an image")
    family: Literal["Mamba2", "Mamba3"] = option("Mamba3", "family of the blocks")
    n_layer: int = option(2, "layers of the encoder and of the decoder, two per pair")

    def __post_init__(self) -> None:
        """Raise for values that cannot work."""
        super().__post_init__()
        check_at_least(self, 1, "code")
        check_at_least(self, 2, "n_layer")


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig(ExampleConfig):
    """A run on the digits."""

    autoencoder: AutoencoderSection = field(default_factory=AutoencoderSection)
    optimizer: OptimizerSection = field(default_factory=lambda: OptimizerSection(lr=3e-3, beta2=0.99))
    schedule: ScheduleSection = field(default_factory=lambda: ScheduleSection(steps=1500, final=0.01))


class AutoencoderTask(LabeledTask):
    """The binary cross entropy of pixels; the test images influence nothing."""

    METRICS = ("validation_error",)
    config: AutoencoderConfig

    def __init__(self, config: AutoencoderConfig, digits: Digits) -> None:
        """Keep the config and the images."""
        self.config = config
        training, validation, test = (part.inputs.float() / BRIGHTEST for part in digits)
        self.training = training
        self.validation = validation
        self.test = test

    @property
    def fingerprint(self) -> str:
        """Return the number of images, whose order and split are fixed."""
        return f"digits {len(self.training)}"

    def make_model(self, dtype: torch.dtype) -> Autoencoder:
        """Return the autoencoder."""
        c = self.config.autoencoder
        return Autoencoder(c.code, c.d_model, c.n_layer, c.family, c.d_state, c.headdim).to(dtype)

    def batches(self, step: int) -> list[Labeled]:
        """Return images, which are their own labels."""
        rows = np.random.default_rng([self.config.seed, step]).choice(len(self.training), self.config.autoencoder.rows)
        images = self.training[torch.from_numpy(rows)]
        return [Labeled(images, images)]

    def loss(self, model: nn.Module, batch: Labeled, carried: None, dtype: torch.dtype) -> tuple[Tensor, None]:
        """Return the sum of the pixels' cross entropies in nats."""
        return F.binary_cross_entropy_with_logits(model(batch.inputs), batch.labels, reduction="sum"), None

    def evaluate(self, model: Autoencoder, step: int, dtype: torch.dtype) -> Evaluation:
        """Return the mean squared error of the validation images' pixels."""
        error = mean_squared_error(reconstruct(model, self.validation), self.validation)
        return Evaluation({"validation_error": error}, f"step {step}: validation {error:.5f}")


@torch.no_grad()
def reconstruct(model: nn.Module, images: Tensor) -> Tensor:
    """Return the reconstructed pixels, from 0 to 1."""
    return model(images).sigmoid()


def mean_squared_error(actual: Tensor, expected: Tensor) -> float:
    """Return the mean squared error of all pixels."""
    return (actual - expected).square().mean().item()
