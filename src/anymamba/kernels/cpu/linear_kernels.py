"""Products with weights in narrow formats, by the compiled kernels (contract: `quantization/ops.py`).

§ Rows times a weight in float32 by the compiled kernels (contract: `anymamba.core.linear`).

A weight is read once for all rows, where torch's product is made for many more of them, and a row has the same bits
alone and among others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.core.linear import linear, multiplies_bfloat16, unflatten_like
from anymamba.core.registry import Implementation
from anymamba.core.weight_formats import QuantizedTensor, check_quantized
from anymamba.kernels.cpu.bindings import DTYPES, WEIGHT_FORMATS, call, empty, missing
from anymamba.kernels.cpu.step_compiler import MAX_ROWS


def _missing_product(x: Tensor, weight: Tensor, *_: Tensor | None) -> str:
    return missing(x.dtype) or ("" if weight.is_contiguous() else "there is none for a weight with gaps")


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out, width = weight.shape
    y_mo = empty((x.numel() // width, out), torch.float32)
    given: dict[str, Tensor | None] = {"codes": weight.detach(), "x": x.detach().reshape(-1, width)}
    sizes, format = {"o": out, "i": width}, DTYPES[torch.float32]
    call("quantized_matmul", torch.float32, given, {"y": y_mo}, sizes=sizes, format=format)
    if bias is not None:
        y_mo += bias.detach()
    return unflatten_like(y_mo, x)


_PANEL = 2**22  # weights that are widened together: 16 MiB, in which torch's product is as fast as in one piece
# Rows from which torch's product in bfloat16, where the processor has units for it, takes half the time of ours.
_FEWEST_IN_BFLOAT16 = 16
_memory = threading.local()  # of a panel: what is asked for anew must be cleared by the system first


def _missing(
    x: Tensor, bias: Tensor | None, codes: Tensor | None, scales: Tensor | None, format: str, width: int
) -> str:
    if format not in WEIGHT_FORMATS:
        return f"there is none for weights in {format}"
    return missing(x.dtype) or ("there is none for float64" if x.dtype == torch.float64 else "")


@torch.autocast("cpu", enabled=False)  # sums are in float32
def _forward(x: Tensor, bias: Tensor | None, codes: Tensor, scales: Tensor | None, format: str, width: int) -> Tensor:
    stored = QuantizedTensor(codes, scales, format, width)
    check_quantized("quantized_linear", stored)
    m, out = x.shape[0], codes.shape[0]
    if m >= _FEWEST_IN_BFLOAT16 and format == "bfloat16" and x.dtype == torch.bfloat16 and multiplies_bfloat16():
        return F.linear(x, codes, None if bias is None else bias.bfloat16())
    x_mi = x.float()
    if 1 <= m <= MAX_ROWS:
        y = empty((m, out), torch.float32)
        weight = {"codes": codes, "scales": scales, "x": x_mi}
        sizes, number = {"o": out, "i": width}, WEIGHT_FORMATS[format]
        call("quantized_matmul", torch.float32, weight, {"y": y}, sizes=sizes, format=number)
    elif out * width <= _PANEL:
        y = linear(x_mi, next(_panels(stored))[1])
    else:
        y = empty((m, out), torch.float32)
        for start, panel in _panels(stored):
            y[:, start : start + len(panel)] = linear(x_mi, panel)
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)


@torch.autocast("cpu", enabled=False)
def _backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, codes: Tensor, scales: Tensor | None, format: str, width: int
) -> tuple[Tensor, Tensor]:
    dy_mo, stored = dy.float(), QuantizedTensor(codes, scales, format, width)
    dx = torch.zeros((x.shape[0], width), dtype=torch.float32, device="cpu")
    for start, panel in _panels(stored):
        dx += linear(dy_mo[:, start : start + len(panel)], panel.T)
    return dx.to(x.dtype), dy.new_empty(0) if bias is None else dy_mo.sum(0).to(bias.dtype)


def _panels(stored: QuantizedTensor) -> Iterator[tuple[int, Tensor]]:
    """Yield rows of the weight as float32 and the index of the first, one panel after another in the same memory."""
    codes, scales, format, width = stored
    panels = max(1, -(-codes.shape[0] * width // _PANEL))
    rows = -(-codes.shape[0] // panels)  # of about the same size: a last small one would be slow
    for start in range(0, max(1, codes.shape[0]), max(1, rows)):
        part = slice(start, start + rows)
        panel = _panel(len(codes[part]), width)
        some = {"codes": codes[part], "scales": None if scales is None else scales[part]}
        sizes = {"o": len(panel), "i": width}
        call("widen", torch.float32, some, {"wide": panel}, sizes=sizes, format=WEIGHT_FORMATS[format])
        yield start, panel


def _panel(rows: int, width: int) -> Tensor:
    """Memory for rows of float32, this thread's own unless a row is huge."""
    if rows * width > 2 * _PANEL:
        return empty((rows, width), torch.float32)
    if (memory := getattr(_memory, "panel", None)) is None or memory.numel() < rows * width:
        _memory.panel = memory = empty((rows * width,), torch.float32)
    return memory[: rows * width].view(rows, width)


IMPLEMENTATIONS = {
    "linear": Implementation(_product, None, _missing_product),
    "quantized_linear": Implementation(_forward, _backward, _missing),
}
