"""Choice of the activation of Mamba-3's decay rates, which a checkpoint may not record.

The official block used softplus until June 2026 and has used a heavy tail since, with the same names and shapes. A file
that does not name the activation is read as the newer kind, and its config is marked as ambiguous until the user
chooses, or sample texts decide (`anymamba.generation.detect_activation`).
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from anymamba.models.config import MambaLMConfig
from anymamba.models.lm import MambaLM

FIELD = "a_activation"
CHOICES = ("heavy_tail", "softplus")
AMBIGUOUS = "ambiguous_activation"  # a key of `MambaLMConfig.extra`


def is_ambiguous(config: MambaLMConfig) -> bool:
    """Return whether the model's file does not name the activation, and nobody has chosen since."""
    return bool(config.extra.get(AMBIGUOUS)) and FIELD not in config.ssm_cfg


def with_block_options(config: MambaLMConfig, options: dict[str, Any]) -> MambaLMConfig:
    """Return the config with some options of its blocks replaced.

    Raises:
        ValueError: Options that the block does not know, or invalid values.
    """
    extra = config.extra
    if FIELD in options:
        extra = {name: value for name, value in extra.items() if name != AMBIGUOUS}
    return dataclasses.replace(config, ssm_cfg={**config.ssm_cfg, **options}, extra=extra)


def set_activation(model: MambaLM, activation: str) -> None:
    """Make a model compute with another activation of its decay rates."""
    model.config = with_block_options(model.config, {FIELD: activation})
    for layer in model.backbone.layers:
        layer.mixer.config = dataclasses.replace(layer.mixer.config, a_activation=activation)  # type: ignore[union-attr, type-var]


def warn_if_ambiguous(where: str, config: MambaLMConfig, pass_: str) -> None:
    """Warn that the activation is unknown; `pass_` tells how to choose one."""
    if is_ambiguous(config):
        warnings.warn(
            f"{where}: the config does not name the activation of Mamba-3's decay rates; using heavy_tail (official "
            f"since June 2026). For older weights pass {pass_}",
            stacklevel=3,
        )
