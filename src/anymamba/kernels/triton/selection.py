"""Which operators Triton computes here: device, dtype, coverage, and the comparison on first use."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch

from anymamba.core import registry

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "") == "1"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class GpuKernel(NamedTuple):
    """An operator in Triton.

    Attributes:
        forward: Maps the operator's inputs to its outputs.
        backward: Maps the gradients of the outputs, followed by the inputs, to one gradient per differentiable input.
        examples: Draws the inputs of a tiny call of the operator on a device in a dtype, for the comparison.
        missing: Returns why these inputs are not covered, beyond device and dtype; empty if they are.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    examples: Callable[[torch.device, torch.dtype], tuple[Any, ...]]
    missing: Callable[..., str] = lambda *_: ""


def missing(operator: str, load: Callable[[], GpuKernel], inputs: tuple[Any, ...]) -> str:
    """Return why Triton does not compute an operator for these inputs; empty if it does.

    With the first input alone, the answer is for its device and dtype.
    """
    x = inputs[0]
    if reason := _missing_for(x.device.type, x.dtype):
        return reason
    kernel = load()
    if len(inputs) > 1 and (reason := kernel.missing(*inputs)):
        return reason
    if IS_INTERPRETED:
        return ""
    from anymamba.kernels.triton import first_use  # needs the operators, which are registered after this module

    return first_use.difference(operator, kernel, x.device, x.dtype)


@functools.cache
def _missing_for(device_type: str, dtype: torch.dtype) -> str:
    if reason := registry.reason_off():
        return reason
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device_type == "cpu" and not IS_INTERPRETED:
        return "Triton computes on a CPU only with TRITON_INTERPRET=1, for tests"
    if dtype in _DTYPES or (dtype == torch.float64 and IS_INTERPRETED):
        return ""
    return f"there is no Triton kernel for {dtype}"


def describe() -> str:
    """Return whether there is Triton, and a GPU that it can use."""
    try:
        name = f"Triton {version('triton')}"
    except PackageNotFoundError:
        return "none: Triton is not installed"
    if reason := registry.reason_off():
        return f"none: {reason}"
    if IS_INTERPRETED:
        return f"{name}, interpreted on the CPU"
    if not torch.cuda.is_available():
        return f"none: no GPU that torch can use ({name})"
    return f"{name}; tested by interpretation and compilation only, not yet run or timed on a GPU"
