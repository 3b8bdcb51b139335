"""One way to call a kernel: its arguments are checked against their description and put into its structure.

Kernels follow shapes and dtypes into memory, so all of them are checked here for every caller.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.ground.numerics import state_dtype
from anymamba.kernels.cpu import arguments
from anymamba.kernels.cpu.library import DTYPES, LIBRARY


class _Description(NamedTuple):
    fields: dict[str, arguments.Field]
    sizes: list[tuple[str, str]]  # letter, name
    structure: type[Any]


_DESCRIPTIONS = {
    function: _Description(
        {field.name: field for field in described.fields},
        list(described.sizes.items()),
        arguments.c_structure(described.name),
    )
    for function, described in arguments.FUNCTIONS.items()
}
_CPU = torch.device("cpu")


def call(
    function: str,
    dtype: torch.dtype,
    tensors: dict[str, Tensor | None],
    results: dict[str, Tensor],
    *,
    bounds: Tensor | None = None,
    sizes: dict[str, int] | None = None,
    **numbers: int | float,
) -> None:
    """Call a kernel.

    Args:
        function: one of `arguments.FUNCTIONS`.
        dtype: of the activations.
        tensors: what it reads, by the names of the fields; None is left out.
        results: contiguous tensors that it writes, by the names of the fields.
        bounds: of packed sequences, from `checked_bounds`.
        sizes: known already, by letter.
        numbers: fields that are numbers.

    Raises:
        ValueError: a tensor of another shape, on another device, or without memory.
        TypeError: a tensor of another dtype.
        MemoryError: the kernel could not allocate its scratch memory.
    """
    fields, size_names, structure = _DESCRIPTIONS[function]
    args, known = structure(), dict(sizes or {})
    args.dtype, args.threads = DTYPES[dtype], torch.get_num_threads()
    kept = [
        fill(args, fields[name], x, dtype, known) for name, x in tensors.items() if x is not None and name in fields
    ]
    for name, result in results.items():
        setattr(args, name, result.data_ptr())
    if bounds is not None:
        args.bounds, known["z"] = bounds.data_ptr(), bounds.shape[0] - 1
    for letter, size_name in size_names:
        setattr(args, size_name, known.get(letter, 0))
    for name, number in numbers.items():
        setattr(args, name, number)
    run(function, args)
    del kept  # until here: `args` holds their addresses only


def run(function: str, args: ctypes.Structure) -> None:
    """Call a kernel with its structure.

    Raises:
        MemoryError: it could not allocate its scratch memory.
    """
    assert LIBRARY.handle is not None
    if getattr(LIBRARY.handle, f"anymamba_{function}")(ctypes.byref(args)):
        raise MemoryError(f"{function}: out of memory")


def fill(args: Any, field: arguments.Field, x: Tensor, dtype: torch.dtype, sizes: dict[str, int]) -> Tensor:
    """Put a tensor into its field, checked and laid out as it must be; the tensor whose memory is used."""
    name, kind, axes, strides, _ = field
    shape = x.shape
    fits = len(shape) == len(axes) and x.is_cpu
    for axis, size in zip(axes, shape, strict=False):
        fits = fits and sizes.setdefault(axis, size) == size
    if not fits:
        expected = tuple(sizes.get(axis, axis) for axis in axes)
        raise ValueError(f"{name} must have shape {expected} on cpu, got {tuple(shape)} on {x.device}")
    found, wide = x.dtype, state_dtype(dtype)
    wanted = dtype if kind == "own" else torch.int64 if kind == "index" else found if kind == "codes" else wide
    if found != wanted:
        if kind != "any" or found not in DTYPES:
            expected_dtype = "a floating-point tensor" if kind == "any" else wanted
            raise TypeError(f"{name} must be {expected_dtype}, got {found}")
        x = x.to(wide)
    if x.is_neg():
        x = x.resolve_neg()
    if not strides:
        x = x.contiguous()
    else:
        x = x if shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()
        setattr(args, f"{name}_strides", x.stride()[:strides])
    address = x.data_ptr()
    if not address and x.numel():
        raise ValueError(f"{name} has no memory: its storage was resized or freed")
    setattr(args, name, address)
    return x


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that a kernel writes: the CPU's, whatever torch's default device is."""
    return torch.empty(shape, dtype=dtype, device=_CPU)


def empty_like(x: Tensor) -> Tensor:
    """Contiguous memory for a result of the shape and dtype of `x`."""
    return torch.empty(x.shape, dtype=x.dtype, device=_CPU)


def zeros_like(x: Tensor) -> Tensor:
    """The same, where no kernel is asked."""
    return torch.zeros(x.shape, dtype=x.dtype, device=_CPU)


def checked_lengths(lengths: Tensor | None, t: int) -> Tensor | None:
    """How many steps of each row are real, as the kernels read it."""
    return None if lengths is None else lengths.to(torch.int64).clamp(0, t)


def checked_bounds(cu_seqlens: Tensor | None, b: int, t: int) -> Tensor | None:
    """`cu_seqlens` as the kernels read it.

    Raises:
        ValueError: not (0, ..., t) in increasing order, or more than one row.
    """
    if cu_seqlens is None:
        return None
    bounds = cu_seqlens.to("cpu", torch.int64).contiguous()
    if b != 1:
        raise ValueError(f"packed sequences must lie in a batch of 1, got {b}")
    if bounds[0] != 0 or bounds[-1] != t or (bounds.diff() <= 0).any():
        raise ValueError(f"cu_seqlens must increase strictly from 0 to t = {t}, got {bounds.tolist()}")
    return bounds
