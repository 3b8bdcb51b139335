"""A model whose parameters have no values yet, made in milliseconds, and the tensors that a config asks for.

The system takes no memory for what is never written, so parameters are allocated and their initialization is skipped:
nothing is drawn from torch's generator. (On the meta device, arithmetic loads a second or two of symbolic mathematics.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from anymamba.core.weight_formats import QuantizedWeight, WeightFormat
from anymamba.models.config import MambaLMConfig
from anymamba.models.lm import MambaLM
from anymamba.quantization.quantize import replace_linears

_FILL_FUNCTIONS = {"uniform_", "normal_", "kaiming_uniform_", "zeros_", "ones_", "fill_", "constant_", "zero_"}
_DRAW_FUNCTIONS = {"rand", "randn"}
_FACTORIES = {"empty", "zeros", "ones", "full", *_DRAW_FUNCTIONS}
_FIRST_LAYER = "backbone.layers.0."


class SkipInitialization(TorchFunctionMode):
    """A mode that skips operations which fill or draw a tensor, and limits the size of tensors before they exist."""

    def __init__(self, max_numel: int | None) -> None:
        """Set the largest number of elements of a tensor; None for no limit."""
        super().__init__()
        self._max_numel = max_numel

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` unless it only fills its first argument."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _FILL_FUNCTIONS:
            return args[0] if args else kwargs["tensor"]
        if self._max_numel is not None and (numel := _count_allocated(name, args, kwargs)) > self._max_numel:
            raise ValueError(f"it asks for a tensor of {_format_count(numel)} numbers, more than the files hold in all")
        return (torch.empty if name in _DRAW_FUNCTIONS else func)(*args, **kwargs)


def empty_model(
    config: MambaLMConfig, dtype: torch.dtype | None = None, weights: WeightFormat | None = None
) -> MambaLM:
    """Create a model with parameters of undefined values, on the CPU.

    Args:
        config: Config of the model.
        dtype: Dtype of the parameters.
        weights: Format of quantized weights; None for plain ones.
    """
    with SkipInitialization(None):
        model = MambaLM(config, device="cpu", dtype=dtype)
        if weights is not None:
            replace_linears(model, weights)
        return model


class ExpectedTensor(NamedTuple):
    """A tensor that a model has: its shape, and its dtype unless any floating-point one will do."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None


def expected_tensors(
    config: MambaLMConfig, max_numel: int | None = None, weights: WeightFormat | None = None
) -> dict[str, ExpectedTensor]:
    """Return the tensors of `config`'s model by their names; one layer is built for all if they are alike.

    Raise `ValueError` for a tensor with more than `max_numel` elements. `weights` is the format of quantized weights.
    """
    are_layers_alike = not config.stack and not config.attn_layer_idx
    with SkipInitialization(max_numel):
        model = MambaLM(dataclasses.replace(config, n_layer=1) if are_layers_alike else config, device="cpu")
    if weights is not None:
        replace_linears(model, weights)
    dtypes = {
        f"{name}.{part}": dtype
        for name, module in model.named_modules()
        if isinstance(module, QuantizedWeight)
        for part, (_, dtype) in module.layout().items()
    }
    built = {name: ExpectedTensor(tuple(x.shape), dtypes.get(name)) for name, x in model.state_dict().items()}
    if not are_layers_alike:
        return built
    tensors: dict[str, ExpectedTensor] = {}
    for name, expected in built.items():
        if name.startswith(_FIRST_LAYER):
            rest = name.removeprefix(_FIRST_LAYER)
            tensors |= {f"backbone.layers.{i}.{rest}": expected for i in range(config.n_layer)}
        else:
            tensors[name] = expected
    return tensors


def parameter_count(config: MambaLMConfig) -> int:
    """Return the number of parameters of `config`'s model; a tied head counts once."""
    stored = sum(math.prod(shape) for shape, _ in expected_tensors(config).values())
    return stored - (config.padded_vocab_size * config.d_model if config.tie_embeddings else 0)


def _count_allocated(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Return how many elements a call allocates; 0 for one that allocates nothing, or only small results."""
    if name in _FACTORIES:
        size = kwargs.get("size", args[0] if args and isinstance(args[0], Sequence) else args)
        return math.prod(size)
    if name == "arange":
        return max(0, *(x for x in args if isinstance(x, int)))
    if name == "repeat":
        times = args[1] if isinstance(args[1], Sequence) else args[1:]
        return math.prod((args[0].numel(), *times))
    return 0


def _format_count(count: int) -> str:
    return f"{count:,}" if count < 10**12 else f"about 10^{len(str(count)) - 1}"
