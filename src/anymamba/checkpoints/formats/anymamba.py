"""Our own format: the official one, with our model type and the table `stack`, which other programs do not know."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from anymamba.checkpoints.formats.official import OfficialFormat
from anymamba.models.config import MambaLMConfig

MODEL_TYPE = "anymamba_lm"


class AnymambaFormat(OfficialFormat):
    """config.json with `"model_type": "anymamba_lm"`, for every stack; keys as they are."""

    name: ClassVar[str] = "anymamba"
    weight_files: ClassVar[tuple[str, ...]] = ("model.safetensors",)

    def recognizes(self, raw: dict[str, Any]) -> bool:
        """Return whether the model type is ours."""
        return raw.get("model_type") == MODEL_TYPE

    def read_config(self, raw: dict[str, Any]) -> MambaLMConfig:
        """Return the config: all fields are ours."""
        return super().read_config({name: value for name, value in raw.items() if name != "model_type"})

    def write_config(self, config: MambaLMConfig, dtype: torch.dtype) -> dict[str, Any]:
        """Return all fields."""
        return {"model_type": MODEL_TYPE, **self._written(config)}
