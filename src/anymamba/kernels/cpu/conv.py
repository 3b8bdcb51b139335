"""Forward and backward of the causal convolution with SiLU by the compiled kernels (contract: `blocks/conv.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from anymamba.kernels import library
from anymamba.kernels.cpu.structures import ConvArgs


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
    (b, t, v), w = x.shape, weight.shape[-1]
    sequences = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    args = ConvArgs(
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
    tensors = {
        "x": x,
        "window": library.expect("window", window, (sequences, v, w), x.dtype).contiguous(),
        "weight": library.expect("weight", weight, (v, w)).to(wide).contiguous(),
        **results,
    }
    if bias is not None:
        tensors["bias"] = library.expect("bias", bias, (v,)).to(wide).contiguous()
    if lengths is not None:
        tensors["lengths"] = library.checked_lengths(lengths, b, t)
    if cu_seqlens is not None:
        tensors["bounds"] = library.checked_bounds(cu_seqlens, b, t)
    if dout is not None:
        tensors["dout"] = library.dense_last_axis(library.expect("dout", dout, x.shape, x.dtype))
        args.dout_strides = tensors["dout"].stride()[:2]
    for field, tensor in tensors.items():
        setattr(args, field, tensor.data_ptr())
    library.call(name, args)


def conv_forward(
    x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The outputs (b, t, v) and the new windows (s, v, w); `weight` is (v, w)."""
    out = library.empty(x.shape, dtype=x.dtype)
    if not out.numel():
        return out, window.clone()
    new_window = library.empty(window.shape, dtype=window.dtype)
    _run("conv_forward", x, window, weight, bias, lengths, cu_seqlens, out=out, new_window=new_window)
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
    if not x.numel():
        none = library.zeros(weight.shape, dtype=weight.dtype)
        return library.zeros(x.shape, dtype=x.dtype), dnew_window.clone(), none, none.new_zeros(weight.shape[:1])
    dx, dwindow = library.empty(x.shape, dtype=x.dtype), library.empty(window.shape, dtype=window.dtype)
    dweight, dbias = library.empty(weight.shape, dtype=wide), library.empty(weight.shape[:1], dtype=wide)
    _run(
        "conv_backward",
        x,
        window,
        weight,
        bias,
        lengths,
        cu_seqlens,
        dout,
        dnew_window=library.expect("dnew_window", dnew_window, window.shape, x.dtype).contiguous(),
        dx=dx,
        dwindow=dwindow,
        dweight=dweight,
        dbias=dbias,
    )
    return dx, dwindow, dweight.to(weight.dtype), dbias.to(weight.dtype)
