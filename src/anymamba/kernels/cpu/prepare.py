"""Mamba-3's step sizes, decays, weights and turns by the compiled kernels (contract: `blocks/preparation.py`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.kernels import library
from anymamba.kernels.cpu.structures import PrepareArgs

_RAW = ("dt_raw", "a_raw", "trap_raw", "turn_raw")
_RESULTS = ("dt", "log_decay", "gamma", "kappa", "rate")


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

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Of the results."""
        return *[self.dt.shape] * 4, self.turn.shape

    def run(self, name: str, **tensors: Tensor) -> None:
        """Call a kernel; `tensors` are contiguous, by the names of their fields."""
        b, t, h = self.dt.shape
        args = PrepareArgs(
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
        tensors["dt_bias"] = library.expect("dt_bias", self.dt_bias, (h,)).to(self.wide).contiguous()
        if self.lengths is not None:
            tensors["lengths"] = library.checked_lengths(self.lengths, b, t)
        for field, x in zip(_RAW, self[:4], strict=True):
            library.expect(field, x, (b, t, self.turn.shape[-1] if field == "turn_raw" else h), self.dt.dtype)
            tensors[field] = library.dense_last_axis(x.flatten(0, 1))
            setattr(args, f"{field}_row", tensors[field].stride(0))
        for field, tensor in tensors.items():
            setattr(args, field, tensor.data_ptr())
        library.call(name, args)


def prepare_forward(*arguments: Any) -> tuple[Tensor, ...]:
    """dt, log_decay, gamma, kappa (b, t, h) and the angles' rate (b, t, s)."""
    i = _Inputs(*arguments)
    results = {name: library.empty(shape, dtype=i.wide) for name, shape in zip(_RESULTS, i.shapes, strict=True)}
    if i.dt.numel():
        i.run("prepare_forward", **results)
    return tuple(results.values())


def prepare_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of dt, a, trap, turn and dt_bias, as they came, from those of the results."""
    cotangents, i = arguments[: len(_RESULTS)], _Inputs(*arguments[len(_RESULTS) :])
    make = library.empty if i.dt.numel() else library.zeros
    grads = {f"d{name}": make(x.shape, dtype=x.dtype) for name, x in zip(_RAW, i[:4], strict=True)}
    grads["ddt_bias"] = make(i.dt_bias.shape, dtype=i.wide)
    if i.dt.numel():
        given = {
            f"d{name}": library.expect(f"d{name}", grad, shape, i.wide).contiguous()
            for name, grad, shape in zip(_RESULTS, cotangents, i.shapes, strict=True)
        }
        i.run("prepare_backward", **given, **grads)
    *draw, ddt_bias = grads.values()
    return *draw, ddt_bias.to(i.dt_bias.dtype)
