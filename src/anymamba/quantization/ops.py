"""Operations on quantized weights (formats: `anymamba.core.weight_formats`): quantize, dequantize, and the product.

Decoding a token reads every weight once, so weights of half the bytes are read in half the time. Quantizing maps a
weight to codes and scales and, where several codes share a byte (`int4`), packs them.

Letters: m rows of activations, o outputs, i inputs, g groups of inputs, s inputs of a group, y codes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.core.operators import Operator
from anymamba.core.process import trim_freed_memory
from anymamba.core.registry import Implementation
from anymamba.core.weight_formats import (
    FORMAT_SPECS,
    QuantizedTensor,
    WeightFormat,
    check_format,
    check_quantized,
    storage_layout,
)

_CHUNK_NUMEL = 2**17  # weights that are quantized together: the temporaries take a few MiB
_CHUNKS_PER_TRIM = 16  # the gaps that temporaries leave in the heap are returned to the system after so many
# Scales that are tried for int4, relative to the one that just covers the group: clipping its largest weight a little
# leaves less error in all others.
_CLIP_FACTORS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)


def quantize_tensor(weight: Float[Tensor, "o i"], format: WeightFormat) -> QuantizedTensor:
    """Store a weight in a format.

    Integers are rounded to the nearest. The scale of a group is the one that covers its largest weight, or for `int4`
    whichever of a few near it leaves the smallest squared error.

    Raises:
        ValueError: Unknown format, or values that it cannot hold: infinite, NaN, or beyond float16.
    """
    out, width = weight.shape
    return quantize_rows(weight.detach().split(rows_at_once(width)), out, width, format, weight.device)


def rows_at_once(width: int) -> int:
    """Return how many rows of a weight are quantized together."""
    return max(1, _CHUNK_NUMEL // max(1, width))


def quantize_rows(
    chunks: Iterable[Float[Tensor, "_ i"]],
    out: int,
    width: int,
    format: WeightFormat,
    device: torch.device | str | None = None,
) -> QuantizedTensor:
    """Quantize a weight (out, width) that arrives some rows at a time, so that it is never in memory as a whole.

    Each chunk of rows is finished before the next is requested. Raises `ValueError` as `quantize_tensor` does.
    """
    check_format("quantize", format)
    stored = {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in storage_layout(format, out, width).items()
    }
    start = 0
    for number, chunk_oi in enumerate(chunks, 1):
        codes_oy, scales_og = _CODECS[format].encode(chunk_oi, format)
        stored["weight"][start : start + len(chunk_oi)] = codes_oy
        if scales_og is not None:
            stored["scales"][start : start + len(chunk_oi)] = scales_og
        start += len(chunk_oi)
        if number % _CHUNKS_PER_TRIM == 0:
            trim_freed_memory()
    trim_freed_memory()
    assert start == out, f"expected {out} rows, got {start}"
    return QuantizedTensor(stored["weight"], stored.get("scales"), format, width)


def dequantize_tensor(weight: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Float[Tensor, "o i"]:
    """Return a weight (o, i) as plain numbers."""
    return _dequantize(dtype, *weight)


def quantized_linear(
    x: Float[Tensor, "*batch i"], weight: QuantizedTensor, bias: Float[Tensor, " o"] | None = None
) -> Float[Tensor, "*batch o"]:
    """Compute `x weightᵀ + bias`, summed in float32 or wider; the gradient reaches x and bias.

    Raises:
        ValueError: Shapes or devices that do not match.
    """
    check_quantized("quantized_linear", weight)
    if x.shape[-1] != weight.width:
        raise ValueError(f"quantized_linear: x must have {weight.width} channels, got {tuple(x.shape)}")
    if x.device != weight.codes.device:
        raise ValueError(f"quantized_linear: x must be on {weight.codes.device}, got {x.device}")
    x_mi = x.flatten(0, -2) if x.ndim != 2 else x
    y_mo: Tensor = _operator(x_mi, bias, weight.codes, weight.scales, weight.format, weight.width)
    return y_mo.view(*x.shape[:-1], y_mo.shape[-1])


class _Codec(NamedTuple):
    """Arithmetic of a format: rows (o, i) to codes (o, y) and scales (o, g), and back to rows (o, i or more)."""

    encode: Callable[[Tensor, str], tuple[Tensor, Tensor | None]]
    decode: Callable[[Tensor, Tensor | None, str, torch.dtype], Tensor]


def _encode_float(weight_oi: Tensor, format: str) -> tuple[Tensor, None]:
    codes_oi = weight_oi.to(FORMAT_SPECS[format].code_dtype)
    if not torch.isfinite(codes_oi).all():
        raise ValueError(f"{format} cannot hold weights that are not finite, or beyond its largest number")
    return codes_oi, None


def _decode_float(codes_oi: Tensor, _: Tensor | None, format: str, dtype: torch.dtype) -> Tensor:
    return codes_oi.to(dtype)


def _encode_int8(weight_oi: Tensor, format: str) -> tuple[Tensor, Tensor]:
    groups_ogs, _ = _split_groups(weight_oi, format)
    scale_og1 = _round_up_to_bfloat16(groups_ogs.abs().amax(-1, keepdim=True) / 127)
    q_ogs = _round_to_integers(groups_ogs, scale_og1, -127, 127)
    codes_oi = q_ogs.flatten(1)[:, : weight_oi.shape[1]].to(torch.int8).contiguous()
    return codes_oi, scale_og1.squeeze(-1).bfloat16()


def _decode_int8(codes_oi: Tensor, scales_og: Tensor | None, format: str, dtype: torch.dtype) -> Tensor:
    size = FORMAT_SPECS[format].group_size
    q_ogs = F.pad(codes_oi, (0, -codes_oi.shape[1] % size)).unflatten(1, (-1, size)).to(dtype)
    return _apply_scales(q_ogs, scales_og)


def _encode_int4(weight_oi: Tensor, format: str) -> tuple[Tensor, Tensor]:
    # 1) The scale that covers a group. -8 reaches further than 7, so the largest weight becomes -8, and the scale has
    #    either sign.
    groups_ogs, largest_og1 = _split_groups(weight_oi, format)
    covering_og1 = groups_ogs.gather(-1, largest_og1) / -8
    # 2) Of the scales a little below it, the one with the smallest squared error.
    scale_og1 = covering_og1
    least_error_og1 = torch.full_like(covering_og1, torch.inf)
    for factor in _CLIP_FACTORS:
        candidate_og1 = (covering_og1 * factor).bfloat16().float()
        rounded_ogs = _round_to_integers(groups_ogs, candidate_og1, -8, 7) * candidate_og1
        error_og1 = (rounded_ogs - groups_ogs).square().sum(-1, keepdim=True)
        is_better_og1 = error_og1 < least_error_og1
        scale_og1 = torch.where(is_better_og1, candidate_og1, scale_og1)
        least_error_og1 = torch.where(is_better_og1, error_og1, least_error_og1)
    # 3) Two codes to a byte: column c in the low half, column 16 + c in the high half.
    q_ogs = (_round_to_integers(groups_ogs, scale_og1, -8, 7) + 8).to(torch.uint8)
    low, high = q_ogs.chunk(2, dim=-1)
    return (low | (high << 4)).flatten(1), scale_og1.squeeze(-1).bfloat16()


def _decode_int4(codes_oy: Tensor, scales_og: Tensor | None, format: str, dtype: torch.dtype) -> Tensor:
    bytes_ogs = codes_oy.unflatten(1, (-1, FORMAT_SPECS[format].group_size // 2))
    q_ogs = torch.cat([bytes_ogs & 15, bytes_ogs >> 4], dim=-1).to(dtype) - 8
    return _apply_scales(q_ogs, scales_og)


_CODECS: dict[str, _Codec] = {
    "bfloat16": _Codec(_encode_float, _decode_float),
    "float16": _Codec(_encode_float, _decode_float),
    "int8": _Codec(_encode_int8, _decode_int8),
    "int4": _Codec(_encode_int4, _decode_int4),
}


def _split_groups(weight_oi: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Return the padded groups (o, g, s) of a weight, and the index (o, g, 1) of the largest in each."""
    size = FORMAT_SPECS[format].group_size
    groups_ogs = F.pad(weight_oi.float(), (0, -weight_oi.shape[1] % size)).unflatten(1, (-1, size))
    largest, index = groups_ogs.abs().max(-1, keepdim=True)
    if not torch.isfinite(largest).all():
        raise ValueError(f"{format} cannot hold weights that are not finite")
    return groups_ogs, index


def _apply_scales(q_ogs: Tensor, scales_og: Tensor | None) -> Tensor:
    assert scales_og is not None
    return (q_ogs * scales_og.to(q_ogs.dtype).unsqueeze(-1)).flatten(1)


def _round_up_to_bfloat16(x: Tensor) -> Tensor:
    """Return the nearest bfloat16 that is not below x, as float32."""
    nearest = x.bfloat16().float()
    above = torch.nextafter(nearest.bfloat16(), torch.full_like(nearest, torch.inf).bfloat16()).float()
    return torch.where(nearest < x, above, nearest)


def _round_to_integers(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    return torch.where(scale == 0, 0.0, x / scale).round_().clamp_(low, high)


def _dequantize(dtype: torch.dtype, codes_oy: Tensor, scales_og: Tensor | None, format: str, width: int) -> Tensor:
    return _CODECS[format].decode(codes_oy, scales_og, format, dtype)[:, :width]


def _definition(x_mi: Tensor, bias_o: Tensor | None, *stored: Any) -> Tensor:
    acc_dtype = state_dtype(x_mi.dtype)
    weight_oi = _dequantize(acc_dtype, *stored)
    return F.linear(x_mi.to(acc_dtype), weight_oi, None if bias_o is None else bias_o.to(acc_dtype)).to(x_mi.dtype)


def _backward(dy_mo: Tensor, x_mi: Tensor, bias_o: Tensor | None, *stored: Any) -> tuple[Tensor, Tensor]:
    """Dequantize the weight again, so that nothing of its size is kept for the backward."""
    acc_dtype = state_dtype(x_mi.dtype)
    dy_mo = dy_mo.to(acc_dtype)
    dx_mi = (dy_mo @ _dequantize(acc_dtype, *stored)).to(x_mi.dtype).contiguous()
    return dx_mi, dy_mo.new_empty(0) if bias_o is None else dy_mo.sum(0).to(bias_o.dtype)


_operator = Operator(
    "quantized_linear",
    inputs="Tensor x, Tensor? bias, Tensor codes, Tensor? scales, str format, int width",
    outputs="y",
    differentiable=2,
    fake=lambda x, bias, codes, *_: x.new_empty((x.shape[0], codes.shape[0])),
    definition=_definition,
    portable={"": Implementation(_definition, _backward)},
)
