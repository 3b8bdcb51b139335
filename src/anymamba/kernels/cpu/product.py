"""Rows times a weight in float32 by the compiled product, which computes a row the same alone and among others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anymamba.kernels.cpu.call import call, empty
from anymamba.kernels.cpu.library import WEIGHT_DTYPES, missing

MOST_ROWS = 256  # a server's segment; how far beyond it torch's product is the slower one depends on the processor


def covers(x: Tensor, weight: Tensor) -> bool:
    """Whether `product` takes these: few rows and a weight in plain float32, on the CPU, without a gradient."""
    return (
        type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and x.dtype == weight.dtype == torch.float32
        and x.is_cpu
        and weight.is_cpu
        and weight.ndim == 2
        and x.ndim > 0
        and x.shape[-1] == weight.shape[1] > 0
        and 1 <= x.numel() // x.shape[-1] <= MOST_ROWS
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not missing(torch.float32)
    )


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`x weightᵀ` of tensors that `covers` takes, (..., i) and (o, i) to (..., o)."""
    out, width = weight.shape
    x_mi = x.reshape(-1, width)
    y_mo = empty((x_mi.shape[0], out), torch.float32)
    sizes, format = {"o": out, "i": width}, WEIGHT_DTYPES[torch.float32]
    call(
        "narrow_product", torch.float32, {"codes": weight.detach(), "x": x_mi}, {"y": y_mo}, sizes=sizes, format=format
    )
    return y_mo.view(*x.shape[:-1], out)
