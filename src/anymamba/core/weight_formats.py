"""Formats in which weights are stored, quantized or in 16 bits, and the base class of modules with such a weight.

A format is known by its name. It stores *codes*, and *scales* if it has them:

| format | codes of a weight (o, i) | scales | bits per weight |
|---|---|---|---|
| `bfloat16`, `float16` | (o, i) of that dtype | none | 16 |
| `int8` | (o, i), integers from -127 to 127 | (o, ⌈i / 64⌉) | 8.25 |
| `int4` | (o, 16 ⌈i / 32⌉) bytes, integers from -8 to 7 plus 8 | (o, ⌈i / 32⌉) | 4.5 |

A weight is code · scale, with one scale per 64 or 32 adjacent weights of a row. Scales are bfloat16, so that every such
product is a float32 without rounding: computing with a quantized weight is computing with the dequantized one.
A byte of `int4` holds column c of its group of 32 in its low half, and column 16 + c in its high half.

To add a format: one row in `FORMAT_SPECS` here, and its two functions in `quantization/ops.py`. Kernels cover the
formats that they name, and the portable implementation covers all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

WeightFormat = Literal["bfloat16", "float16", "int8", "int4"]
# Shape and dtype of the tensors that store a weight, by name: "weight" (the codes) and "scales".
StorageLayout = dict[str, tuple[tuple[int, ...], torch.dtype]]


class FormatSpec(NamedTuple):
    """Storage of a format."""

    code_dtype: torch.dtype  # several formats may have the same
    group_size: int = 0  # adjacent weights of a row that share a scale; 0 for a format without scales
    weights_per_code: int = 1  # if one code holds several, a row's last group is padded


FORMAT_SPECS: dict[str, FormatSpec] = {
    "bfloat16": FormatSpec(torch.bfloat16),
    "float16": FormatSpec(torch.float16),
    "int8": FormatSpec(torch.int8, group_size=64),
    "int4": FormatSpec(torch.uint8, group_size=32, weights_per_code=2),
}


class QuantizedTensor(NamedTuple):
    """A weight (o, i) in a format.

    Attributes:
        codes: Codes (o, y), of the format's dtype.
        scales: Scales (o, g), bfloat16; None if the format has none.
        format: Name of the format.
        width: Columns i of the weight.
    """

    codes: Tensor
    scales: Tensor | None
    format: str
    width: int


def check_format(where: str, name: Any) -> WeightFormat:
    """Return the name of a format, or raise `ValueError` if there is no such format."""
    if name not in FORMAT_SPECS:
        raise ValueError(f"{where}: weights must be one of {', '.join(FORMAT_SPECS)}, got {name!r}")
    return cast("WeightFormat", name)


def storage_layout(format: str, out: int, width: int) -> StorageLayout:
    """Return shape and dtype of the tensors that store a weight (out, width) in a format."""
    spec = FORMAT_SPECS[format]
    groups = -(-width // spec.group_size) if spec.group_size else 0
    codes = width if spec.weights_per_code == 1 else groups * spec.group_size // spec.weights_per_code
    layout: StorageLayout = {"weight": ((out, codes), spec.code_dtype)}
    if spec.group_size:
        layout["scales"] = ((out, groups), torch.bfloat16)
    return layout


def check_quantized(where: str, weight: QuantizedTensor) -> None:
    """Raise `ValueError` unless codes and scales are those of a weight of that format and width."""
    check_format(where, weight.format)
    if weight.codes.ndim != 2:
        raise ValueError(f"{where}: codes must have two axes, got shape {tuple(weight.codes.shape)}")
    layout = storage_layout(weight.format, weight.codes.shape[0], weight.width)
    for name, x in (("weight", weight.codes), ("scales", weight.scales)):
        stored = None if x is None else (tuple(x.shape), x.dtype)
        if stored != layout.get(name):
            raise ValueError(
                f"{where}: {name} must be {layout.get(name)} for {weight.format} and width {weight.width}, got {stored}"
            )


class QuantizedWeight(nn.Module):
    """A module with a quantized weight. Casts leave the weight unchanged and set the dtype of the computation.

    Attributes:
        format: Name of the weight's format.
        weight: Codes of the weight.
        scales: Scales of the weight; None if the format has none.
    """

    weight: nn.Parameter
    scales: nn.Parameter | None

    def __init__(
        self, format: WeightFormat, rows: int, width: int, *, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        """Allocate a weight (rows, width) without values, for activations of `dtype`."""
        super().__init__()
        self.format = format
        self._rows = rows
        self._width = width
        layout = self.layout()
        for name in ("weight", "scales"):
            entry = layout.get(name)
            values = None if entry is None else torch.empty(entry[0], dtype=entry[1], device=device)
            self.register_parameter(name, None if values is None else nn.Parameter(values, requires_grad=False))
        self.register_buffer("_computed_in", torch.empty(0, dtype=dtype, device=device), persistent=False)

    def layout(self) -> StorageLayout:
        """Return shape and dtype of the parameters that store the weight."""
        return storage_layout(self.format, self._rows, self._width)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations."""
        return self.reference_tensor().dtype

    def reference_tensor(self) -> Tensor:
        """Return a tensor that has the dtype and device of the activations."""
        return self._computed_in  # type: ignore[return-value]

    @property
    def stored(self) -> QuantizedTensor:
        """Return the weight as it is stored."""
        return QuantizedTensor(self.weight, self.scales, self.format, self._width)

    def store(self, weight: QuantizedTensor) -> None:
        """Take a weight's codes and scales, without a copy; raise `ValueError` if they do not fit this module."""
        where = type(self).__name__
        check_quantized(where, weight)
        if (weight.format, weight.width) != (self.format, self._width):
            expected = f"{self.format} of width {self._width}"
            raise ValueError(f"{where}: the weight must be in {expected}, got {weight.format} of width {weight.width}")
        self.weight = nn.Parameter(weight.codes, requires_grad=False)
        if weight.scales is not None:
            self.scales = nn.Parameter(weight.scales, requires_grad=False)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *messages: list[str]
    ) -> None:
        """Reject codes and scales of another format, which a copy would round or truncate to this one."""
        errors = messages[-1]
        for name, (_, dtype) in self.layout().items():
            x = state_dict.get(prefix + name)
            if isinstance(x, Tensor) and x.dtype != dtype:
                errors.append(
                    f"{prefix}{name} of a weight in {self.format} must be {dtype}, got {x.dtype}; "
                    "anymamba.quantization.quantize_model stores the weights of a plain model in a format"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *messages)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedWeight:
        originals = {name: x.data for name in self.layout() if (x := self._parameters[name]) is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, original in originals.items():
            moved = self._parameters[name]
            if moved is not None and moved.dtype != original.dtype:
                moved.data = original.to(moved.device)
        return self

    def extra_repr(self) -> str:
        """Return sizes and format for `print(model)`."""
        return f"{self._rows}, {self._width}, format={self.format}"
