"""Load the compiled kernels, and call them with checked arguments.

The library has a plain C interface and is loaded with ctypes after torch, which brings its OpenMP runtime under the
name that the library asks for, so both share one pool of threads. Kernels follow shapes and dtypes into memory, so
`call` checks all of them against the schema and puts them into the kernel's structure.

Environment:
    ANYMAMBA_LIBRARY: Shared object to load in place of the installed one.
    ANYMAMBA_ISA: `baseline` or `avx2` limits the vector instructions that are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.core import registry
from anymamba.core.dtypes import state_dtype
from anymamba.kernels.cpu import schema

_FILE_NAME = "libanymamba_cpu.dylib" if sys.platform == "darwin" else "libanymamba_cpu.so"
_ISAS = ("baseline", "avx2", "avx512")
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # DType of csrc/simd/dtypes.h
WEIGHT_FORMATS = {"bfloat16": 2, "float16": 3, "int8": 4, "int4": 5}  # DType again, by the name of the format


class Library(NamedTuple):
    """The loaded kernels, or why there are none."""

    handle: ctypes.CDLL | None  # None if the library was not loaded
    reason: str  # why it was not loaded; empty if it was
    isa: str = ""  # vector instructions in use: baseline, avx2 or avx512 (`wide` in a build for tests)
    is_mistake: bool = False  # whether the reason is an invalid environment variable; then nothing is computed at all
    has_threads: bool = False  # whether it was built with OpenMP; without, it runs on one thread


def _candidates() -> list[Path]:
    """Return where the library may be: next to this file, or where the installer put it for an editable install."""
    if requested := os.environ.get("ANYMAMBA_LIBRARY"):
        return [Path(requested).resolve()]  # a bare name is a file here, not one on the system's search path
    files = [Path(__file__).parent / _FILE_NAME]
    with contextlib.suppress(PackageNotFoundError):
        files.append(Path(str(distribution("anymamba").locate_file(f"anymamba/kernels/cpu/{_FILE_NAME}"))))
    return files


def _load() -> Library:
    if (isa := os.environ.get("ANYMAMBA_ISA", "")) not in ("", *_ISAS):
        return Library(None, f"ANYMAMBA_ISA must be one of {', '.join(_ISAS)}, got {isa!r}", is_mistake=True)
    if reason := registry.reason_off():
        return Library(None, reason)
    path = next((file for file in _candidates() if file.exists()), None)
    if path is None and (requested := os.environ.get("ANYMAMBA_LIBRARY")):
        return Library(None, f"ANYMAMBA_LIBRARY names {requested}, which does not exist")
    if path is None:
        return Library(None, "not built: the package was installed without a C++ compiler")
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return Library(None, f"{path} could not be loaded: {error}")
    if not _is_compatible(handle):
        return Library(None, f"{path} is of another version: reinstall the package")
    handle.anymamba_isa.restype, handle.anymamba_has_threads.restype = ctypes.c_char_p, ctypes.c_bool
    if not (isa := handle.anymamba_isa().decode()):
        return Library(None, f"{path} was built for other processors than this one")
    return Library(handle, "", isa, has_threads=handle.anymamba_has_threads())


def _is_compatible(handle: ctypes.CDLL) -> bool:
    """Return whether the library reads the structures that we write."""
    if not hasattr(handle, "anymamba_arguments"):
        return False
    handle.anymamba_arguments.restype = ctypes.c_char_p
    return bool(handle.anymamba_arguments() == schema.digest().encode())


LIBRARY = _load()


def describe() -> str:
    """Return whether the kernels were built and which vector instructions they use, or why there are none."""
    if LIBRARY.handle is None:
        return f"none: {LIBRARY.reason}"
    return f"built, using {LIBRARY.isa}" + ("" if LIBRARY.has_threads else ", on one thread: built without OpenMP")


def missing(dtype: torch.dtype) -> str:
    """Return why there is no kernel for activations of `dtype`; empty if there is one.

    Raises `ValueError` if an environment variable has an invalid value.
    """
    if LIBRARY.is_mistake:
        raise ValueError(LIBRARY.reason)
    return LIBRARY.reason or ("" if dtype in DTYPES else f"there is none for {dtype}")


def missing_for(x: Tensor, *_: Any) -> str:
    """Return why there is no kernel for inputs whose first is `x`; empty if there is one."""
    return missing(x.dtype)


class _Description(NamedTuple):
    fields: dict[str, schema.Field]
    sizes: list[tuple[str, str]]  # letter, name
    structure: type[Any]


_DESCRIPTIONS = {
    function: _Description(
        {field.name: field for field in described.fields},
        list(described.sizes.items()),
        schema.c_structure(described.name),
    )
    for function, described in schema.FUNCTIONS.items()
}
_CPU = torch.device("cpu")


def call(
    kernel: str,
    dtype: torch.dtype,
    tensors: dict[str, Tensor | None],
    results: dict[str, Tensor],
    *,
    bounds: Tensor | None = None,
    sizes: dict[str, int] | None = None,
    **numbers: int | float,
) -> None:
    """Call a kernel, after checking what it reads (`fill`); raise `MemoryError` if its scratch memory is not available.

    Args:
        kernel: Name in `schema.FUNCTIONS`.
        dtype: Dtype of the activations.
        tensors: Tensors that it reads, by field name; None is left out.
        results: Contiguous tensors that it writes, by field name.
        bounds: Boundaries of packed sequences, from `read_bounds`.
        sizes: Sizes that are known already, by letter.
        numbers: Fields that are numbers.
    """
    fields, size_names, structure = _DESCRIPTIONS[kernel]
    args, known = structure(), dict(sizes or {})
    args.dtype, args.threads = DTYPES[dtype], torch.get_num_threads()
    tensors_in_use = [
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
    if function(kernel)(ctypes.byref(args)):
        raise MemoryError(f"{kernel}: out of memory")
    del tensors_in_use  # until here: `args` holds their addresses only


def function(name: str) -> Any:
    """Return the C function of a kernel; it takes the address of its structure, and returns 0 unless memory is out."""
    assert LIBRARY.handle is not None
    return getattr(LIBRARY.handle, f"anymamba_{name}")


def fill(args: Any, field: schema.Field, x: Tensor, dtype: torch.dtype, sizes: dict[str, int]) -> Tensor:
    """Check a tensor, put its address into its field, and return the tensor whose memory is used.

    Raises `ValueError` for another shape or device, or without memory, and `TypeError` for another dtype.
    """
    name, kind, axes, strides, _ = field
    shape = x.shape
    fits = len(shape) == len(axes) and x.is_cpu
    for axis, size in zip(axes, shape, strict=False):
        fits = fits and sizes.setdefault(axis, size) == size
    if not fits:
        expected = tuple(sizes.get(axis, axis) for axis in axes)
        raise ValueError(f"{name} must have shape {expected} on cpu, got {tuple(shape)} on {x.device}")
    acc_dtype = state_dtype(dtype)
    expected_dtypes = {"own": dtype, "index": torch.int64, "codes": x.dtype}
    if x.dtype != (expected_dtype := expected_dtypes.get(kind, acc_dtype)):
        if kind != "any" or x.dtype not in DTYPES:
            description = "a floating-point tensor" if kind == "any" else expected_dtype
            raise TypeError(f"{name} must be {description}, got {x.dtype}")
        x = x.to(acc_dtype)
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
    """Return memory that a kernel writes: on the CPU, whatever torch's default device is."""
    return torch.empty(shape, dtype=dtype, device=_CPU)


def empty_like(x: Tensor) -> Tensor:
    """Return contiguous memory for a result of the shape and dtype of `x`."""
    return torch.empty(x.shape, dtype=x.dtype, device=_CPU)


def zeros_like(x: Tensor) -> Tensor:
    """Return zeros of the shape and dtype of `x`, for results that no kernel computes."""
    return torch.zeros(x.shape, dtype=x.dtype, device=_CPU)


def read_lengths(lengths: Tensor | None, t: int) -> Tensor | None:
    """Return how many steps of each row are real, as the kernels read it."""
    return None if lengths is None else lengths.to(torch.int64).clamp(0, t)


def read_bounds(cu_seqlens: Tensor | None, b: int, t: int) -> Tensor | None:
    """Return `cu_seqlens` as the kernels read it, if it is (0, ..., t) in increasing order for a single row."""
    if cu_seqlens is None:
        return None
    bounds = cu_seqlens.to("cpu", torch.int64).contiguous()
    if b != 1:
        raise ValueError(f"packed sequences must be in a batch of 1, got {b}")
    if bounds[0] != 0 or bounds[-1] != t or (bounds.diff() <= 0).any():
        raise ValueError(f"cu_seqlens must increase strictly from 0 to t = {t}, got {bounds.tolist()}")
    return bounds
