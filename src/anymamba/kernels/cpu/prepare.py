"""Mamba-3's step sizes, decays, weights and turns by the compiled kernels (contract: `blocks/preparation.py`)."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.kernels import library

_i64, _f64, _pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_RAW = ("dt_raw", "a_raw", "trap_raw", "turn_raw")
_RESULTS = ("dt", "log_decay", "gamma", "kappa", "rate")


class _PrepareArgs(ctypes.Structure):
    """`PrepareArgs` of csrc/mamba3_args.h, field by field."""

    _fields_ = (
        *((name, _i64) for name in ("dtype", "threads", "batch", "time", "heads", "pairs", "heavy_tail")),
        *((name, _f64) for name in ("rate_floor", "dt_min", "dt_max", "range")),
        ("lengths", _pointer),
        *(field for name in _RAW for field in ((name, _pointer), (f"{name}_row", _i64))),
        ("dt_bias", _pointer),
        *((name, _pointer) for name in _RESULTS),
        *((f"d{name}", _pointer) for name in (*_RESULTS, *_RAW, "dt_bias")),
    )


class _Inputs(NamedTuple):
    """The operator's inputs, in the order of its schema."""

    dt: Tensor
    a: Tensor
    trap: Tensor
    turn: Tensor
    dt_bias: Tensor
    heavy_tail: bool
    rate_floor: float
    dt_min: float
    dt_max: float
    turn_range: float
    lengths: Tensor | None

    @property
    def wide(self) -> torch.dtype:
        """Of the results."""
        return torch.float64 if self.dt.dtype == torch.float64 else torch.float32

    def run(self, name: str, **tensors: Tensor) -> None:
        """Call a kernel; `tensors` are contiguous, by the names of their fields."""
        b, t, h = self.dt.shape
        args = _PrepareArgs(
            dtype=library.dtype_code(self.dt.dtype),
            threads=torch.get_num_threads(),
            batch=b,
            time=t,
            heads=h,
            pairs=self.turn.shape[-1],
            heavy_tail=self.heavy_tail,
            rate_floor=self.rate_floor,
            dt_min=self.dt_min,
            dt_max=self.dt_max,
            range=self.turn_range,
        )
        tensors["dt_bias"] = self.dt_bias.to(self.wide).contiguous()
        if self.lengths is not None:
            tensors["lengths"] = self.lengths.to(torch.int64).contiguous()
        for field, x in zip(_RAW, self[:4], strict=True):
            tensors[field] = library.dense_last_axis(x.flatten(0, 1))
            setattr(args, f"{field}_row", tensors[field].stride(0))
        for field, tensor in tensors.items():
            setattr(args, field, tensor.data_ptr())
        library.call(name, args)


def prepare_forward(*arguments: Any) -> tuple[Tensor, ...]:
    """dt, log_decay, gamma, kappa (b, t, h) and the angles' rate (b, t, s)."""
    i = _Inputs(*arguments)
    shapes = (*[i.dt.shape] * 4, i.turn.shape)
    results = {name: library.empty(shape, dtype=i.wide) for name, shape in zip(_RESULTS, shapes, strict=True)}
    if i.dt.numel():
        i.run("anymamba_prepare_forward", **results)
    return tuple(results.values())


def prepare_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of dt, a, trap, turn and dt_bias, as they came, from those of the results."""
    cotangents, i = arguments[: len(_RESULTS)], _Inputs(*arguments[len(_RESULTS) :])
    make = library.empty if i.dt.numel() else library.zeros
    grads = {f"d{name}": make(x.shape, dtype=x.dtype) for name, x in zip(_RAW, i[:4], strict=True)}
    grads["ddt_bias"] = make(i.dt_bias.shape, dtype=i.wide)
    if i.dt.numel():
        given = {f"d{name}": grad.contiguous() for name, grad in zip(_RESULTS, cotangents, strict=True)}
        i.run("anymamba_prepare_backward", **given, **grads)
    *draw, ddt_bias = grads.values()
    return *draw, ddt_bias.to(i.dt_bias.dtype)
