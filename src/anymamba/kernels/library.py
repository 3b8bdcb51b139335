"""Find and load the compiled CPU kernels, and say why where there are none.

The library has a plain C interface and is loaded with ctypes once torch is there: torch brings its OpenMP runtime under
the name that the library asks for, so both share one pool of threads.

Environment:
    ANYMAMBA_KERNELS: `off` keeps the kernels out and leaves everything to the portable paths.
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
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.kernels.cpu.structures import FUNCTIONS, STRUCTURES

_FILE_NAME = "libanymamba_cpu.dylib" if sys.platform == "darwin" else "libanymamba_cpu.so"
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


_VALUES = {"ANYMAMBA_KERNELS": ("on", "off"), "ANYMAMBA_ISA": ("baseline", "avx2", "avx512")}


class Library(NamedTuple):
    """The loaded kernels, or why there are none."""

    handle: ctypes.CDLL | None
    reason: str
    isa: str = ""  # the vector instructions in use: baseline, avx2 or avx512
    mistaken: bool = False  # the reason is a mistake in the environment, and nothing is computed with it
    threads: bool = False  # whether it was built with OpenMP; without, it runs on one thread


def _candidates() -> list[Path]:
    """Where the library may lie: beside this file, or, for an editable install, where the installer put it."""
    if chosen := os.environ.get("ANYMAMBA_LIBRARY"):
        return [Path(chosen).resolve()]  # a bare name is a file here, not one on the system's search path
    places = [Path(__file__).parent / "cpu" / _FILE_NAME]
    with contextlib.suppress(PackageNotFoundError):
        places.append(Path(str(distribution("anymamba").locate_file(f"anymamba/kernels/cpu/{_FILE_NAME}"))))
    return places


def _load() -> Library:
    for name, known in _VALUES.items():
        if (value := os.environ.get(name, "")) not in ("", *known):
            return Library(None, f"{name} must be one of {', '.join(known)}, got {value!r}", mistaken=True)
    if os.environ.get("ANYMAMBA_KERNELS") == "off":
        return Library(None, "switched off by ANYMAMBA_KERNELS=off")
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
    return Library(handle, "", handle.anymamba_isa().decode(), threads=handle.anymamba_has_threads())


def _is_ours(handle: ctypes.CDLL) -> bool:
    """Whether the library has all our functions, and reads the structures that we write."""
    names = ("size_of", "isa", "has_threads", *FUNCTIONS)
    if not all(hasattr(handle, f"anymamba_{name}") for name in names):
        return False
    handle.anymamba_size_of.restype = ctypes.c_int64
    return all(handle.anymamba_size_of(k.encode()) == ctypes.sizeof(v) for k, v in STRUCTURES.items())


LIBRARY = _load()


def missing(device: torch.device, dtype: torch.dtype) -> str:
    """Why there is no kernel for tensors of `dtype` on `device`; empty where there is one.

    Raises:
        ValueError: a variable of the environment has a value that it cannot have.
    """
    if LIBRARY.mistaken:
        raise ValueError(LIBRARY.reason)
    if device.type != "cpu":
        return f"there is none for device {device.type}"
    if dtype not in _DTYPES:
        return f"there is none for {dtype}"
    return LIBRARY.reason


def call(name: str, args: ctypes.Structure) -> None:
    """Call the kernel `name`, one of `FUNCTIONS`, with its argument structure.

    Raises:
        RuntimeError: there is no kernel.
        MemoryError: it could not allocate its scratch memory.
    """
    if LIBRARY.handle is None:
        raise RuntimeError(f"compiled CPU kernels are not available: {LIBRARY.reason}")
    if LIBRARY.handle[f"anymamba_{name}"](ctypes.byref(args)):
        raise MemoryError(f"{name}: out of memory")


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that a kernel writes: the CPU's, whatever torch's default device is."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The same, for results that no kernel is asked for."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


def dtype_code(dtype: torch.dtype) -> int:
    """The number by which the kernels know `dtype`."""
    return _DTYPES[dtype]


def dense_last_axis(x: Tensor) -> Tensor:
    """`x` itself where its last axis is dense, else a contiguous copy."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def expect(name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """`x`: kernels follow shapes and dtypes into memory, so they are checked here whoever calls.

    Args:
        name: of the argument.
        x: on the CPU.
        shape: that it must have.
        dtype: that it must have; any that the kernels know if none is given.

    Raises:
        ValueError: another shape or device.
        TypeError: another dtype.
    """
    if x.shape != tuple(shape) or x.device.type != "cpu":
        raise ValueError(f"{name} must have shape {tuple(shape)} on cpu, got {tuple(x.shape)} on {x.device}")
    if x.dtype != dtype and (dtype is not None or x.dtype not in _DTYPES):
        raise TypeError(f"{name} must be {dtype or 'a floating-point tensor'}, got {x.dtype}")
    return x


def checked_lengths(lengths: Tensor, b: int, t: int) -> Tensor:
    """How many steps of each row are real, (b,), as the kernels read it.

    Raises:
        ValueError: another shape.
    """
    if lengths.shape != (b,):
        raise ValueError(f"lengths must have shape {(b,)}, got {tuple(lengths.shape)}")
    return lengths.to(torch.int64).clamp(0, t).contiguous()


def checked_bounds(cu_seqlens: Tensor, b: int, t: int) -> Tensor:
    """`cu_seqlens` as the kernels read it.

    Raises:
        ValueError: not (0, ..., t) in increasing order, or more than one row.
    """
    bounds = cu_seqlens.to(torch.int64).contiguous()
    if b != 1:
        raise ValueError(f"packed sequences must lie in a batch of 1, got {b}")
    if bounds[0] != 0 or bounds[-1] != t or (bounds.diff() <= 0).any():
        raise ValueError(f"cu_seqlens must increase strictly from 0 to t = {t}, got {bounds.tolist()}")
    return bounds
