"""Rows times a weight in float32 by the compiled kernels (contract: `anymamba.ground.products`).

A weight is read once for all rows, where torch's product is made for many more of them, and a row has the same bits
alone and among others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymamba.ground.operators import Implementation
from anymamba.ground.products import of_shape
from anymamba.kernels.cpu.call import call, empty
from anymamba.kernels.cpu.library import WEIGHT_DTYPES, missing


def _missing(x: Tensor, weight: Tensor, *_: Tensor | None) -> str:
    return missing(x.dtype) or ("" if weight.is_contiguous() else "there is none for a weight with gaps")


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out, width = weight.shape
    y_mo = empty((x.numel() // width, out), torch.float32)
    given: dict[str, Tensor | None] = {"codes": weight.detach(), "x": x.detach().reshape(-1, width)}
    sizes, format = {"o": out, "i": width}, WEIGHT_DTYPES[torch.float32]
    call("narrow_product", torch.float32, given, {"y": y_mo}, sizes=sizes, format=format)
    if bias is not None:
        y_mo += bias.detach()
    return of_shape(y_mo, x)


IMPLEMENTATIONS = {"linear": Implementation(_product, None, _missing)}
