"""Forward and backward of the gated RMS norm by the compiled kernels (`blocks/norms.py` has the contract)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from anymamba.kernels import library
from anymamba.kernels.cpu.structures import NormArgs


def _run(
    name: str,
    rows: dict[str, Tensor],
    weight: Tensor,
    group_size: int,
    norm_before_gate: bool,
    eps: float,
    **results: Tensor,
) -> None:
    """Call a kernel; `rows` are (..., i) tensors, `results` contiguous ones, by the names of their fields."""
    first = rows["x"]
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    channels = first.shape[-1]
    if group_size < 1 or channels % group_size:
        raise ValueError(f"group_size must divide the {channels} channels, got {group_size}")
    args = NormArgs(
        dtype=library.dtype_code(first.dtype),
        threads=torch.get_num_threads(),
        rows=first.numel() // channels,
        channels=channels,
        group_size=group_size,
        norm_before_gate=norm_before_gate,
        eps=eps,
    )
    tensors = {"weight": library.expect("weight", weight, (channels,)).to(wide).contiguous(), **results}
    for field, x in rows.items():
        library.expect(field, x, first.shape, first.dtype)
        tensors[field] = library.dense_last_axis(x.reshape(-1, channels))
        setattr(args, f"{field}_row", tensors[field].stride(0))
    for field, tensor in tensors.items():
        setattr(args, field, tensor.data_ptr())
    library.call(name, args)


def norm_forward(x: Tensor, z: Tensor, weight: Tensor, group_size: int, norm_before_gate: bool, eps: float) -> Tensor:
    """The normed and gated rows, in the shape and dtype of `x`."""
    y = library.empty(x.shape, dtype=x.dtype)
    if x.numel():
        _run("norm_forward", {"x": x, "z": z}, weight, group_size, norm_before_gate, eps, y=y)
    return y


def norm_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, group_size: int, norm_before_gate: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, z and weight."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    make = library.empty if x.numel() else library.zeros
    dx, dz, dweight = make(x.shape, dtype=x.dtype), make(z.shape, dtype=z.dtype), make(weight.shape, dtype=wide)
    if x.numel():
        rows = {"x": x, "z": z, "dy": dy}
        _run(
            "norm_backward",
            rows,
            weight,
            group_size,
            norm_before_gate,
            eps,
            dx=dx,
            dz=dz,
            dweight=dweight,
        )
    return dx, dz, dweight.to(weight.dtype)


def _tiled(x: Tensor) -> int:
    """How many of the last axes of `x` to take as one row, so that all rows lie evenly apart without a copy."""
    for axes in range(1, x.ndim):
        leading = [(x.shape[i], x.stride(i)) for i in range(x.ndim - axes) if x.shape[i] > 1]
        if all(stride == size * after for (_, stride), (size, after) in itertools.pairwise(leading)):
            return axes
    return 1


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The normed rows of x (..., i), weight (i,)."""
    y = library.empty(x.shape, dtype=x.dtype)
    if x.numel():
        rows = x.flatten(-_tiled(x))
        repeated = weight.repeat(rows.shape[-1] // x.shape[-1])
        _run("norm_forward", {"x": rows}, repeated, x.shape[-1], True, eps, y=y)
    return y


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if not x.numel():
        return library.zeros(x.shape, dtype=x.dtype), library.zeros(weight.shape, dtype=weight.dtype)
    axes = _tiled(x)
    rows = {"x": x.flatten(-axes), "dy": dy.flatten(-axes)}
    repeated = weight.repeat(rows["x"].shape[-1] // x.shape[-1])
    dx, dweight = library.empty(x.shape, dtype=x.dtype), library.empty(repeated.shape, dtype=wide)
    _run("norm_backward", rows, repeated, x.shape[-1], True, eps, dx=dx, dweight=dweight)
    return dx, dweight.unflatten(0, (-1, x.shape[-1])).sum(0).to(weight.dtype)
