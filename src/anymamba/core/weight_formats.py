"""Formats of weights in fewer bits than float32, and the base of every module with such a weight.

A format stores *codes*, and *scales* where it has them:

| format | codes of a weight (o, i) | scales | bits per weight |
|---|---|---|---|
| `bfloat16`, `float16` | (o, i) of that dtype | none | 16 |
| `int8` | (o, i), whole numbers from -127 to 127 | (o, ⌈i / 64⌉) | 8.25 |
| `int4` | (o, 16 ⌈i / 32⌉) bytes, whole numbers from -8 to 7 plus 8 | (o, ⌈i / 32⌉) | 4.5 |

A weight is code · scale, with one scale for 64 or 32 neighbors in a row. Scales are bfloat16, so that every such
product is a float32 without rounding: computing with a narrow weight is computing with the widened one.
A byte of `int4` holds column c of its group of 32 in its low half, and column 16 + c in its high half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

WeightFormat = Literal["bfloat16", "float16", "int8", "int4"]
FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
GROUPS = {"int8": 64, "int4": 32}  # columns that share a scale
CODES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8, "int4": torch.uint8}


class QuantizedTensor(NamedTuple):
    """A weight (o, i) in a narrow format.

    Attributes:
        codes: (o, y), of the format's dtype.
        scales: (o, g), bfloat16; None where the format has none.
        width: i.
    """

    codes: Tensor
    scales: Tensor | None
    width: int


def check_format(where: str, name: Any) -> WeightFormat:
    """The name of a format.

    Raises:
        ValueError: there is no such format.
    """
    if name not in FORMATS:
        raise ValueError(f"{where}: weights must be one of {', '.join(FORMATS)}, got {name!r}")
    return name


def storage_layout(format: str, out: int, width: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of what stores a weight (out, width): `weight`, the codes, and `scales` if there are any."""
    if format not in GROUPS:
        return {"weight": ((out, width), CODES[format])}
    groups = -(-width // GROUPS[format])
    codes = width if format == "int8" else groups * GROUPS[format] // 2
    return {"weight": ((out, codes), CODES[format]), "scales": ((out, groups), torch.bfloat16)}


def check_quantized(where: str, weight: QuantizedTensor) -> None:
    """Raise ValueError for codes and scales that do not belong to a weight of that width."""
    format = next((name for name, dtype in CODES.items() if dtype == weight.codes.dtype), None)
    if format is None or weight.codes.ndim != 2:
        found = f"{weight.codes.dtype} of shape {tuple(weight.codes.shape)}"
        raise ValueError(f"{where}: codes must have two axes and one of {list(CODES.values())}, got {found}")
    for name, x in (("weight", weight.codes), ("scales", weight.scales)):
        wanted = storage_layout(format, weight.codes.shape[0], weight.width).get(name)
        found_part = None if x is None else (tuple(x.shape), x.dtype)
        if found_part != wanted:
            raise ValueError(
                f"{where}: {name} must be {wanted} for {format} and width {weight.width}, got {found_part}"
            )


class QuantizedWeight(nn.Module):
    """A module with a weight in a narrow format, which casts leave as it is: they change the dtype of the computation.

    Attributes:
        format: of the weight.
        weight: its codes.
        scales: None where the format has none.
    """

    weight: nn.Parameter
    scales: nn.Parameter | None

    def __init__(
        self, format: WeightFormat, rows: int, width: int, *, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        """Make room for a weight (rows, width); `dtype` is the dtype of the activations."""
        super().__init__()
        self.format, self._rows, self._width = format, rows, width
        parts = self.parts()
        for name in ("weight", "scales"):
            part = parts.get(name)
            values = None if part is None else torch.empty(part[0], dtype=part[1], device=device)
            self.register_parameter(name, None if values is None else nn.Parameter(values, requires_grad=False))
        self.register_buffer("_computed_in", torch.empty(0, dtype=dtype, device=device), persistent=False)

    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the parameters that store the weight."""
        return storage_layout(self.format, self._rows, self._width)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""
        return self._computed_in.dtype  # type: ignore[return-value]

    @property
    def stored(self) -> QuantizedTensor:
        """The weight as it is stored."""
        return QuantizedTensor(self.weight, self.scales, self._width)

    def store(self, weight: QuantizedTensor) -> None:
        """Take a weight's codes and scales, without a copy."""
        check_quantized(type(self).__name__, weight)
        self.weight = nn.Parameter(weight.codes, requires_grad=False)
        if weight.scales is not None:
            self.scales = nn.Parameter(weight.scales, requires_grad=False)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *found: list[str]
    ) -> None:
        """Refuse codes and scales of another format, which a copy would round or truncate to this one."""
        errors = found[-1]
        for name, (_, dtype) in self.parts().items():
            x = state_dict.get(prefix + name)
            if isinstance(x, Tensor) and x.dtype != dtype:
                errors.append(
                    f"{prefix}{name} of a weight in {self.format} must be {dtype}, got {x.dtype}; "
                    "anymamba.quantization.quantize.quantize_model stores the weights of a plain model in a format"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *found)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedWeight:
        kept = {name: x.data for name in self.parts() if (x := self._parameters[name]) is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            moved = self._parameters[name]
            if moved is not None and moved.dtype != before.dtype:
                moved.data = before.to(moved.device)
        return self

    def extra_repr(self) -> str:
        """Sizes for `print(model)`."""
        return f"{self._rows}, {self._width}, format={self.format}"
