"""Compare an operator with the portable code the first time that it is used on a GPU.

Nobody has seen these kernels run on every GPU, compiler and driver. A kernel that is wrong, or that cannot be compiled
or launched, is not used: the operator says so in one line and runs on portable code.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from anymamba.core.operators import OPERATORS, gradients
from anymamba.core.registry import kernels_off
from anymamba.kernels.triton.selection import GpuKernel

# Largest difference relative to the largest entry, of values and gradients: generous, because a wrong kernel is wrong
# by far more. Float32 may run with TF32, if torch's setting allows it.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2, torch.bfloat16: 6e-2, torch.float16: 2e-2}


def difference(operator: str, kernel: GpuKernel, device: torch.device, dtype: torch.dtype) -> str:
    """Return why a kernel may not be used on a device, empty if it may; the first call compares, and reports it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "" if (operator, device, dtype) in _AGREEING else "it was not used before the capture of a graph"
    return _compare_once(operator, kernel, device, dtype)


_AGREEING: set[tuple[str, torch.device, torch.dtype]] = set()


@functools.cache
def _compare_once(operator: str, kernel: GpuKernel, device: torch.device, dtype: torch.dtype) -> str:
    reason = compare(operator, kernel, device, dtype)
    if reason:
        print(f"anymamba: {operator} on {device} runs on portable code: its Triton kernel {reason}", file=sys.stderr)
        return f"the Triton kernel {reason}"
    _AGREEING.add((operator, device, dtype))
    return ""


def compare(operator: str, kernel: GpuKernel, device: torch.device, dtype: torch.dtype) -> str:
    """Return in what a kernel differs from the portable code on its example; empty if it agrees."""
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(0)
            inputs = kernel.examples(device, dtype)
            names, actual, expected = _results(operator, kernel, inputs)
    except Exception as error:  # whatever a compiler or a driver raises
        return f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for name, x, reference in zip(names, actual, expected, strict=True):
        scale = reference.double().abs().max().clamp(min=1e-30)
        if not ((x.double() - reference.double()).abs().max() <= _TOLERANCE[dtype] * scale):
            return f"differs in {name}"
    return ""


def _results(operator: str, kernel: GpuKernel, inputs: tuple[Any, ...]) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Return the names of results and gradients, and their values from the kernel and from the portable code."""
    described = OPERATORS[operator]
    with kernels_off():
        outputs = _as_list(described.definition(*inputs))
        cotangents = tuple(torch.randn_like(y) for y in outputs)
        count = described.differentiable
        grads = gradients(described.definition, cotangents, inputs, count)
    actual = _as_list(kernel.forward(*inputs)) + _as_list(kernel.backward(*cotangents, *inputs))
    expected = [*outputs, *grads]
    names = [*described.results, *(f"the gradient of {name}" for name in described.names[:count])]
    present = [i for i, x in enumerate(expected) if x.numel()]
    return [names[i] for i in present], [actual[i] for i in present], [expected[i] for i in present]


def _as_list(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)
