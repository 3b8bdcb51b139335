"""Forward and backward of the gate over ranks by the compiled kernels (contract: `blocks/mimo.py`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from anymamba.kernels import library

_i64, _pointer = ctypes.c_int64, ctypes.c_void_p


class _GateArgs(ctypes.Structure):
    """`GateArgs` of csrc/mamba3_args.h, field by field."""

    _fields_ = (
        *((name, _i64) for name in ("dtype", "threads", "rows", "rank", "channels")),
        ("y", _pointer),
        ("z", _pointer),
        ("z_row", _i64),
        *((name, _pointer) for name in ("gate_weight", "out_weight", "out", "dout")),
        ("dout_row", _i64),
        *((name, _pointer) for name in ("dy", "dz", "dgate_weight", "dout_weight")),
    )


def _run(
    name: str, y: Tensor, rows: dict[str, Tensor], weights: tuple[Tensor | None, Tensor | None], **results: Tensor
) -> None:
    """Call a kernel; `rows` are (b, t, h, p) tensors, `results` contiguous ones, by the names of their fields."""
    b, t, r, h, p = y.shape
    args = _GateArgs(
        dtype=library.dtype_code(y.dtype), threads=torch.get_num_threads(), rows=b * t, rank=r, channels=h * p
    )
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    tensors = {"y": y.contiguous(), **results}
    for field, x in rows.items():
        tensors[field] = library.dense_last_axis(x.reshape(b * t, h * p))
        setattr(args, f"{field}_row", tensors[field].stride(0))
    for field, weight in zip(("gate_weight", "out_weight"), weights, strict=True):
        if weight is not None:
            tensors[field] = weight.to(wide).transpose(0, 1).contiguous()
    for field, tensor in tensors.items():
        setattr(args, field, tensor.data_ptr())
    library.call(name, args)


def gate_forward(y: Tensor, z: Tensor, gate: Tensor | None, out: Tensor | None) -> Tensor:
    """The gated sum over the ranks, (b, t, h, p)."""
    gated = library.empty(z.shape, dtype=z.dtype)
    if gated.numel():
        _run("anymamba_gate_forward", y, {"z": z}, (gate, out), out=gated)
    return gated


def gate_backward(
    do: Tensor, y: Tensor, z: Tensor, gate: Tensor | None, out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of y, z, gate and out; empty for weights that are none."""
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    make = library.empty if z.numel() else library.zeros
    dy, dz = make(y.shape, dtype=y.dtype), make(z.shape, dtype=z.dtype)
    # The kernel writes both gradients one behind the other.
    dweights = make((2, y.shape[2], *y.shape[3:]) if gate is not None else (2, 0), dtype=wide)
    dgate, dout = dweights
    if z.numel():
        rows = {"z": z, "dout": do}
        _run("anymamba_gate_backward", y, rows, (gate, out), dy=dy, dz=dz, dgate_weight=dgate, dout_weight=dout)
    if gate is None or out is None:
        return dy, dz, dgate.clone(), dout.clone()
    return (
        dy,
        dz,
        dgate.transpose(0, 1).to(gate.dtype, memory_format=torch.contiguous_format, copy=True),
        dout.transpose(0, 1).to(out.dtype, memory_format=torch.contiguous_format, copy=True),
    )
