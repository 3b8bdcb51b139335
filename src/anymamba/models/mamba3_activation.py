"""What a Mamba-3 checkpoint may not record: how its decay rates are activated.

The official block had softplus until June 2026 and has a heavy tail since, under the same names and shapes. A file that
does not name one is taken to be of the newer kind, and its config is marked as undecided until the user chooses, or a
text decides (`anymamba.generation.detect_activation`).
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from anymamba.models.config import MambaLMConfig
from anymamba.models.lm import MambaLM

FIELD = "a_activation"
CHOICES = ("heavy_tail", "softplus")
UNDECIDED = "undecided_activation"  # in `MambaLMConfig.extra`


def is_ambiguous(config: MambaLMConfig) -> bool:
    """Whether the model's file does not name the activation, and nothing has decided since."""
    return bool(config.extra.get(UNDECIDED)) and FIELD not in config.ssm_cfg


def with_block_options(config: MambaLMConfig, options: dict[str, Any]) -> MambaLMConfig:
    """The config with some options of its blocks replaced.

    Raises:
        ValueError: options that the block does not know, or values that cannot work.
    """
    extra = config.extra
    if FIELD in options:
        extra = {name: value for name, value in extra.items() if name != UNDECIDED}
    return dataclasses.replace(config, ssm_cfg={**config.ssm_cfg, **options}, extra=extra)


def set_activation(model: MambaLM, activation: str) -> None:
    """Have a model compute with another activation of its decay rates."""
    model.config = with_block_options(model.config, {FIELD: activation})
    for layer in model.backbone.layers:
        layer.mixer.config = dataclasses.replace(layer.mixer.config, a_activation=activation)  # type: ignore[union-attr, type-var]


def warn_if_ambiguous(where: str, config: MambaLMConfig, pass_: str) -> None:
    """Warn that the activation is unknown, and say what to do: `pass_` introduces the choice of two."""
    if is_ambiguous(config):
        warnings.warn(
            f"{where}: the config does not name the activation of Mamba-3's decay rates; using heavy_tail (official "
            f"since June 2026). For older weights pass {pass_}",
            stacklevel=3,
        )
