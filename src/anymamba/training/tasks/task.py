"""What a run learns: the part of training that the loop does not know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from anymamba.core.io import write_tensors
from anymamba.training.checkpoint.sharded_tensors import Piece
from anymamba.training.config.run_config import RunConfig

B = TypeVar("B", bound="StepBatch")


class StepBatch(Protocol):
    """What one part of a step reads."""

    @property
    def tokens(self) -> int:
        """How many positions are read."""

    @property
    def counted(self) -> int:
        """How many terms the cost has, over which it is averaged."""

    def to(self: B, device: torch.device) -> B:
        """On another device."""


class Evaluation(NamedTuple):
    """What an evaluation found.

    Attributes:
        values: numbers by name, those of `Task.NAMES`.
        text: lines for the user.
        solved: whether there is nothing left to learn, so that the run is finished.
    """

    values: dict[str, float]
    text: str
    solved: bool = False


class Task(ABC, Generic[B]):
    """A model, what it reads at each step, what that costs, and how it is evaluated.

    Everything is a function of the config: a resumed run builds its task again.

    Attributes:
        NAMES: of the numbers that an evaluation finds.
        config: of the run.
    """

    NAMES: ClassVar[tuple[str, ...]]
    config: RunConfig

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Identifies the data, so that a run does not continue with other data."""

    @abstractmethod
    def make_model(self, dtype: torch.dtype) -> nn.Module:
        """The model, with fresh weights of `dtype` drawn from torch's generator."""

    @abstractmethod
    def batches(self, step: int) -> list[B]:
        """What step 0, 1, ... reads, in parts whose gradients are added up; a function of the config and the step."""

    @abstractmethod
    def cost(self, model: Any, batch: B, carried: Any, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """The cost of a batch, added up over its `counted` terms.

        Args:
            model: from `make_model`.
            batch: on the model's device.
            carried: the state after this part of the step before; None at the first step.
            dtype: of the computation.

        Returns:
            A scalar, and the state for the same part of the next step, detached (None if nothing is carried).
        """

    @abstractmethod
    def evaluate(self, model: Any, step: int, dtype: torch.dtype) -> Evaluation:
        """Evaluate the model after `step` steps."""

    def write_model(self, model: Any, directory: Path) -> None:
        """Write `model.safetensors`, and other files that belong to the model."""
        write_tensors(directory / "model.safetensors", model.state_dict(), {})

    def write_description(self, model: Any, directory: Path) -> None:
        """Write the other files of `write_model`, if workers write the weights in pieces."""

    def read_model(self, model: Any, tensors: dict[str, Tensor]) -> None:
        """Set the weights to those of `model.safetensors`."""
        model.load_state_dict(tensors)

    def carried_tensors(self, parts: Sequence[Any]) -> dict[str, Tensor | Piece]:
        """The carried states of all parts as tensors by name; if workers divide them, the rows that are here."""
        raise NotImplementedError(f"{type(self).__name__} carries a state, but does not say how it is saved")

    def carried_from(self, model: Any, tensors: Mapping[str, Any]) -> list[Any]:
        """The inverse of `carried_tensors`; `tensors[name][begin:end]` reads some of all rows."""
        raise NotImplementedError(f"{type(self).__name__} carries a state, but does not say how it is restored")

    def plot(self, directory: Path) -> None:
        """Draw a plot from `metrics.csv` after an evaluation, if matplotlib is installed."""
