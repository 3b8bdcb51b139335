"""The argument structures of the compiled kernels, field by field as csrc/*_args.h has them.

A library is only used if it finds each of the same size: one that was built from other sources is refused as a whole.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

_i64, _f64, _pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_Field = tuple[str, Any]


def _numbers(names: str) -> Iterable[_Field]:
    return ((name, _i64) for name in names.split())


def _floats(names: str) -> Iterable[_Field]:
    return ((name, _f64) for name in names.split())


def _pointers(names: str) -> Iterable[_Field]:
    return ((name, _pointer) for name in names.split())


def _strided(name: str, axes: int) -> Iterable[_Field]:
    """A tensor with the strides of its leading axes."""
    return (name, _pointer), (f"{name}_strides", _i64 * axes)


def _rows(name: str) -> Iterable[_Field]:
    """A matrix with the distance between its rows."""
    return (name, _pointer), (f"{name}_row", _i64)


class ScanArgs(ctypes.Structure):
    """Of csrc/scan_args.h."""

    _fields_ = (
        *_numbers("dtype threads batch time rank heads groups width state chunk_len sequences"),
        *_pointers("bounds"),
        *_strided("v", 4),
        *_strided("k", 4),
        *_strided("q", 4),
        *_strided("log_decay", 3),
        *_strided("scale", 3),
        *_pointers("skip initial_state y final_state k_bias q_bias"),
        *_numbers("pairs interleaved"),
        *_pointers("rate dt start gamma kappa value_weight lengths last_k turned"),
        *_strided("dy", 4),
        *_pointers("dfinal_state dv dk dq dlog_decay dscale dskip dinitial_state"),
        *_pointers("dlast_k dturned dk_bias dq_bias drate ddt dstart dgamma dkappa dvalue_weight"),
    )


class ConvArgs(ctypes.Structure):
    """Of csrc/block_args.h."""

    _fields_ = (
        *_numbers("dtype threads batch time channels width sequences"),
        *_pointers("bounds lengths"),
        *_strided("x", 2),
        *_pointers("window weight bias out new_window"),
        *_strided("dout", 2),
        *_pointers("dnew_window dx dwindow dweight dbias"),
    )


class NormArgs(ctypes.Structure):
    """Of csrc/block_args.h."""

    _fields_ = (
        *_numbers("dtype threads rows channels group_size norm_before_gate"),
        *_floats("eps"),
        *_rows("x"),
        *_rows("z"),
        *_pointers("weight y"),
        *_rows("dy"),
        *_pointers("dx dz dweight"),
    )


class PrepareArgs(ctypes.Structure):
    """Of csrc/mamba3_args.h."""

    _fields_ = (
        *_numbers("dtype threads batch time heads pairs heavy_tail"),
        *_floats("rate_floor dt_min dt_max range"),
        *_pointers("lengths"),
        *_rows("dt_raw"),
        *_rows("a_raw"),
        *_rows("trap_raw"),
        *_rows("turn_raw"),
        *_pointers("dt_bias dt log_decay gamma kappa rate"),
        *_pointers("ddt dlog_decay dgamma dkappa drate ddt_raw da_raw dtrap_raw dturn_raw ddt_bias"),
    )


class GateArgs(ctypes.Structure):
    """Of csrc/mamba3_args.h."""

    _fields_ = (
        *_numbers("dtype threads rows rank channels"),
        *_pointers("y"),
        *_rows("z"),
        *_pointers("gate_weight out_weight out"),
        *_rows("dout"),
        *_pointers("dy dz dweights"),
    )


class SelectiveArgs(ctypes.Structure):
    """Of csrc/selective_args.h."""

    _fields_ = (
        *_numbers("dtype threads batch time channels state sequences"),
        *_pointers("bounds"),
        *_strided("x", 2),
        *_strided("dt", 2),
        *_strided("z", 2),
        *_strided("b", 2),
        *_strided("c", 2),
        *_pointers("rates skip initial_state y final_state"),
        *_strided("dy", 2),
        *_pointers("dfinal_state dx ddt dz db dc drates dskip dinitial_state"),
    )


class Parameter(ctypes.Structure):
    """Of csrc/decode_args.h, as all that follow."""

    _fields_ = (*_pointers("data"), *_numbers("dtype"))


def _parameters(names: str) -> Iterable[_Field]:
    return ((name, Parameter) for name in names.split())


class Phase(ctypes.Structure):
    """A kind, and the address of its own structure."""

    _fields_ = (*_numbers("kind"), *_pointers("args"))


class EdgePhase(ctypes.Structure):
    """The input to a slot, or a slot to the output."""

    _fields_ = (*_numbers("width slot"),)


class NormPhase(ctypes.Structure):
    """An RMS norm, with or without a gate."""

    _fields_ = (
        *_numbers("width group_size norm_before_gate"),
        *_floats("eps"),
        *_numbers("x z to"),
        *_parameters("weight"),
    )


class GatePhase(ctypes.Structure):
    """`x silu(z)`."""

    _fields_ = (*_numbers("width x z to"),)


class LinearPhase(ctypes.Structure):
    """A projection."""

    _fields_ = (*_numbers("in_ out x to add"), *_parameters("weight bias"))


class ConvPhase(ctypes.Structure):
    """The causal convolution."""

    _fields_ = (*_numbers("channels width x to cache_window"), *_parameters("weight bias"))


class Mamba1Phase(ctypes.Structure):
    """Mamba-1 between its projections."""

    _fields_ = (*_numbers("channels state x dt z b c to cache_state"), *_parameters("a_log skip"))


class Mamba2Phase(ctypes.Structure):
    """Mamba-2 between its convolution and its norm."""

    _fields_ = (
        *_numbers("heads head_width groups state skip_per_channel"),
        *_floats("dt_min dt_max"),
        *_numbers("dt act to cache_state"),
        *_parameters("dt_bias a_log skip"),
    )


class Mamba3Phase(ctypes.Structure):
    """Mamba-3 between its projections."""

    _fields_ = (
        *_numbers("heads head_width groups state rank pairs interleaved heavy_tail"),
        *_floats("rate_range dt_min dt_max a_floor key_eps query_eps out_eps"),
        *_numbers("z x b c dt a trap angle keys to cache_state cache_k cache_v cache_angle"),
        *_parameters("key_norm query_norm key_bias query_bias dt_bias skip mimo_x mimo_z mimo_o out_norm"),
    )


class ProgramArgs(ctypes.Structure):
    """A program of phases and one token a row."""

    _fields_ = (
        *_numbers("dtype threads batch width count"),
        *_pointers("phases input"),
        *_numbers("input_dtype input_row"),
        *_pointers("output"),
        *_numbers("output_width"),
        *_pointers("old_cache new_cache"),
    )


STRUCTURES = {
    structure.__name__: structure
    for structure in (
        ScanArgs,
        ConvArgs,
        NormArgs,
        PrepareArgs,
        GateArgs,
        SelectiveArgs,
        Parameter,
        Phase,
        EdgePhase,
        NormPhase,
        GatePhase,
        LinearPhase,
        ConvPhase,
        Mamba1Phase,
        Mamba2Phase,
        Mamba3Phase,
        ProgramArgs,
    )
}
_KERNELS = ("scan", "conv", "norm", "prepare", "gate", "selective")
FUNCTIONS = (
    *(f"{kernel}_{way}" for kernel in _KERNELS for way in ("forward", "backward")),
    "run_program",
)
