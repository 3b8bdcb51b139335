"""The interface between the trainer and what a run learns, and what all tasks share."""

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
    """One microbatch of a step."""

    @property
    def tokens(self) -> int:
        """Number of positions that are read."""

    @property
    def loss_terms(self) -> int:
        """Number of terms of the loss, over which it is averaged."""

    def to(self: B, device: torch.device) -> B:
        """Move the batch to a device."""


class Evaluation(NamedTuple):
    """Result of an evaluation.

    Attributes:
        values: Numbers by name, those of `Task.METRICS`.
        text: Lines for the user.
        solved: Whether there is nothing left to learn, so that the run is finished.
    """

    values: dict[str, float]
    text: str
    solved: bool = False


class Task(ABC, Generic[B]):
    """A model, what it reads at each step, its loss, and how it is evaluated.

    Everything is a function of the config: a resumed run builds its task again.

    Attributes:
        METRICS: Names of the numbers that an evaluation computes.
        config: Config of the run.
    """

    METRICS: ClassVar[tuple[str, ...]]
    config: RunConfig

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Checksum of the data, so that a run does not continue with other data."""

    @abstractmethod
    def make_model(self, dtype: torch.dtype) -> nn.Module:
        """Create the model, with new weights of `dtype` drawn from torch's generator."""

    @abstractmethod
    def batches(self, step: int) -> list[B]:
        """Return the microbatches of step 0, 1, ...: a function of the config and the step."""

    @abstractmethod
    def loss(self, model: Any, batch: B, carried: Any, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """Compute the loss of a microbatch, summed over its `loss_terms`.

        Args:
            model: The model, from `make_model`.
            batch: The microbatch, on the model's device.
            carried: State after the same microbatch of the step before; None at the first step.
            dtype: Dtype of the computation.

        Returns:
            A scalar, and the detached state for the same microbatch of the next step (None if nothing is carried).
        """

    @abstractmethod
    def evaluate(self, model: Any, step: int, dtype: torch.dtype) -> Evaluation:
        """Evaluate the model after `step` steps."""

    def write_model(self, model: Any, directory: Path) -> None:
        """Write `model.safetensors`, and other files that belong to the model."""
        write_tensors(directory / "model.safetensors", model.state_dict(), {})

    def write_description(self, model: Any, directory: Path) -> None:
        """Write the other files of `write_model`, for ranks that write the weights in shards."""

    def read_model(self, model: Any, tensors: dict[str, Tensor]) -> None:
        """Set the weights to those of `model.safetensors`."""
        model.load_state_dict(tensors)

    def carried_tensors(self, parts: Sequence[Any]) -> dict[str, Tensor | TensorShard]:
        """Return the carried states of all microbatches by name; if ranks divide them, this rank's rows."""
        raise NotImplementedError(f"{type(self).__name__} carries a state, but does not implement how it is saved")

    def carried_from(self, model: Any, tensors: Mapping[str, Any]) -> list[Any]:
        """Invert `carried_tensors`; `tensors[name][begin:end]` reads some of all rows."""
        raise NotImplementedError(f"{type(self).__name__} carries a state, but does not implement how it is restored")

    def plot(self, directory: Path) -> None:
        """Draw a plot from `metrics.csv` after an evaluation, if matplotlib is installed."""


def at_least_float32(x: Tensor) -> Tensor:
    """Convert a tensor to float32, unless it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def autocast(model: nn.Module, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return a context that computes in `dtype`, with autocast if the weights have another dtype."""
    weight = next(model.parameters())
    return nullcontext() if dtype == weight.dtype else torch.autocast(weight.device.type, dtype)


def first_non_finite(
    model: nn.Module, compute: Callable[[], Tensor], any_rank: Callable[[bool], bool] = lambda flag: flag
) -> str:
    """Return where a value or gradient that is not finite first appears, in words; empty if it is on another rank.

    `compute` runs the model and returns what to differentiate. All ranks compute the same steps; `any_rank` returns
    whether a flag is set on one of them.
    """
    seen: list[str] = []

    def watch(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for x in _tensors(output):
            if not torch.isfinite(x).all():
                seen.append(f"the output of {name}")
            if x.requires_grad:
                x.register_hook(partial(check_gradient, f"the gradient at the output of {name}"))

    def check_gradient(location: str, gradient: Tensor | None) -> None:
        if gradient is not None and not torch.isfinite(gradient).all():
            seen.append(location)

    bad_parameters = [
        name for name, parameter in model.named_parameters() if not torch.isfinite(local(parameter)).all()
    ]
    if any_rank(bool(bad_parameters)):
        return f"the parameter {bad_parameters[0]}" if bad_parameters else ""
    handles = [m.register_forward_hook(partial(watch, name)) for name, m in model.named_modules() if name]
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled modules cannot be watched
            total = compute()
        if not seen and not torch.isfinite(total).all():
            seen.append("the loss itself")
        if not any_rank(bool(seen)):
            total.backward()
    finally:
        for handle in handles:
            handle.remove()
    seen += [
        f"the gradient of {name}"
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not torch.isfinite(local(parameter.grad)).all()
    ]
    if any_rank(bool(seen)):
        return seen[0] if seen else ""
    return "the norm of the gradient, whose square overflows"


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for x in output:
            yield from _tensors(x)
