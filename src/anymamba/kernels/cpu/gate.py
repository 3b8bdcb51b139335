"""Forward and backward of the gate over ranks by the compiled kernels (contract: `blocks/mimo.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from anymamba.kernels import library
from anymamba.kernels.cpu.structures import GateArgs


def _run(
    name: str, y: Tensor, rows: dict[str, Tensor], weights: tuple[Tensor | None, Tensor | None], **results: Tensor
) -> None:
    """Call a kernel; `rows` are (b, t, h, p) tensors, `results` contiguous ones, by the names of their fields."""
    b, t, r, h, p = y.shape
    args = GateArgs(
        dtype=library.dtype_code(y.dtype), threads=torch.get_num_threads(), rows=b * t, rank=r, channels=h * p
    )
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    tensors = {"y": y.contiguous(), **results}
    for field, x in rows.items():
        library.expect(field, x, (b, t, h, p), y.dtype)
        tensors[field] = library.dense_last_axis(x.reshape(b * t, h * p))
        setattr(args, f"{field}_row", tensors[field].stride(0))
    for field, weight in zip(("gate_weight", "out_weight"), weights, strict=True):
        if weight is not None:
            tensors[field] = library.expect(field, weight, (h, r, p)).to(wide).transpose(0, 1).contiguous()
    for field, tensor in tensors.items():
        setattr(args, field, tensor.data_ptr())
    library.call(name, args)


def gate_forward(y: Tensor, z: Tensor, gate: Tensor | None, out: Tensor | None) -> Tensor:
    """The gated sum over the ranks, (b, t, h, p)."""
    gated = library.empty(z.shape, dtype=z.dtype)
    if gated.numel():
        _run("gate_forward", y, {"z": z}, (gate, out), out=gated)
    return gated


def gate_backward(
    do: Tensor, y: Tensor, z: Tensor, gate: Tensor | None, out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of y, z, gate and out; empty for weights that are none."""
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    make = library.empty if z.numel() else library.zeros
    dy, dz = make(y.shape, dtype=y.dtype), make(z.shape, dtype=z.dtype)
    dweights_2rhp = make((2, *y.shape[2:]) if gate is not None else (2, 0), dtype=wide)
    if z.numel():
        _run("gate_backward", y, {"z": z, "dout": do}, (gate, out), dy=dy, dz=dz, dweights=dweights_2rhp)
    if gate is None or out is None:
        return dy, dz, library.empty((0,), dtype=wide), library.empty((0,), dtype=wide)
    dgate, dout = (
        dweight_rhp.transpose(0, 1).to(weight.dtype, memory_format=torch.contiguous_format, copy=True)
        for dweight_rhp, weight in zip(dweights_2rhp, (gate, out), strict=True)
    )
    return dy, dz, dgate, dout
