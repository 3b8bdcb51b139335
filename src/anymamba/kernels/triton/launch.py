"""Launch kernels, or record what would be launched.

The launches of an operator depend on the shapes, dtypes and strides of its inputs and on the architecture, and on no
value. So the operator may be called with tensors on the meta device inside `recording(target)`: nothing runs, and every
kernel that a GPU of that architecture would run is collected with its arguments. `make compile-triton` compiles them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.kernels.triton.selection import IS_INTERPRETED


class Target(NamedTuple):
    """An architecture, as Triton names it."""

    backend: str  # "cuda" or "hip"
    arch: int | str  # compute capability (80, 90, ...) or name (gfx942, ...)


class Launch(NamedTuple):
    """A recorded launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


class _Recording:
    target: Target | None = None
    launches: list[Launch] | None = None


_INTERPRETER = Target("cpu", "interpreter")


def target_of(device: torch.device) -> Target:
    """Return the architecture that kernels for tensors on `device` are for."""
    if _Recording.target is not None:
        return _Recording.target
    if IS_INTERPRETED:
        return _INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Target("hip", properties.gcnArchName.partition(":")[0])
    return Target("cuda", 10 * properties.major + properties.minor)


@contextmanager
def recording(target: Target) -> Iterator[list[Launch]]:
    """Collect the launches in this context, in which tensors are on the meta device, and run none."""
    _Recording.target, _Recording.launches = target, []
    try:
        yield _Recording.launches
    finally:
        _Recording.target = _Recording.launches = None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on `grid` programs, on the device of its first argument; nothing if there are none.

    Args:
        kernel: Function decorated with `triton.jit`.
        grid: Number of programs along each axis; the first may be as large as 2³¹ - 1, the others 65535.
        arguments: Tensors, numbers, and None, in the order of the kernel's parameters.
        constants: Parameters of the kernel that are constants, and `num_warps` and `num_stages`.
    """
    if not math.prod(grid):
        return
    if _Recording.launches is not None:
        _Recording.launches.append(Launch(kernel, grid, arguments, constants))
        return
    first: Tensor = arguments[0]
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        kernel[grid](*arguments, **constants)


def row_major(x: Tensor) -> Tensor:
    """Return `x` with its last axis contiguous, without a copy if it is."""
    x = x.resolve_neg()
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()
