"""Learning to multiply in A5, with states that rotate in a plane or in space."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anymamba import LatentModel
from anymamba.training import Evaluation, OptimizerSection, ScheduleSection, check_at_least, option
from examples.a5.words import ELEMENTS, draw
from examples.command import ExampleConfig, ModelSizes
from examples.labeled import Labeled, LabeledTask

TRAINING, VALIDATION, TEST = range(3)  # their words are drawn from different seeds
TOKENS = 3


@dataclass(frozen=True, kw_only=True)
class A5Section(ModelSizes):
    """The model, and the words of a step."""

    rotation: Literal["complex", "quaternion"] = option("quaternion", "how the states rotate")
    d_state: int = option(32, "state size of a head")
    d_intermediate: int = option(128, "width of the MLP after each block")
    rows: int = option(96, "words of a step")
    length: int = option(12, "generators of a word")

    def __post_init__(self) -> None:
        """Raise for values that cannot work."""
        super().__post_init__()
        check_at_least(self, 1, "d_intermediate", "length")


@dataclass(frozen=True, kw_only=True)
class A5Config(ExampleConfig):
    """A run on words of A5."""

    a5: A5Section = field(default_factory=A5Section)
    optimizer: OptimizerSection = field(default_factory=lambda: OptimizerSection(lr=4e-3, beta2=0.99, weight_decay=0.0))
    schedule: ScheduleSection = field(default_factory=lambda: ScheduleSection(steps=1500, warmup=100, final=0.003))


class WordReader(nn.Module):
    """A stack between two projections: tokens are unit vectors, outputs the logits of the elements."""

    def __init__(self, config: A5Section) -> None:
        """Create the parameters; rotations by a fifth of a circle need larger steps than language does."""
        super().__init__()
        sizes = {"d_state": config.d_state, "headdim": config.headdim, "dt_min": 0.1, "dt_max": 1.0}
        block = {"layer": "Mamba3", "rotation": config.rotation, "rope_fraction": 1.0, "a_activation": "softplus"}
        stack: dict[str, Any] = {"d_model": config.d_model, "n_layer": config.n_layer, "ssm_cfg": {**block, **sizes}}
        # A quaternion and its negative are the same rotation; no linear map recognizes both.
        stack["d_intermediate"] = config.d_intermediate
        self.model = LatentModel(input_size=TOKENS, output_size=len(ELEMENTS), stack=stack)

    def forward(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t k"]:
        """Return the logits of the product after each token."""
        return self.model(F.one_hot(tokens, TOKENS).to(self.model.output.weight.dtype))


class A5Task(LabeledTask):
    """The product of a word so far, after each of its tokens."""

    METRICS = ("accuracy", "last_accuracy")
    config: A5Config

    def __init__(self, config: A5Config) -> None:
        """Draw the words for evaluations during training."""
        self.config = config
        self._validation = self.words(VALIDATION, 0, 512, config.a5.length)

    @property
    def fingerprint(self) -> str:
        """Return the name of the group: everything else is in the config."""
        return "A5"

    def words(self, stream: int, number: int, rows: int, length: int) -> Labeled:
        """Draw words from a stream of random numbers."""
        return draw(np.random.default_rng([self.config.seed, stream, number]), rows, length)

    def make_model(self, dtype: torch.dtype) -> WordReader:
        """Return a reader with the config's rotation."""
        return WordReader(self.config.a5).to(dtype)

    def batches(self, step: int) -> list[Labeled]:
        """Draw words of one length."""
        return [self.words(TRAINING, step, self.config.a5.rows, self.config.a5.length)]

    def evaluate(self, model: WordReader, step: int, dtype: torch.dtype) -> Evaluation:
        """Return the accuracy over all positions of new words, and at the last."""
        accuracy_t = accuracy_per_position(model, self._validation)
        values = {"accuracy": accuracy_t.mean().item(), "last_accuracy": accuracy_t[-1].item()}
        mean, last = 100 * values["accuracy"], 100 * values["last_accuracy"]
        return Evaluation(values, f"step {step}: {mean:.1f} % of all positions, {last:.1f} % of the last")


@torch.no_grad()
def accuracy_per_position(model: nn.Module, words: Labeled) -> Tensor:
    """Return the fraction of words whose product is right after each token, (t,)."""
    return (model(words.inputs).argmax(-1) == words.labels).double().mean(0)
