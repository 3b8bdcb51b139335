"""The official format (`mamba_ssm`): our own names, so nothing is renamed.

config.json has the fields of `MambaConfig`; the weights are model.safetensors (a tied head is left out) or
pytorch_model.bin.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from anymamba.models.config import MambaLMConfig
from anymamba.models.formats.base import expect_plain_stack, read_float


class OfficialFormat:
    """config.json of `mamba_ssm`, keys as they are."""

    name: ClassVar[str] = "official"
    config_files: ClassVar[tuple[str, ...]] = ("config.json",)
    weight_files: ClassVar[tuple[str, ...]] = ("model.safetensors", "pytorch_model.bin")

    def recognises(self, raw: dict[str, Any]) -> bool:
        """By its field `d_model`, where the model type is not ours."""
        return "d_model" in raw and raw.get("model_type") != "anymamba_lm"

    def read_config(self, raw: dict[str, Any]) -> MambaLMConfig:
        """The fields are ours; infinities may be spelled in two ways."""
        ssm_cfg = raw.get("ssm_cfg", {})
        if isinstance(ssm_cfg, dict) and "dt_limit" in ssm_cfg:
            raw = {**raw, "ssm_cfg": {**ssm_cfg, "dt_limit": [read_float(x) for x in ssm_cfg["dt_limit"]]}}
        return MambaLMConfig.from_dict(raw)

    def write_config(self, config: MambaLMConfig, dtype: torch.dtype) -> dict[str, Any]:
        """All fields, and those of `extra` that belong to no other format: the official reader accepts no others."""
        expect_plain_stack("the official format", config)
        return self._written(config)

    def _written(self, config: MambaLMConfig) -> dict[str, Any]:
        raw = config.to_dict()
        for other in ("transformers", "codestral"):
            raw.pop(other, None)
        return raw

    def our_key(self, key: str) -> str:
        """The same."""
        return key

    def their_key(self, key: str) -> str:
        """The same."""
        return key
