"""What a run learns: the part of training that the loop does not know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from anymamba.core.io import write_tensors
from anymamba.training.checkpoint.sharded_tensors import TensorShard
from anymamba.training.config.run_config import RunConfig
from anymamba.training.distributed.fsdp import local

B = TypeVar("B", bound="StepBatch")


class StepBatch(Protocol):
    """What one part of a step reads."""

    @property
    def tokens(self) -> int:
        """How many positions are read."""

    @property
    def loss_terms(self) -> int:
        """How many terms the cost has, over which it is averaged."""

    def to(self: B, device: torch.device) -> B:
        """On another device."""


class Evaluation(NamedTuple):
    """What an evaluation found.

    Attributes:
        values: numbers by name, those of `Task.METRICS`.
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
        METRICS: of the numbers that an evaluation finds.
        config: of the run.
    """

    METRICS: ClassVar[tuple[str, ...]]
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
    def loss(self, model: Any, batch: B, carried: Any, dtype: torch.dtype) -> tuple[Tensor, Any]:
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

    def carried_tensors(self, parts: Sequence[Any]) -> dict[str, Tensor | TensorShard]:
        """The carried states of all parts as tensors by name; if workers divide them, the rows that are here."""
        raise NotImplementedError(f"{type(self).__name__} carries a state, but does not say how it is saved")

    def carried_from(self, model: Any, tensors: Mapping[str, Any]) -> list[Any]:
        """The inverse of `carried_tensors`; `tensors[name][begin:end]` reads some of all rows."""
        raise NotImplementedError(f"{type(self).__name__} carries a state, but does not say how it is restored")

    def plot(self, directory: Path) -> None:
        """Draw a plot from `metrics.csv` after an evaluation, if matplotlib is installed."""


def at_least_float32(x: Tensor) -> Tensor:
    """Float32 or wider."""
    return x if x.dtype == torch.float64 else x.float()


def autocast(model: nn.Module, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Autocast if the computation is narrower than the weights."""
    weight = next(model.parameters())
    return nullcontext() if dtype == weight.dtype else torch.autocast(weight.device.type, dtype)


def first_non_finite(
    model: nn.Module, compute: Callable[[], Tensor], agreed: Callable[[bool], bool] = lambda here: here
) -> str:
    """Where a value or gradient that is not finite first appears.

    Args:
        model: whose modules are watched.
        compute: runs the model and returns what to differentiate.
        agreed: whether something is true on any worker; all workers compute the same steps.

    Returns:
        Words that name the module; empty if it appears on another worker.
    """
    seen: list[str] = []

    def watch(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for x in _tensors(output):
            if not torch.isfinite(x).all():
                seen.append(f"the output of {name}")
            if x.requires_grad:
                x.register_hook(partial(look, f"the gradient at the output of {name}"))

    def look(what: str, gradient: Tensor | None) -> None:
        if gradient is not None and not torch.isfinite(gradient).all():
            seen.append(what)

    wrong = [name for name, parameter in model.named_parameters() if not torch.isfinite(local(parameter)).all()]
    if agreed(bool(wrong)):
        return f"the parameter {wrong[0]}" if wrong else ""
    handles = [m.register_forward_hook(partial(watch, name)) for name, m in model.named_modules() if name]
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled modules cannot be watched
            total = compute()
        if not seen and not torch.isfinite(total).all():
            seen.append("the loss itself")
        if not agreed(bool(seen)):
            total.backward()
    finally:
        for handle in handles:
            handle.remove()
    seen += [
        f"the gradient of {name}"
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not torch.isfinite(local(parameter.grad)).all()
    ]
    if agreed(bool(seen)):
        return seen[0] if seen else ""
    return "the norm of the gradient, whose square overflows"


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for x in output:
            yield from _tensors(x)
