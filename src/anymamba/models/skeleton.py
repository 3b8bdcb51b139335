"""A model whose parameters hold nothing yet, made in milliseconds.

Memory that is never written is never taken, so parameters are allocated and their initialisation is left out. (On the
meta device arithmetic loads a second or two of symbolic mathematics.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anymamba.models.config import MambaLMConfig
from anymamba.models.lm import MambaLM

_FILLS = frozenset({"uniform_", "normal_", "kaiming_uniform_", "zeros_", "ones_", "fill_"})


class _WithoutFills(TorchFunctionMode):
    """Leaves out what fills a tensor in place."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` unless it only fills its first argument."""
        if getattr(func, "__name__", "") in _FILLS:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def skeleton(config: MambaLMConfig, dtype: torch.dtype | None = None) -> MambaLM:
    """The model of `config` with parameters of undefined values, on the CPU."""
    with _WithoutFills():
        return MambaLM(config, device="cpu", dtype=dtype)
