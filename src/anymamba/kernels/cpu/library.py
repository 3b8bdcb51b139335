"""Find and load the compiled CPU kernels, and say why where there are none.

The library has a plain C interface and is loaded with ctypes once torch is there: torch brings its OpenMP runtime under
the name that the library asks for, so both share one pool of threads.

Environment:
    ANYMAMBA_KERNELS: `off` keeps the kernels out and leaves everything to the portable implementations.
    ANYMAMBA_LIBRARY: a shared object to load in place of the installed one.
    ANYMAMBA_ISA: `baseline` or `avx2` narrows the vector instructions that are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

import torch

from anymamba.kernels.cpu import arguments

_FILE_NAME = "libanymamba_cpu.dylib" if sys.platform == "darwin" else "libanymamba_cpu.so"
_VALUES = {"ANYMAMBA_KERNELS": ("on", "off"), "ANYMAMBA_ISA": ("baseline", "avx2", "avx512")}
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # DType of csrc/dtypes.h
WEIGHT_DTYPES = {**DTYPES, torch.int8: 4, torch.uint8: 5}  # a byte holds two weights of four bits


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
    if not (isa := handle.anymamba_isa().decode()):
        return Library(None, f"{path} was built for other processors than this one")
    return Library(handle, "", isa, threads=handle.anymamba_has_threads())


def _is_ours(handle: ctypes.CDLL) -> bool:
    """Whether the library reads the structures that we write."""
    if not hasattr(handle, "anymamba_arguments"):
        return False
    handle.anymamba_arguments.restype = ctypes.c_char_p
    return bool(handle.anymamba_arguments() == arguments.digest().encode())


LIBRARY = _load()


def missing(dtype: torch.dtype) -> str:
    """Why there is no kernel for activations of `dtype`; empty where there is one.

    Raises:
        ValueError: a variable of the environment has a value that it cannot have.
    """
    if LIBRARY.mistaken:
        raise ValueError(LIBRARY.reason)
    return LIBRARY.reason or ("" if dtype in DTYPES else f"there is none for {dtype}")
