"""Language models whose weights are stored in fewer bits: the projections, the embedding and the head.

Everything else stays as it is, float32 or wider where blocks keep it so: convolutions, norms, A, D, biases, and
Mamba-1's projection to step sizes, whose results go through an exponential.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from anymamba.core.weight_formats import FORMATS, QuantizedWeight, WeightFormat, check_format
from anymamba.quantization.modules import QuantizedEmbedding, QuantizedLinear
from anymamba.quantization.ops import quantize_rows, rows_at_once

_Model = TypeVar("_Model", bound=nn.Module)

METHOD = "anymamba"  # in the config of a checkpoint
_FIELD = "quantization_config"
_KNOWN = {"quant_method", "weights", "dtype"}


def weight_format(model: nn.Module) -> WeightFormat | None:
    """The format of a model's narrow weights; None if it has none."""
    found = next((module for module in model.modules() if isinstance(module, QuantizedWeight)), None)
    return None if found is None else found.format


def quantizable_names(model: nn.Module) -> list[str]:
    """The names of the weights that are narrow, or that `replace_linears` makes so."""
    kinds = (nn.Linear, nn.Embedding)
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) in kinds or isinstance(module, QuantizedWeight)
    ]


def replace_linears(model: nn.Module, format: WeightFormat) -> None:
    """Replace the projections, the embedding and the head by narrow ones without values.

    Raises:
        ValueError: an unknown format, or a model that has narrow weights already.
    """
    check_format("MambaLM", format)
    if (found := weight_format(model)) is not None:
        raise ValueError(f"MambaLM: expected a model with plain weights, got one in {found}")
    for owner in list(model.modules()):
        for name, module in list(owner.named_children()):
            if (empty := _narrow_twin(module, format)) is not None:
                setattr(owner, name, empty)
    model.tie_weights()  # type: ignore[operator]


def quantize_model(model: _Model, format: WeightFormat) -> _Model:
    """Store the weights of a model in a narrow format, in place; for inference, and for adapters beside them.

    Returns:
        The model.

    Raises:
        TypeError: a model that is not a language model.
        ValueError: an unknown format, a model that has narrow weights already, or values that the format cannot hold.
    """
    if not (isinstance(model, nn.Module) and hasattr(model, "tie_weights")):
        raise TypeError(f"quantize_model: expected a MambaLM, got {type(model).__name__}")
    check_format("quantize_model", format)
    distinct = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - distinct.keys()
    plain = {name: x for name, x in model.state_dict().items() if name not in tied}
    state: dict[str, Tensor] = {}
    wanted = set(quantizable_names(model))
    for name, x in plain.items():
        if name in wanted:
            state |= quantize_weight(name, x.detach().split(rows_at_once(x.shape[1])), x.shape, format, x.device)
        else:
            state[name] = x
    replace_linears(model, format)
    model.load_state_dict(state, assign=True)
    return model


def quantize_weight(
    name: str, parts: Iterable[Tensor], shape: Sequence[int], format: WeightFormat, device: torch.device | None
) -> dict[str, Tensor]:
    """The codes and scales of a weight, which comes some rows at a time, by their names.

    Raises:
        ValueError: values that the format cannot hold; the message names the weight.
    """
    try:
        codes, scales, _ = quantize_rows(parts, shape[0], shape[1], format, device)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return {name: codes} if scales is None else {name: codes, scales_name(name): scales}


def scales_name(weight: str) -> str:
    """The name of the scales of a weight."""
    return weight.removesuffix("weight") + "scales"


def parse_quantization_config(extra: dict[str, Any]) -> tuple[WeightFormat | None, str | None, dict[str, Any]]:
    """What a config file says about narrow weights.

    Returns:
        Their format, the dtype of the activations, and the other fields.

    Raises:
        ValueError: weights that were quantized by another program, or in an unknown format.
    """
    said = extra.get(_FIELD)
    if said is None:
        return None, None, extra
    method = said.get("quant_method") if isinstance(said, dict) else None
    if not isinstance(method, str):
        raise ValueError(f"{_FIELD} must be a table that names its quant_method, got {reprlib.repr(said)}")
    if method != METHOD:
        raise ValueError(f"the weights were quantized by {method!r}, which only that can read")
    format, dtype = said.get("weights"), said.get("dtype")
    if format not in FORMATS or dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"{_FIELD} must name weights in one of {', '.join(FORMATS)} and a dtype, got {format!r} and {dtype!r}"
        )
    if unknown := sorted(set(said) - _KNOWN):
        raise ValueError(
            f"{_FIELD} has fields that this version does not know, so it cannot read the weights: {', '.join(unknown)}"
        )
    return format, dtype, {name: value for name, value in extra.items() if name != _FIELD}


def quantization_config(model: nn.Module) -> dict[str, Any]:
    """What the config file of a model says about its narrow weights; nothing if it has none."""
    format = weight_format(model)
    if format is None:
        return {}
    dtype = str(model.dtype).removeprefix("torch.")
    return {_FIELD: {"quant_method": METHOD, "weights": format, "dtype": dtype}}


def _narrow_twin(module: nn.Module, format: WeightFormat) -> QuantizedLinear | QuantizedEmbedding | None:
    if type(module) is nn.Linear:
        dtype, device, bias = module.weight.dtype, module.weight.device, module.bias is not None
        return QuantizedLinear(format, module.in_features, module.out_features, bias=bias, dtype=dtype, device=device)
    if type(module) is nn.Embedding:
        dtype, device = module.weight.dtype, module.weight.device
        return QuantizedEmbedding(format, module.num_embeddings, module.embedding_dim, dtype=dtype, device=device)
    return None
