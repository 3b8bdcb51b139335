"""One way to call a kernel: its arguments are checked against their description and put into its structure.

Kernels follow shapes and dtypes into memory, so all of them are checked here for every caller.

§ Find and load the compiled CPU kernels, and say why where there are none.

The library has a plain C interface and is loaded with ctypes once torch is there: torch brings its OpenMP runtime under
the name that the library asks for, so both share one pool of threads.

Environment:
    ANYMAMBA_LIBRARY: a shared object to load in place of the installed one.
    ANYMAMBA_ISA: `baseline` or `avx2` narrows the vector instructions that are used.
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
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # DType of csrc/dtypes.h
WEIGHT_FORMATS = {"bfloat16": 2, "float16": 3, "int8": 4, "int4": 5}  # DType again, by the name of the format


class Library(NamedTuple):
    """The loaded kernels, or why there are none."""

    handle: ctypes.CDLL | None
    reason: str
    isa: str = ""  # the vector instructions in use: baseline, avx2 or avx512 (`wide` in a build for tests)
    mistaken: bool = False  # the reason is a mistake in the environment, and nothing is computed with it
    threads: bool = False  # whether it was built with OpenMP; without, it runs on one thread


def _candidates() -> list[Path]:
    """Where the library may be: next to this file, or, for an editable install, where the installer put it."""
    if chosen := os.environ.get("ANYMAMBA_LIBRARY"):
        return [Path(chosen).resolve()]  # a bare name is a file here, not one on the system's search path
    places = [Path(__file__).parent / _FILE_NAME]
    with contextlib.suppress(PackageNotFoundError):
        places.append(Path(str(distribution("anymamba").locate_file(f"anymamba/kernels/cpu/{_FILE_NAME}"))))
    return places


def _load() -> Library:
    if (isa := os.environ.get("ANYMAMBA_ISA", "")) not in ("", *_ISAS):
        return Library(None, f"ANYMAMBA_ISA must be one of {', '.join(_ISAS)}, got {isa!r}", mistaken=True)
    if reason := registry.reason_off():
        return Library(None, reason)
    path = next((place for place in _candidates() if place.exists()), None)
    if path is None and (chosen := os.environ.get("ANYMAMBA_LIBRARY")):
        return Library(None, f"ANYMAMBA_LIBRARY names {chosen}, which does not exist")
    if path is None:
        return Library(None, "not built: the package was installed without a C++ compiler")
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return Library(None, f"{path} could not be loaded: {error}")
    if not _is_ours(handle):
        return Library(None, f"{path} is of another version: reinstall the package")
    handle.anymamba_isa.restype, handle.anymamba_has_threads.restype = ctypes.c_char_p, ctypes.c_bool
    if not (isa := handle.anymamba_isa().decode()):
        return Library(None, f"{path} was built for other processors than this one")
    return Library(handle, "", isa, threads=handle.anymamba_has_threads())


def _is_ours(handle: ctypes.CDLL) -> bool:
    """Whether the library reads the structures that we write."""
    if not hasattr(handle, "anymamba_arguments"):
        return False
    handle.anymamba_arguments.restype = ctypes.c_char_p
    return bool(handle.anymamba_arguments() == schema.digest().encode())


LIBRARY = _load()


def describe() -> str:
    """Return whether the kernels were built and which vector instructions they use, or why there are none."""
    if LIBRARY.handle is None:
        return f"none: {LIBRARY.reason}"
    return f"built, using {LIBRARY.isa}" + ("" if LIBRARY.threads else ", on one thread: built without OpenMP")


def missing(dtype: torch.dtype) -> str:
    """Why there is no kernel for activations of `dtype`; empty where there is one.

    Raises:
        ValueError: a variable of the environment has a value that it cannot have.
    """
    if LIBRARY.mistaken:
        raise ValueError(LIBRARY.reason)
    return LIBRARY.reason or ("" if dtype in DTYPES else f"there is none for {dtype}")


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
    """Call a kernel.

    Args:
        kernel: one of `schema.FUNCTIONS`.
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
    fields, size_names, structure = _DESCRIPTIONS[kernel]
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
    if function(kernel)(ctypes.byref(args)):
        raise MemoryError(f"{kernel}: out of memory")
    del kept  # until here: `args` holds their addresses only


def function(name: str) -> Any:
    """Return the C function of a kernel; it takes the address of its structure, and returns 0 unless memory is out."""
    assert LIBRARY.handle is not None
    return getattr(LIBRARY.handle, f"anymamba_{name}")


def fill(args: Any, field: schema.Field, x: Tensor, dtype: torch.dtype, sizes: dict[str, int]) -> Tensor:
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
