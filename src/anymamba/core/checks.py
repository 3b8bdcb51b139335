"""Checks of inputs, with errors that name what was expected and what came.

Shapes are stated once, in the annotations of a function; `check_annotated_shapes` reads them from there.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import typing
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from anymamba.core.dtypes import state_dtype
from anymamba.core.operators import is_tracing

_P = ParamSpec("_P")
_R = TypeVar("_R")
Sizes = dict[str, int]


def check_annotated_shapes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function to raise unless its arguments are tensors of the shapes in its annotations.

    A letter stands for one size throughout a call. Axes before a `*` or `...` are not checked.
    """
    hints = typing.get_type_hints(function)
    names = list(inspect.signature(function).parameters)
    shapes = [(name, _axes(dims)) for name in names if (dims := _dims_of(hints.get(name))) is not None]
    optional = {name for name, _ in shapes if type(None) in typing.get_args(hints[name])}
    where = function.__name__

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        arguments: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        sizes: Sizes = {}
        for name, axes in shapes:
            if name in arguments and not (arguments[name] is None and name in optional):
                _check_axes(where, name, arguments[name], axes, sizes)
        return function(*args, **kwargs)

    return call


def _dims_of(hint: Any) -> str | None:
    """Return the axes in a jaxtyping annotation of floating-point numbers, alone or with None; None for any other."""
    for part in (hint, *typing.get_args(hint)):
        if "float32" in getattr(part, "dtypes", ()):
            return str(part.dim_str)
    return None


def check_tensor(where: str, name: str, x: object) -> None:
    """Raise `TypeError` unless `x` is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{where}: {name} must be a tensor, got {type(x).__name__}")


def check_shape(where: str, name: str, x: Any, letters: str, sizes: Sizes) -> None:
    """Raise `ValueError` unless the shape of `x` matches `letters` ("b t h"); unseen letters are added to `sizes`.

    A `*name` or `...` among the letters stands for any number of axes.
    """
    _check_axes(where, name, x, _axes(letters), sizes)


class _Axes(NamedTuple):
    letters: list[str]
    star: int | None  # index of the letter that stands for any number of axes


def _axes(letters: str) -> _Axes:
    names = letters.split()
    return _Axes(names, next((i for i, letter in enumerate(names) if letter.startswith(("*", "..."))), None))


def _check_axes(where: str, name: str, x: Any, axes: _Axes, sizes: Sizes) -> None:
    # Every operator calls this for every token, so it is written for speed.
    check_tensor(where, name, x)
    letters, star = axes
    shape, seen = x.shape, len(sizes)
    if star is not None:
        after = len(letters) - star - 1
        letters = letters[:star] + letters[star + 1 :]
        shape = shape if len(shape) < len(letters) else (*shape[:star], *shape[len(shape) - after :])
    if len(shape) == len(letters):
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                break
        else:
            return
    # Sizes are formatted only on failure: a tracer would turn a formatted size into a constant.
    before = dict(list(sizes.items())[:seen])
    known = ", ".join(
        "..." if i == star else f"{letter}={before[letter]}" if letter in before else letter
        for i, letter in enumerate(axes.letters)
    )
    raise ValueError(f"{where}: {name} must have shape ({known}), got {tuple(x.shape)}")


def check_dtype_and_device(where: str, name: str, x: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `TypeError` unless `x` has `dtype`, `ValueError` unless it is on `device`."""
    if x.dtype != dtype:
        raise TypeError(f"{where}: {name} must be {dtype}, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{where}: {name} must be on {device}, got {x.device}")


def check_dtypes(where: str, first: str, x: Tensor, *, activations: dict[str, Any], states: dict[str, Any]) -> None:
    """Raise unless `x` (named `first`) holds floating-point numbers, and the others are on its device.

    `activations` must have its dtype, and `states` that of its states; None is skipped.
    """
    if not x.dtype.is_floating_point:
        raise TypeError(f"{where}: {first} must have a floating-point dtype, got {x.dtype}")
    for others, dtype in ((activations, x.dtype), (states, state_dtype(x.dtype))):
        for name, other in others.items():
            if other is not None:
                check_dtype_and_device(where, name, other, dtype, x.device)


def check_parameter(where: str, name: str, x: Tensor | None, like: Tensor) -> None:
    """Raise unless a parameter, if there is one, holds floating-point numbers in memory, on the device of `like`."""
    if x is None:
        return
    if not x.dtype.is_floating_point:
        raise TypeError(f"{where}: {name} must have a floating-point dtype, got {x.dtype}")
    check_dtype_and_device(where, name, x, x.dtype, like.device)
    if not is_tracing():
        check_memory(where, name, x)


def check_memory(where: str, name: str, x: Tensor | None) -> None:
    """Raise `ValueError` if the memory of a tensor on the CPU was freed: reading it would end the process."""
    if x is not None and type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.numel() and not x.data_ptr():
        raise ValueError(f"{where}: {name} has no memory: its storage was resized or freed")


def check_mutually_exclusive(where: str, name: str, **others: Any) -> None:
    """Raise `ValueError` if an argument is combined with others that it excludes."""
    if present := [other for other, value in others.items() if value is not None]:
        raise ValueError(f"{where}: {name} cannot be combined with {' or '.join(others)}, got {', '.join(present)}")


def check_time_steps(where: str, t: int) -> None:
    """Raise `ValueError` unless a sequence has at least one step."""
    if t < 1:
        raise ValueError(f"{where}: the sequence must have at least one step, got t = 0")


def check_nonpositive(where: str, name: str, x: Tensor, why: str = "") -> None:
    """Raise `ValueError` if a number of `x` is positive, where reading the values is cheap."""
    if can_read_values(x) and x.numel() and (largest := x.detach().max().item()) > 0:
        raise ValueError(f"{where}: {name} must never be positive{why}, got up to {largest:.6g}")


def can_read_values(x: Tensor) -> bool:
    """Return whether values can be read without device synchronization or a graph break: in eager mode, on the CPU."""
    return x.device.type == "cpu" and not is_tracing()


def check_cu_seqlens(where: str, cu_seqlens: Any, batch: int, t: int, device: torch.device) -> None:
    """Raise unless `cu_seqlens` = (0, ..., t), integer and strictly increasing, on `device`, on a batch of one."""
    check_tensor(where, "cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{where}: cu_seqlens must have shape (sequences + 1,), got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{where}: cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.device != device:
        raise ValueError(f"{where}: cu_seqlens must be on {device}, got {cu_seqlens.device}")
    if batch != 1:
        raise ValueError(f"{where}: packed sequences (cu_seqlens) need a batch of 1, got {batch}")
    if not can_read_values(cu_seqlens):
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != t:
        raise ValueError(f"{where}: cu_seqlens must run from 0 to t = {t}, got {bounds[0]} to {bounds[-1]}")
    if any(stop <= start for start, stop in itertools.pairwise(bounds)):
        raise ValueError(f"{where}: cu_seqlens must be strictly increasing, got {bounds}")


def check_initial_state(
    where: str, state: Tensor | None, like: Tensor, shape: tuple[int, ...], cu_seqlens: Tensor | None
) -> Tensor:
    """Check the time of `like` (b, t, ...), its boundaries, and the initial states of its rows or packed sequences.

    Returns:
        The states (z, *shape); zeros if there are none.
    """
    check_time_steps(where, like.shape[1])
    if cu_seqlens is not None:
        check_cu_seqlens(where, cu_seqlens, like.shape[0], like.shape[1], like.device)
    rows = like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = state_dtype(like.dtype)
    if state is None:
        return like.new_zeros((rows, *shape), dtype=dtype)
    check_tensor(where, "initial_state", state)
    if state.shape != (rows, *shape):
        raise ValueError(f"{where}: initial_state must have shape {(rows, *shape)}, got {tuple(state.shape)}")
    check_dtype_and_device(where, "initial_state", state, dtype, like.device)
    return state
