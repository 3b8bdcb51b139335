"""Products with weights in narrow formats (`anymamba.core.weight_formats`), and how a weight is stored in one.

Decoding a token reads the weights once, so a weight of half the bytes is read in half the time.

Letters: m rows of activations, o outputs, i inputs, g groups of inputs, s inputs of a group, y codes of a row.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.core.operators import Operator
from anymamba.core.process import trim_freed_memory
from anymamba.core.registry import Implementation
from anymamba.core.weight_formats import (
    CODES,
    GROUPS,
    QuantizedTensor,
    WeightFormat,
    check_format,
    check_quantized,
    storage_layout,
)

_AT_ONCE = 2**17  # weights that are narrowed together: what that takes beside them is a few MiB
_PARTS_BETWEEN = 16  # after so many, the holes that they left are given back
# Scales that are tried for four bits, relative to the one that just covers the group: clipping its largest weight a
# little leaves less error in all others.
_FRACTIONS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)


def quantize(weight: Float[Tensor, "o i"], format: WeightFormat) -> QuantizedTensor:
    """Store a weight in a format.

    Whole numbers are rounded to the nearest; the scale of a group is the one that covers its largest weight, or for
    `int4` whichever of a few near it leaves the smallest squared error.

    Raises:
        ValueError: an unknown format, or values that it cannot hold: infinite, NaN, or beyond float16.
    """
    out, width = weight.shape
    return quantize_rows(weight.detach().split(rows_at_once(width)), out, width, format, weight.device)


def rows_at_once(width: int) -> int:
    """How many rows of a weight are narrowed together."""
    return max(1, _AT_ONCE // max(1, width))


def quantize_rows(
    parts: Iterable[Float[Tensor, "_ i"]],
    out: int,
    width: int,
    format: WeightFormat,
    device: torch.device | str | None = None,
) -> QuantizedTensor:
    """`quantize` of a weight (out, width) that comes some rows at a time, so that it is never there as a whole.

    Args:
        parts: its rows in their order; each part is done with before the next is asked for.
        out: rows of the weight.
        width: columns of the weight.
        format: what it is stored in.
        device: where.

    Raises:
        ValueError: an unknown format, or values that it cannot hold: infinite, NaN, or beyond float16.
    """
    check_format("narrow", format)
    stored = {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in storage_layout(format, out, width).items()
    }
    start = 0
    for number, part in enumerate(parts, 1):
        for name, rows in _narrow_part(part, format).items():
            stored[name][start : start + len(part)] = rows
        start += len(part)
        if number % _PARTS_BETWEEN == 0:
            trim_freed_memory()
    trim_freed_memory()
    assert start == out, f"expected {out} rows, got {start}"
    return QuantizedTensor(stored["weight"], stored.get("scales"), width)


def _narrow_part(weight_oi: Tensor, format: WeightFormat) -> dict[str, Tensor]:
    if format in GROUPS:
        return dict(zip(("weight", "scales"), _codes(weight_oi, format, GROUPS[format]), strict=True))
    codes = weight_oi.to(CODES[format])
    if not torch.isfinite(codes).all():
        raise ValueError(f"narrow: {format} cannot hold weights that are not finite, or beyond its largest number")
    return {"weight": codes}


def quantized_linear(
    x: Float[Tensor, "*batch i"], weight: QuantizedTensor, bias: Float[Tensor, " o"] | None = None
) -> Float[Tensor, "*batch o"]:
    """`x weightᵀ + bias`, summed in float32 or wider; the gradient reaches x and bias.

    Raises:
        ValueError: shapes or devices that do not fit.
    """
    check_quantized("quantized_linear", weight)
    if x.shape[-1] != weight.width:
        raise ValueError(f"quantized_linear: x must have {weight.width} channels, got {tuple(x.shape)}")
    if x.device != weight.codes.device:
        raise ValueError(f"quantized_linear: x must be on {weight.codes.device}, got {x.device}")
    y: Tensor = _operator(x.flatten(0, -2) if x.ndim != 2 else x, bias, weight.codes, weight.scales, weight.width)
    return y.view(*x.shape[:-1], y.shape[-1])


def dequantize(weight: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Float[Tensor, "o i"]:
    """A weight as plain numbers."""
    return _widen(*weight, dtype)


def _codes(weight_oi: Tensor, format: str, size: int) -> tuple[Tensor, Tensor]:
    o, i = weight_oi.shape
    groups_ogs = F.pad(weight_oi.float(), (0, -i % size)).unflatten(1, (-1, size))
    top_og1, at_og1 = groups_ogs.abs().max(-1, keepdim=True)
    if not torch.isfinite(top_og1).all():
        raise ValueError(f"narrow: {format} cannot hold weights that are not finite")
    if format == "int8":
        scale_og1 = _at_least(top_og1 / 127)
        q_ogs = _rounded(groups_ogs, scale_og1, -127, 127)
        return q_ogs.flatten(1)[:, :i].to(torch.int8).contiguous(), scale_og1.squeeze(-1).bfloat16()
    # -8 reaches further than 7: the largest weight of a group takes it, with a scale of either sign.
    covering_og1 = groups_ogs.gather(-1, at_og1) / -8
    scale_og1, least_og1 = covering_og1, torch.full_like(covering_og1, torch.inf)
    for fraction in _FRACTIONS:
        tried_og1 = (covering_og1 * fraction).bfloat16().float()
        error_og1 = (_rounded(groups_ogs, tried_og1, -8, 7) * tried_og1 - groups_ogs).square().sum(-1, keepdim=True)
        better_og1 = error_og1 < least_og1
        scale_og1 = torch.where(better_og1, tried_og1, scale_og1)
        least_og1 = torch.where(better_og1, error_og1, least_og1)
    q_ogs = (_rounded(groups_ogs, scale_og1, -8, 7) + 8).to(torch.uint8)
    low, high = q_ogs.chunk(2, dim=-1)
    return (low | (high << 4)).flatten(1), scale_og1.squeeze(-1).bfloat16()


def _at_least(x: Tensor) -> Tensor:
    """The nearest bfloat16 that is not below x, as float32."""
    nearest = x.bfloat16().float()
    above = torch.nextafter(nearest.bfloat16(), torch.full_like(nearest, torch.inf).bfloat16()).float()
    return torch.where(nearest < x, above, nearest)


def _rounded(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    return torch.where(scale == 0, 0.0, x / scale).round_().clamp_(low, high)


def _widen(codes: Tensor, scales: Tensor | None, width: int, dtype: torch.dtype) -> Tensor:
    if scales is None:
        return codes.to(dtype)
    if codes.dtype == torch.uint8:
        bytes_ogs = codes.unflatten(1, (-1, GROUPS["int4"] // 2))
        q_ogs = torch.cat([bytes_ogs & 15, bytes_ogs >> 4], dim=-1).to(dtype) - 8
    else:
        q_ogs = F.pad(codes, (0, -width % GROUPS["int8"])).unflatten(1, (-1, GROUPS["int8"])).to(dtype)
    return (q_ogs * scales.to(dtype).unsqueeze(-1)).flatten(1)[:, :width]


def _definition(x: Tensor, bias: Tensor | None, codes: Tensor, scales: Tensor | None, width: int) -> Tensor:
    wide = state_dtype(x.dtype)
    weight_oi = _widen(codes, scales, width, wide)
    return F.linear(x.to(wide), weight_oi, None if bias is None else bias.to(wide)).to(x.dtype)


def _backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, codes: Tensor, scales: Tensor | None, width: int
) -> tuple[Tensor, Tensor]:
    """The weight is widened again, so that nothing of its size is kept for the backward."""
    wide = state_dtype(x.dtype)
    dy_mo = dy.to(wide)
    dx = (dy_mo @ _widen(codes, scales, width, wide)).to(x.dtype).contiguous()
    return dx, dy.new_empty(0) if bias is None else dy_mo.sum(0).to(bias.dtype)


def _fake(x: Tensor, bias: Tensor | None, codes: Tensor, scales: Tensor | None, width: int) -> Tensor:
    return torch.empty((x.shape[0], codes.shape[0]), dtype=x.dtype, device=x.device)


_operator = Operator(
    "quantized_linear",
    inputs="Tensor x, Tensor? bias, Tensor codes, Tensor? scales, int width",
    outputs="y",
    differentiable=2,
    fake=_fake,
    definition=_definition,
    portable={"": Implementation(_definition, _backward)},
)
