"""Forward and backward of the causal convolution with SiLU by the compiled kernels (contract: `blocks/conv.py`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from anymamba.kernels import library

_i64, _pointer = ctypes.c_int64, ctypes.c_void_p


class _ConvArgs(ctypes.Structure):
    """`ConvArgs` of csrc/block_args.h, field by field."""

    _fields_ = (
        *((name, _i64) for name in ("dtype", "threads", "batch", "time", "channels", "width", "sequences")),
        ("bounds", _pointer),
        ("lengths", _pointer),
        ("x", _pointer),
        ("x_strides", _i64 * 2),
        *((name, _pointer) for name in ("window", "weight", "bias", "out", "new_window", "dout")),
        ("dout_strides", _i64 * 2),
        *((name, _pointer) for name in ("dnew_window", "dx", "dwindow", "dweight", "dbias")),
    )


def _run(
    name: str,
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    dout: Tensor | None = None,
    **results: Tensor,
) -> None:
    """Call a kernel; `results` are contiguous tensors by the names of their fields."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    (b, t, v), (sequences, _, w) = x.shape, window.shape
    args = _ConvArgs(
        dtype=library.dtype_code(x.dtype),
        threads=torch.get_num_threads(),
        batch=b,
        time=t,
        channels=v,
        width=w,
        sequences=sequences,
    )
    x = library.dense_last_axis(x)
    args.x_strides = x.stride()[:2]
    tensors = {"x": x, "window": window.contiguous(), "weight": weight.to(wide).contiguous(), **results}
    if bias is not None:
        tensors["bias"] = bias.to(wide).contiguous()
    if lengths is not None:
        tensors["lengths"] = lengths.to(torch.int64).clamp(0, t).contiguous()
    if cu_seqlens is not None:
        tensors["bounds"] = library.checked_bounds(cu_seqlens, t)
    if dout is not None:
        tensors["dout"] = library.dense_last_axis(dout)
        args.dout_strides = tensors["dout"].stride()[:2]
    for field, tensor in tensors.items():
        setattr(args, field, tensor.data_ptr())
    library.call(name, args)


def conv_forward(
    x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The outputs (b, t, v) and the new windows (s, v, w); `weight` is (v, w)."""
    out, new_window = library.empty(x.shape, dtype=x.dtype), library.empty(window.shape, dtype=window.dtype)
    if out.numel():
        _run("anymamba_conv_forward", x, window, weight, bias, lengths, cu_seqlens, out=out, new_window=new_window)
    return out, new_window


def conv_backward(
    dout: Tensor,
    dnew_window: Tensor,
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, window, weight and bias from those of the outputs and the new windows."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    make = library.empty if x.numel() else library.zeros
    dx, dwindow = make(x.shape, dtype=x.dtype), make(window.shape, dtype=window.dtype)
    dweight, dbias = make(weight.shape, dtype=wide), make(weight.shape[:1], dtype=wide)
    if x.numel():
        _run(
            "anymamba_conv_backward",
            x,
            window,
            weight,
            bias,
            lengths,
            cu_seqlens,
            dout,
            dnew_window=dnew_window.contiguous(),
            dx=dx,
            dwindow=dwindow,
            dweight=dweight,
            dbias=dbias,
        )
    return dx, dwindow, dweight.to(weight.dtype), dbias.to(weight.dtype)
