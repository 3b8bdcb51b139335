"""Convolution, norm, gate, discretization and Mamba-1's scan by the compiled kernels (contracts: `ops/`, `scan/`)."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.core.registry import Implementation
from anymamba.kernels.cpu import bindings
from anymamba.kernels.cpu.bindings import call, empty, empty_like, read_bounds, read_lengths, zeros_like


class _Conv(NamedTuple):
    """Inputs of `causal_conv`."""

    x: Tensor
    window: Tensor
    weight: Tensor
    bias: Tensor | None
    lengths: Tensor | None
    cu_seqlens: Tensor | None

    def run(self, function: str, tensors: dict[str, Tensor | None], results: dict[str, Tensor]) -> None:
        """Call a kernel with all of them, and `tensors`."""
        b, t, _ = self.x.shape
        bounds = read_bounds(self.cu_seqlens, b, t)
        arguments = {**self._asdict(), "lengths": read_lengths(self.lengths, t), **tensors}
        sizes = {"z": b if bounds is None else bounds.shape[0] - 1}
        call(function, self.x.dtype, arguments, results, bounds=bounds, sizes=sizes)


def _conv_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    conv = _Conv(*inputs)
    if not conv.x.numel():
        return empty_like(conv.x), conv.window.clone()
    results = {"out": empty_like(conv.x), "new_window": empty_like(conv.window)}
    conv.run("conv_forward", {}, results)
    return results["out"], results["new_window"]


def _conv_backward(dout: Tensor, dnew_window: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    conv = _Conv(*inputs)
    acc_dtype = state_dtype(conv.x.dtype)
    if not conv.x.numel():
        return zeros_like(conv.x), dnew_window.clone(), zeros_like(conv.weight), zeros_like(conv.weight[:, 0])
    grads = {"dx": empty_like(conv.x), "dwindow": empty_like(conv.window)}
    grads |= {"dweight": empty(conv.weight.shape, acc_dtype), "dbias": empty(conv.weight.shape[:1], acc_dtype)}
    conv.run("conv_backward", {"dout": dout, "dnew_window": dnew_window}, grads)
    dbias = grads["dbias"].to(conv.weight.dtype if conv.bias is None else conv.bias.dtype)
    return grads["dx"], grads["dwindow"], grads["dweight"].to(conv.weight.dtype), dbias


def _row_axes(x: Tensor) -> int:
    """Return how many of the last axes of `x` to treat as one row, so that rows are evenly spaced without a copy."""
    for axes in range(1, x.ndim):
        leading = [(x.shape[i], x.stride(i)) for i in range(x.ndim - axes) if x.shape[i] > 1]
        if all(stride == size * after for (_, stride), (size, after) in itertools.pairwise(leading)):
            return axes
    return 1


class _Norm(NamedTuple):
    """Inputs of `rms_norm`."""

    x: Tensor
    z: Tensor | None
    weight: Tensor
    group_size: int
    norm_before_gate: bool
    eps: float

    def run(self, function: str, tensors: dict[str, Tensor | None], results: dict[str, Tensor]) -> None:
        """Call a kernel; a row may hold several groups of axes, each with the same weight."""
        width, channels = self.width, self.x.shape[-1]
        arguments = {"x": self.x, "z": self.z, **tensors}
        if self.x.ndim != 2:
            arguments = {name: None if x is None else x.reshape(-1, width) for name, x in arguments.items()}
        arguments["weight"] = self.weight if width == channels else self.weight.repeat(width // channels)
        size, order = self.group_size, self.norm_before_gate
        call(function, self.x.dtype, arguments, results, group_size=size, norm_before_gate=order, eps=self.eps)

    @property
    def width(self) -> int:
        """Return the number of elements per row."""
        return math.prod(self.x.shape[self.x.ndim - _row_axes(self.x) :])


def _norm_forward(*inputs: Any) -> Tensor:
    norm = _Norm(*inputs)
    y = empty_like(norm.x)
    if norm.x.numel():
        norm.run("norm_forward", {}, {"y": y})
    return y


def _norm_backward(dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    norm = _Norm(*inputs)
    make = empty_like if norm.x.numel() else zeros_like
    grads = {"dx": make(norm.x)}
    if norm.z is not None:
        grads["dz"] = make(norm.z)
    dweight = make(empty((norm.width if norm.x.numel() else norm.weight.shape[0],), state_dtype(norm.x.dtype)))
    if norm.x.numel():
        norm.run("norm_backward", {"dy": dy}, {**grads, "dweight": dweight})
    summed = dweight.unflatten(0, (-1, norm.weight.shape[0])).sum(0).to(norm.weight.dtype)
    return grads["dx"], grads.get("dz", dy.new_empty(0)), summed


class _Gate(NamedTuple):
    """Inputs of `rank_gate`."""

    y: Tensor
    z: Tensor
    gate: Tensor | None
    out: Tensor | None

    def run(self, function: str, tensors: dict[str, Tensor | None], results: dict[str, Tensor]) -> None:
        """Call a kernel; `tensors` are (b, t, h, p) like z."""
        b, t, r, h, p = self.y.shape
        arguments: dict[str, Tensor | None] = {"y": self.y.reshape(b * t, r, h * p)}
        for name, x in {"z": self.z, **tensors}.items():
            arguments[name] = None if x is None else x.reshape(b * t, h * p)
        for name, weight in (("gate_weight", self.gate), ("out_weight", self.out)):
            arguments[name] = None if weight is None else weight.transpose(0, 1).reshape(r, h * p)
        call(function, self.y.dtype, arguments, results)


def _gate_forward(*inputs: Any) -> Tensor:
    gate = _Gate(*inputs)
    out = empty_like(gate.z)
    if out.numel():
        gate.run("gate_forward", {}, {"out": out})
    return out


def _gate_backward(dout: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    gate = _Gate(*inputs)
    make = empty_like if gate.z.numel() else zeros_like
    grads = {"dy": make(gate.y), "dz": make(gate.z)}
    shape = (2, *gate.y.shape[2:]) if gate.gate is not None else (2, 0)
    dweights_2rhp = make(empty(shape, state_dtype(gate.y.dtype)))
    if gate.z.numel():
        gate.run("gate_backward", {"dout": dout}, {**grads, "dweights": dweights_2rhp})
    if gate.gate is None or gate.out is None:
        return grads["dy"], grads["dz"], dout.new_empty(0), dout.new_empty(0)
    dgate, dout_weight = (
        dweight_rhp.transpose(0, 1).to(weight.dtype, memory_format=torch.contiguous_format, copy=True)
        for dweight_rhp, weight in zip(dweights_2rhp, (gate.gate, gate.out), strict=True)
    )
    return grads["dy"], grads["dz"], dgate, dout_weight


class _Discretize(NamedTuple):
    """Inputs of `discretize`."""

    dt: Tensor
    a: Any  # a tensor; None, like the next two, where step sizes alone are computed
    trap: Any
    rotation: Any
    dt_bias: Tensor
    heavy_tail: bool
    a_floor: float
    dt_min: float
    dt_max: float
    max_rotation: float
    quaternion: bool
    lengths: Tensor | None

    def run(self, function: str, tensors: dict[str, Tensor | None], results: dict[str, Tensor]) -> None:
        """Call a kernel; `tensors` are (b, t, ...)."""
        if self.quaternion and self.rotation.shape[-1] % 3:
            raise ValueError(f"quaternion rotations are three numbers each, got {self.rotation.shape[-1]} in all")
        raw = {"dt_raw": self.dt, "a_raw": self.a, "trap_raw": self.trap, "rotation_raw": self.rotation, **tensors}
        arguments = {name: None if x is None else x.flatten(0, 1) for name, x in raw.items()}
        arguments |= {"dt_bias": self.dt_bias, "lengths": read_lengths(self.lengths, self.dt.shape[1])}
        call(
            function,
            self.dt.dtype,
            arguments,
            results,
            sizes={"b": self.dt.shape[0]},
            time=self.dt.shape[1],
            heavy_tail=self.heavy_tail,
            quaternion=self.quaternion,
            rate_floor=self.a_floor,
            dt_min=self.dt_min,
            dt_max=self.dt_max,
            range=self.max_rotation,
        )


_DISCRETIZED = ("dt", "log_decay", "gamma", "kappa", "rate")


def _discretize_forward(*inputs: Any) -> tuple[Tensor, ...]:
    raw = _Discretize(*inputs)
    acc_dtype, like = state_dtype(raw.dt.dtype), (raw.dt, raw.dt, raw.dt, raw.dt, raw.rotation)
    results = {name: empty(x.shape, acc_dtype) for name, x in zip(_DISCRETIZED, like, strict=True)}
    if raw.dt.numel():
        raw.run("discretize_forward", {}, results)
    return tuple(results.values())


def _discretize_backward(*arguments: Any) -> tuple[Tensor, ...]:
    cotangents, raw = arguments[:5], _Discretize(*arguments[5:])
    make = empty_like if raw.dt.numel() else zeros_like
    grads = {f"d{name}_raw": make(x) for name, x in zip(("dt", "a", "trap", "rotation"), raw[:4], strict=True)}
    grads["ddt_bias"] = make(empty(raw.dt_bias.shape, state_dtype(raw.dt.dtype)))
    if raw.dt.numel():
        raw.run("discretize_backward", {f"d{name}": x for name, x in zip(_DISCRETIZED, cotangents, strict=True)}, grads)
    grads["ddt_bias"] = grads["ddt_bias"].to(raw.dt_bias.dtype)
    return tuple(grads.values())


def _step_inputs(dt: Tensor, bias: Tensor, dt_min: float, dt_max: float, lengths: Tensor | None) -> _Discretize:
    return _Discretize(dt, None, None, None, bias, False, 0.0, dt_min, dt_max, 0.0, False, lengths)


def _steps_forward(*inputs: Any) -> Tensor:
    raw = _step_inputs(*inputs)
    sizes = empty(raw.dt.shape, state_dtype(raw.dt.dtype))
    if raw.dt.numel():
        raw.run("discretize_forward", {}, {"dt": sizes})
    return sizes


def _steps_backward(dsizes: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    raw = _step_inputs(*inputs)
    make = empty_like if raw.dt.numel() else zeros_like
    ddt, dbias = make(raw.dt), make(empty(raw.dt_bias.shape, state_dtype(raw.dt.dtype)))
    if raw.dt.numel():
        raw.run("discretize_backward", {"ddt": dsizes}, {"ddt_raw": ddt, "ddt_bias": dbias})
    return ddt, dbias.to(raw.dt_bias.dtype)


class _Selective(NamedTuple):
    """Inputs of `selective_scan`."""

    x: Tensor
    dt: Tensor
    rates: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor | None
    z: Tensor | None
    initial_state: Tensor
    cu_seqlens: Tensor | None
    chunk_len: int | None
    algorithm: str

    def run(self, function: str, tensors: dict[str, Tensor | None], results: dict[str, Tensor]) -> None:
        """Call a kernel with all of them, and `tensors`."""
        rows, t, _ = self.x.shape
        bounds = read_bounds(self.cu_seqlens, rows, t)
        arguments = {**{name: getattr(self, name) for name in self._fields[:8]}, **tensors}
        sizes = {"z": rows if bounds is None else bounds.shape[0] - 1}
        call(function, self.x.dtype, arguments, results, bounds=bounds, sizes=sizes)


def _selective_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    scan = _Selective(*inputs)
    y = empty_like(scan.x)
    if not scan.x.numel():
        return y, scan.initial_state.clone()
    final_state = empty_like(scan.initial_state)
    scan.run("selective_forward", {}, {"y": y, "final_state": final_state})
    return y, final_state


def _selective_backward(dy: Tensor, dfinal_state: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    scan = _Selective(*inputs)
    make = empty_like if scan.x.numel() else zeros_like
    grads = {f"d{name}": make(x) for name, x in zip(scan._fields, scan[:8], strict=False) if x is not None}
    grads["dskip"] = make(empty(scan.rates.shape[:1], scan.rates.dtype))
    if scan.x.numel():
        scan.run("selective_backward", {"dy": dy, "dfinal_state": dfinal_state}, grads)
    if scan.skip is not None:
        grads["dskip"] = grads["dskip"].to(scan.skip.dtype)
    return tuple(grads.get(f"d{name}", dy.new_empty(0)) for name in scan._fields[:8])


IMPLEMENTATIONS = {
    "causal_conv": Implementation(_conv_forward, _conv_backward, bindings.missing_for),
    "rms_norm": Implementation(_norm_forward, _norm_backward, bindings.missing_for),
    "rank_gate": Implementation(_gate_forward, _gate_backward, bindings.missing_for),
    "step_sizes": Implementation(_steps_forward, _steps_backward, bindings.missing_for),
    "discretize": Implementation(_discretize_forward, _discretize_backward, bindings.missing_for),
    "selective_scan": Implementation(_selective_forward, _selective_backward, bindings.missing_for),
}
