"""A model whose parameters hold nothing yet, made in milliseconds.

Memory that is never written is never taken, so parameters are allocated and their initialization is left out: nothing
is drawn from torch's generator. (On the meta device arithmetic loads a second or two of symbolic mathematics.)
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

_FILLS = frozenset({"uniform_", "normal_", "kaiming_uniform_", "zeros_", "ones_", "fill_", "constant_", "zero_"})
_DRAWS = frozenset({"rand", "randn"})
_MAKERS = frozenset({"empty", "zeros", "ones", "full", *_DRAWS})
_FIRST_LAYER = "backbone.layers.0."


class SkipInitialization(TorchFunctionMode):
    """Skips operations that fill or draw a tensor, and refuses one of more than `most` elements before it is made."""

    def __init__(self, most: int | None) -> None:
        """Set the limit; None: no limit."""
        super().__init__()
        self._most = most

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` unless it only fills its first argument."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _FILLS:
            return args[0] if args else kwargs["tensor"]
        if self._most is not None and (size := _elements(name, args, kwargs)) > self._most:
            raise ValueError(f"it asks for a tensor of {_rounded(size)} numbers, more than the files hold in all")
        return (torch.empty if name in _DRAWS else func)(*args, **kwargs)


def empty_model(
    config: MambaLMConfig, dtype: torch.dtype | None = None, weights: WeightFormat | None = None
) -> MambaLM:
    """The model of `config` with parameters of undefined values, on the CPU, its `weights` in a narrow format."""
    with SkipInitialization(None):
        model = MambaLM(config, device="cpu", dtype=dtype)
        if weights is not None:
            replace_linears(model, weights)
        return model


class Expected(NamedTuple):
    """A tensor that a model has: its shape, and its dtype unless any will do."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None


def expected_tensors(
    config: MambaLMConfig, most: int | None = None, weights: WeightFormat | None = None
) -> dict[str, Expected]:
    """The tensors of `config`'s model by their names; one layer is built for all, if they are alike.

    Raises:
        ValueError: one of them has more than `most` elements.
    """
    with SkipInitialization(most):
        model = MambaLM(config if config.stack else dataclasses.replace(config, n_layer=1), device="cpu")
    if weights is not None:
        replace_linears(model, weights)
    dtypes = {
        f"{name}.{part}": dtype
        for name, module in model.named_modules()
        if isinstance(module, QuantizedWeight)
        for part, (_, dtype) in module.layout().items()
    }
    found = {name: Expected(tuple(x.shape), dtypes.get(name)) for name, x in model.state_dict().items()}
    if config.stack:
        return found
    tensors: dict[str, Expected] = {}
    for name, expected in found.items():
        rest = name.removeprefix(_FIRST_LAYER)
        layers = range(config.n_layer) if rest != name else [None]
        tensors |= {name if i is None else f"backbone.layers.{i}.{rest}": expected for i in layers}
    return tensors


def parameter_count(config: MambaLMConfig) -> int:
    """The number of parameters of `config`'s model; a head that is the embedding is not counted again."""
    stored = sum(math.prod(shape) for shape, _ in expected_tensors(config).values())
    return stored - (config.padded_vocab_size * config.d_model if config.tie_embeddings else 0)


def _elements(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """How many elements a call allocates; 0 for one that allocates nothing, or only small results from others."""
    if name in _MAKERS:
        size = kwargs.get("size", args[0] if args and isinstance(args[0], Sequence) else args)
        return math.prod(size)
    if name == "arange":
        return max(0, *(x for x in args if isinstance(x, int)))
    if name == "repeat":
        times = args[1] if isinstance(args[1], Sequence) else args[1:]
        return math.prod((args[0].numel(), *times))
    return 0


def _rounded(size: int) -> str:
    return f"{size:,}" if size < 10**12 else f"about 10^{len(str(size)) - 1}"
