"""Linear layers and embeddings with quantized weights, and language models whose projections, embedding and head are.

Everything else stays as it is, in float32 or higher where blocks keep it so: convolutions, norms, A, D, biases, and
Mamba-1's projection to step sizes, whose results go through an exponential.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anymamba.core.weight_formats import FORMAT_SPECS, QuantizedTensor, QuantizedWeight, WeightFormat, check_format
from anymamba.quantization.ops import dequantize_tensor, quantize_rows, quantized_linear, rows_at_once

_Model = TypeVar("_Model", bound=nn.Module)

METHOD = "anymamba"  # in the config of a checkpoint
_FIELD = "quantization_config"
_KNOWN_FIELDS = {"quant_method", "weights", "dtype"}
_ACTIVATION_DTYPES = ("float32", "bfloat16", "float16")


class QuantizedLinear(QuantizedWeight):
    """`y = x weightᵀ + bias`, summed in float32; the gradient reaches x and the bias, not the weight."""

    HAS_COMPILED_FORWARD: ClassVar = True  # true for this class alone: kernels compute what its `forward` computes

    bias: nn.Parameter | None

    def __init__(
        self,
        format: WeightFormat,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocate weight and bias without values.

        Args:
            format: Format of the weight.
            in_features: Channels of the input.
            out_features: Channels of the output.
            bias: Whether there is a bias.
            dtype: Dtype of the activations and of the bias.
            device: Device of the parameters.
        """
        super().__init__(format, out_features, in_features, dtype=dtype, device=device)
        self.in_features = in_features
        self.out_features = out_features
        values = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", None if values is None else nn.Parameter(values))

    def forward(self, x: Float[Tensor, "*batch i"]) -> Float[Tensor, "*batch o"]:
        """Map (..., in_features) to (..., out_features), in the dtype of x."""
        return quantized_linear(x, self.stored, self.bias)


class QuantizedEmbedding(QuantizedWeight):
    """An embedding table, whose rows are dequantized when they are looked up."""

    def __init__(
        self,
        format: WeightFormat,
        num_embeddings: int,
        embedding_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocate the table without values.

        Args:
            format: Format of the table.
            num_embeddings: Rows of the table.
            embedding_dim: Columns of the table.
            dtype: Dtype of the result.
            device: Device of the table.
        """
        super().__init__(format, num_embeddings, embedding_dim, dtype=dtype, device=device)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d"]:
        """Return the rows `ids`."""
        flat = ids.flatten()
        scales = None if self.scales is None else torch.embedding(self.scales, flat)
        rows = QuantizedTensor(torch.embedding(self.weight, flat), scales, self.format, self._width)
        return dequantize_tensor(rows).to(self.dtype).view(*ids.shape, self.embedding_dim)


def weight_format(model: nn.Module) -> WeightFormat | None:
    """Return the format of a model's quantized weights; None if it has none."""
    quantized = next((module for module in model.modules() if isinstance(module, QuantizedWeight)), None)
    return None if quantized is None else quantized.format


def quantizable_names(model: nn.Module) -> list[str]:
    """Return the names of the weights that are quantized, or that `replace_linears` would replace."""
    kinds = (nn.Linear, nn.Embedding)
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) in kinds or isinstance(module, QuantizedWeight)
    ]


def replace_linears(model: nn.Module, format: WeightFormat) -> None:
    """Replace the projections, the embedding and the head by quantized modules without values.

    Raises `ValueError` for an unknown format, and for a model that is quantized already.
    """
    check_format("MambaLM", format)
    if (present := weight_format(model)) is not None:
        raise ValueError(f"MambaLM: expected a model with plain weights, got one in {present}")
    for owner in list(model.modules()):
        for name, module in list(owner.named_children()):
            if (replacement := _quantized_module_like(module, format)) is not None:
                setattr(owner, name, replacement)
    model.tie_weights()  # type: ignore[operator]


def quantize_model(model: _Model, format: WeightFormat) -> _Model:
    """Quantize the weights of a language model in place, for inference and for training adapters.

    Args:
        model: A `MambaLM` with plain weights.
        format: Format of the weights.

    Returns:
        The model.

    Raises:
        TypeError: A model that is not a language model.
        ValueError: Unknown format, a model that is quantized already, or values that the format cannot hold.
    """
    if not (isinstance(model, nn.Module) and hasattr(model, "tie_weights")):
        raise TypeError(f"quantize_model: expected a MambaLM, got {type(model).__name__}")
    check_format("quantize_model", format)
    distinct_names = dict(model.named_parameters()).keys()
    tied_names = {name for name, _ in model.named_parameters(remove_duplicate=False)} - distinct_names
    names_to_quantize = set(quantizable_names(model))
    state: dict[str, Tensor] = {}
    for name, x in model.state_dict().items():
        if name in names_to_quantize - tied_names:
            state |= quantize_weight(name, x.detach().split(rows_at_once(x.shape[1])), x.shape, format, x.device)
        elif name not in tied_names:
            state[name] = x
    replace_linears(model, format)
    model.load_state_dict(state, assign=True)
    return model


def quantize_weight(
    name: str, chunks: Iterable[Tensor], shape: Sequence[int], format: WeightFormat, device: torch.device | None
) -> dict[str, Tensor]:
    """Return codes and scales of a weight, whose rows come in chunks, by their names.

    Raises `ValueError`, which names the weight, for values that the format cannot hold.
    """
    try:
        stored = quantize_rows(chunks, shape[0], shape[1], format, device)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return {name: stored.codes} if stored.scales is None else {name: stored.codes, scales_name(name): stored.scales}


def scales_name(weight: str) -> str:
    """Return the name of a weight's scales."""
    return weight.removesuffix("weight") + "scales"


def parse_quantization_config(extra: dict[str, Any]) -> tuple[WeightFormat | None, str | None, dict[str, Any]]:
    """Return format of the weights and dtype of the activations, or None, and the other `extra` fields of a config.

    Raises `ValueError` for weights that were quantized by another library, or in an unknown format.
    """
    entry = extra.get(_FIELD)
    if entry is None:
        return None, None, extra
    method = entry.get("quant_method") if isinstance(entry, dict) else None
    if not isinstance(method, str):
        raise ValueError(f"{_FIELD} must be a table that names its quant_method, got {reprlib.repr(entry)}")
    if method != METHOD:
        raise ValueError(f"weights quantized with {method!r} are not supported; load them with that library")
    format, dtype = entry.get("weights"), entry.get("dtype")
    if format not in FORMAT_SPECS or dtype not in _ACTIVATION_DTYPES:
        raise ValueError(
            f"{_FIELD} must name weights in one of {', '.join(FORMAT_SPECS)} and a dtype, got {format!r} and {dtype!r}"
        )
    if unknown := sorted(set(entry) - _KNOWN_FIELDS):
        raise ValueError(f"{_FIELD} has unknown fields, so the weights cannot be read: {', '.join(unknown)}")
    return cast("WeightFormat", format), dtype, {name: value for name, value in extra.items() if name != _FIELD}


def quantization_config(model: nn.Module) -> dict[str, Any]:
    """Return the entry of a config file that describes a model's quantized weights; empty if it has none."""
    format = weight_format(model)
    if format is None:
        return {}
    dtype = str(model.dtype).removeprefix("torch.")
    return {_FIELD: {"quant_method": METHOD, "weights": format, "dtype": dtype}}


def _quantized_module_like(module: nn.Module, format: WeightFormat) -> QuantizedLinear | QuantizedEmbedding | None:
    """Return a quantized module without values for a plain linear layer or embedding, None for any other module."""
    if type(module) is nn.Linear:
        dtype, device, bias = module.weight.dtype, module.weight.device, module.bias is not None
        return QuantizedLinear(format, module.in_features, module.out_features, bias=bias, dtype=dtype, device=device)
    if type(module) is nn.Embedding:
        dtype, device = module.weight.dtype, module.weight.device
        return QuantizedEmbedding(format, module.num_embeddings, module.embedding_dim, dtype=dtype, device=device)
    return None
