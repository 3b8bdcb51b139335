"""Mamba-3's step sizes, decays, weights and turns by the compiled kernels (contract: `blocks/preparation.py`)."""

from __future__ import annotations

import ctypes

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


def _run(
    name: str,
    raw: tuple[Tensor, ...],
    dt_bias: Tensor,
    options: tuple[bool, float, float, float, float],
    lengths: Tensor | None,
    **tensors: Tensor,
) -> None:
    """Call a kernel; `tensors` are contiguous, by the names of their fields."""
    (b, t, h), pairs = raw[0].shape, raw[3].shape[-1]
    wide = torch.float64 if raw[0].dtype == torch.float64 else torch.float32
    heavy_tail, rate_floor, dt_min, dt_max, turn_range = options
    args = _PrepareArgs(
        dtype=library.dtype_code(raw[0].dtype),
        threads=torch.get_num_threads(),
        batch=b,
        time=t,
        heads=h,
        pairs=pairs,
        heavy_tail=heavy_tail,
        rate_floor=rate_floor,
        dt_min=dt_min,
        dt_max=dt_max,
        range=turn_range,
    )
    tensors["dt_bias"] = dt_bias.to(wide).contiguous()
    if lengths is not None:
        tensors["lengths"] = lengths.to(torch.int64).contiguous()
    for field, x in zip(_RAW, raw, strict=True):
        tensors[field] = library.dense_last_axis(x.flatten(0, 1))
        setattr(args, f"{field}_row", tensors[field].stride(0))
    for field, tensor in tensors.items():
        setattr(args, field, tensor.data_ptr())
    library.call(name, args)


def prepare_forward(
    dt: Tensor,
    a: Tensor,
    trap: Tensor,
    turn: Tensor,
    dt_bias: Tensor,
    heavy_tail: bool,
    rate_floor: float,
    dt_min: float,
    dt_max: float,
    turn_range: float,
    lengths: Tensor | None,
) -> tuple[Tensor, ...]:
    """dt, log_decay, gamma, kappa (b, t, h) and the angles' rate (b, t, s)."""
    wide = torch.float64 if dt.dtype == torch.float64 else torch.float32
    shapes = (dt.shape, dt.shape, dt.shape, dt.shape, turn.shape)
    results = {name: torch.empty(shape, dtype=wide) for name, shape in zip(_RESULTS, shapes, strict=True)}
    if dt.numel():
        options = (heavy_tail, rate_floor, dt_min, dt_max, turn_range)
        _run("anymamba_prepare_forward", (dt, a, trap, turn), dt_bias, options, lengths, **results)
    return tuple(results.values())


def prepare_backward(
    ddt: Tensor,
    dlog_decay: Tensor,
    dgamma: Tensor,
    dkappa: Tensor,
    drate: Tensor,
    dt: Tensor,
    a: Tensor,
    trap: Tensor,
    turn: Tensor,
    dt_bias: Tensor,
    heavy_tail: bool,
    rate_floor: float,
    dt_min: float,
    dt_max: float,
    turn_range: float,
    lengths: Tensor | None,
) -> tuple[Tensor, ...]:
    """The gradients of dt, a, trap, turn and dt_bias, as they came."""
    wide = torch.float64 if dt.dtype == torch.float64 else torch.float32
    raw = (dt, a, trap, turn)
    make = torch.empty if dt.numel() else torch.zeros
    grads = {f"d{name}": make(x.shape, dtype=x.dtype) for name, x in zip(_RAW, raw, strict=True)}
    grads["ddt_bias"] = make(dt_bias.shape, dtype=wide)
    if dt.numel():
        options = (heavy_tail, rate_floor, dt_min, dt_max, turn_range)
        cotangents = {
            f"d{name}": grad.contiguous()
            for name, grad in zip(_RESULTS, (ddt, dlog_decay, dgamma, dkappa, drate), strict=True)
        }
        _run("anymamba_prepare_backward", raw, dt_bias, options, lengths, **cotangents, **grads)
    *draw, ddt_bias = grads.values()
    return *draw, ddt_bias.to(dt_bias.dtype)
