"""Products with weights in narrow formats, by the compiled kernels (contract: `ops/narrow.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anymamba.ground.narrow import Narrow, expect_stored
from anymamba.ground.operators import Implementation
from anymamba.kernels.cpu.call import call, empty
from anymamba.kernels.cpu.library import WEIGHT_DTYPES, missing
from anymamba.kernels.cpu.program import MAX_ROWS

_PANEL = 2**20  # weights that are widened together: 4 MiB, which stay in a cache while torch multiplies them


def _missing(x: Tensor, *_: object) -> str:
    return missing(x.dtype) or ("there is none for float64" if x.dtype == torch.float64 else "")


def _forward(x: Tensor, bias: Tensor | None, codes: Tensor, scales: Tensor | None, width: int) -> Tensor:
    expect_stored("narrow_linear", Narrow(codes, scales, width))
    m, out = x.shape[0], codes.shape[0]
    x_mi, y = x.float(), empty((m, out), torch.float32)
    if 1 <= m <= MAX_ROWS:
        weight = {"codes": codes, "scales": scales, "x": x_mi}
        format = WEIGHT_DTYPES[codes.dtype]
        call("narrow_product", torch.float32, weight, {"y": y}, sizes={"o": out, "i": width}, format=format)
    else:
        for start, panel in _panels(codes, scales, width):
            torch.mm(x_mi, panel.T, out=y[:, start : start + len(panel)])
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)


def _backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, codes: Tensor, scales: Tensor | None, width: int
) -> tuple[Tensor, Tensor]:
    dy_mo = dy.float()
    dx = torch.zeros((x.shape[0], width), dtype=torch.float32, device="cpu")
    for start, panel in _panels(codes, scales, width):
        dx.addmm_(dy_mo[:, start : start + len(panel)], panel)
    return dx.to(x.dtype), dy.new_empty(0) if bias is None else dy_mo.sum(0).to(bias.dtype)


def _panels(codes: Tensor, scales: Tensor | None, width: int) -> Iterator[tuple[int, Tensor]]:
    """Rows of the weight as float32 with the number of the first, one panel after another in the same memory."""
    rows = min(codes.shape[0], max(64, _PANEL // max(1, width)))
    memory = empty((rows, width), torch.float32)
    for start in range(0, codes.shape[0], max(1, rows)):
        part = slice(start, start + rows)
        panel = memory[: len(codes[part])]
        some = {"codes": codes[part], "scales": None if scales is None else scales[part]}
        sizes = {"o": len(panel), "i": width}
        call("widen", torch.float32, some, {"wide": panel}, sizes=sizes, format=WEIGHT_DTYPES[codes.dtype])
        yield start, panel


IMPLEMENTATIONS = {"narrow_linear": Implementation(_forward, _backward, _missing)}
