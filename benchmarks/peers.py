"""Other implementations of the blocks.

Their libraries are imported by name when a block is built: they are not needed to list or to type-check the benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor, nn


class _Stepping:
    """A mixer of transformers with the methods `prefill` and `step`."""

    transformers: Any
    config: Any
    mixer: nn.Module

    def prefill(self, x: Tensor) -> tuple[Tensor, Any]:
        """Map (b, t, d) to (b, t, d) and a new cache."""
        cache = self.transformers.DynamicCache(config=self.config)
        y: Tensor = self.mixer(x, cache_params=cache)
        return y, cache

    def step(self, x_bd: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Map (b, d) to (b, d) and `cache`, which is advanced in place."""
        y_btd: Tensor = self.mixer(x_bd.unsqueeze(1), cache_params=cache)
        return y_btd.squeeze(1), cache


class TransformersMamba1(_Stepping):
    """The Mamba-1 block of Hugging Face `transformers`.

    Attributes:
        mixer: Block itself, (b, t, d) -> (b, t, d). Its parameters have the official names.
    """

    def __init__(self, weights: Mapping[str, Tensor], *, d_model: int, d_state: int) -> None:
        """Build the block with expand = 2, and load `weights`."""
        self.transformers = import_module("transformers")
        modeling = import_module("transformers.models.mamba.modeling_mamba")
        self.config = self.transformers.MambaConfig(
            hidden_size=d_model, state_size=d_state, expand=2, conv_kernel=4, num_hidden_layers=1
        )
        self.mixer = modeling.MambaMixer(self.config, layer_idx=0)
        self.mixer.load_state_dict(dict(weights), strict=True)


class TransformersMamba2(_Stepping):
    """The Mamba-2 block of Hugging Face `transformers`, with its own default chunk length.

    The norm's epsilon and the limits of dt are set to those of the official block and of ours.

    Attributes:
        mixer: Block itself, (b, t, d) -> (b, t, d). Its parameters have the official names.
    """

    def __init__(self, weights: Mapping[str, Tensor], *, d_model: int, d_state: int, headdim: int) -> None:
        """Build the block with expand = 2 and one group, and load `weights`."""
        expand = 2
        self.transformers = import_module("transformers")
        modeling = import_module("transformers.models.mamba2.modeling_mamba2")
        self.config = self.transformers.Mamba2Config(
            hidden_size=d_model,
            state_size=d_state,
            num_heads=expand * d_model // headdim,
            head_dim=headdim,
            n_groups=1,
            expand=expand,
            conv_kernel=4,
            num_hidden_layers=1,
            layer_norm_epsilon=1e-5,
            time_step_limit=(0.0, float("inf")),
        )
        self.mixer = modeling.Mamba2Mixer(self.config, layer_idx=0)
        self.mixer.load_state_dict(dict(weights), strict=True)
