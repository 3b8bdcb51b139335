"""Rows times a weight, in float32 or quantized (contracts: `core/linear.py`, `quantization/ops.py`).

The kernels read a weight once for few rows, where torch's product is made for many, and a row has the same bits alone
and among others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.core.linear import linear, multiplies_bfloat16, unflatten_like
from anymamba.core.registry import Implementation
from anymamba.core.weight_formats import QuantizedTensor, check_quantized
from anymamba.kernels.cpu.bindings import DTYPES, WEIGHT_FORMATS, call, empty, missing
from anymamba.kernels.cpu.step_compiler import MAX_ROWS


def _missing_linear(x: Tensor, weight: Tensor, *_: Tensor | None) -> str:
    return missing(x.dtype) or ("" if weight.is_contiguous() else "there is none for a weight with gaps")


def _matmul(x_mi: Tensor, codes: Tensor, scales: Tensor | None, format: int) -> Tensor:
    """Return a few rows times a weight, whose `format` is a number of the library."""
    y_mo = empty((x_mi.shape[0], codes.shape[0]), torch.float32)
    tensors, sizes = {"codes": codes, "scales": scales, "x": x_mi}, {"o": codes.shape[0], "i": x_mi.shape[1]}
    call("quantized_matmul", torch.float32, tensors, {"y": y_mo}, sizes=sizes, format=format)
    return y_mo


def _linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y_mo = _matmul(x.detach().reshape(-1, weight.shape[1]), weight.detach(), None, DTYPES[torch.float32])
    if bias is not None:
        y_mo += bias.detach()
    return unflatten_like(y_mo, x)


_PANEL_NUMEL = 2**22  # weights that are dequantized together: 16 MiB, in which torch's product is as fast as in one
# Rows from which torch's product in bfloat16, where the processor has units for it, takes half the time of ours.
_MIN_ROWS_BFLOAT16 = 16
_memory = threading.local()  # holds a panel: the system would first clear newly allocated memory


def _missing_quantized(x: Tensor, bias: Any, codes: Any, scales: Any, format: str, width: int) -> str:
    if format not in WEIGHT_FORMATS:
        return f"there is none for weights in {format}"
    return missing(x.dtype) or ("there is none for float64" if x.dtype == torch.float64 else "")


@torch.autocast("cpu", enabled=False)  # sums are in float32
def _quantized_forward(x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
    stored = QuantizedTensor(*weight)
    codes, scales, format, width = stored
    check_quantized("quantized_linear", stored)
    m, out = x.shape[0], codes.shape[0]
    if m >= _MIN_ROWS_BFLOAT16 and format == "bfloat16" and x.dtype == torch.bfloat16 and multiplies_bfloat16():
        return F.linear(x, codes, None if bias is None else bias.bfloat16())
    x_mi = x.float()
    if 1 <= m <= MAX_ROWS:
        y = _matmul(x_mi, codes, scales, WEIGHT_FORMATS[format])
    elif out * width <= _PANEL_NUMEL:
        y = linear(x_mi, next(_panels(stored))[1])
    else:
        y = empty((m, out), torch.float32)
        for start, panel in _panels(stored):
            y[:, start : start + len(panel)] = linear(x_mi, panel)
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)


@torch.autocast("cpu", enabled=False)
def _quantized_backward(dy: Tensor, x: Tensor, bias: Tensor | None, *weight: Any) -> tuple[Tensor, Tensor]:
    dy_mo, stored = dy.float(), QuantizedTensor(*weight)
    dx = torch.zeros(x.shape, dtype=torch.float32, device="cpu")
    for start, panel in _panels(stored):
        dx += linear(dy_mo[:, start : start + len(panel)], panel.T)
    return dx.to(x.dtype), dy.new_empty(0) if bias is None else dy_mo.sum(0).to(bias.dtype)


def _panels(stored: QuantizedTensor) -> Iterator[tuple[int, Tensor]]:
    """Yield rows of the weight as float32 and the index of the first, one panel after another in the same memory."""
    codes, scales, format, width = stored
    panels = max(1, -(-codes.shape[0] * width // _PANEL_NUMEL))
    rows = -(-codes.shape[0] // panels)  # of about the same size: a last small one would be slow
    for start in range(0, max(1, codes.shape[0]), max(1, rows)):
        part = slice(start, start + rows)
        panel = _panel(len(codes[part]), width)
        tensors = {"codes": codes[part], "scales": None if scales is None else scales[part]}
        sizes = {"o": len(panel), "i": width}
        call("dequantize", torch.float32, tensors, {"weight": panel}, sizes=sizes, format=WEIGHT_FORMATS[format])
        yield start, panel


def _panel(rows: int, width: int) -> Tensor:
    """Return memory for rows of float32: this thread's own, unless a row is very long."""
    if rows * width > 2 * _PANEL_NUMEL:
        return empty((rows, width), torch.float32)
    if (memory := getattr(_memory, "panel", None)) is None or memory.numel() < rows * width:
        _memory.panel = memory = empty((rows * width,), torch.float32)
    return memory[: rows * width].view(rows, width)


IMPLEMENTATIONS = {
    "linear": Implementation(_linear_forward, None, _missing_linear),
    "quantized_linear": Implementation(_quantized_forward, _quantized_backward, _missing_quantized),
}
