"""The official format (`mamba_ssm`): our own names, so nothing is renamed.

config.json has the fields of `MambaConfig`; the weights are model.safetensors (a tied head is left out) or
pytorch_model.bin. The official Mamba-3 takes any further option and ignores it, so such entries of `ssm_cfg` are kept
apart and written back; and its file may not name the activation of A (`anymamba.models.mamba3_activation`).
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, ClassVar

import torch

from anymamba.blocks.block_config import ignored_options
from anymamba.blocks.mamba3 import Mamba3Config
from anymamba.checkpoints.formats.base import check_plain_stack, read_float
from anymamba.models.config import MambaLMConfig
from anymamba.models.mamba3_activation import FIELD, UNDECIDED

_UNKNOWN = "unknown_ssm_cfg"  # where unknown entries of `ssm_cfg` are kept


class OfficialFormat:
    """config.json of `mamba_ssm`, keys as they are."""

    name: ClassVar[str] = "official"
    config_files: ClassVar[tuple[str, ...]] = ("config.json",)
    weight_files: ClassVar[tuple[str, ...]] = ("model.safetensors", "pytorch_model.bin")

    def recognizes(self, raw: dict[str, Any]) -> bool:
        """By its field `d_model`, where the model type is not ours."""
        return "d_model" in raw and raw.get("model_type") != "anymamba_lm"

    def read_config(self, raw: dict[str, Any]) -> MambaLMConfig:
        """The fields are ours; infinities may be spelled in two ways."""
        ssm_cfg = raw.get("ssm_cfg", {})
        if isinstance(ssm_cfg, dict) and "dt_limit" in ssm_cfg:
            raw = {**raw, "ssm_cfg": {**ssm_cfg, "dt_limit": [read_float(x) for x in ssm_cfg["dt_limit"]]}}
        if isinstance(ssm_cfg, dict) and ssm_cfg.get("layer") == "Mamba3":
            raw = _read_mamba3(raw)
        return MambaLMConfig.from_dict(raw)

    def write_config(self, config: MambaLMConfig, dtype: torch.dtype) -> dict[str, Any]:
        """All fields, and those of `extra` that belong to no other format: the official reader accepts no others."""
        check_plain_stack("the official format", config)
        return self._written(config)

    def _written(self, config: MambaLMConfig) -> dict[str, Any]:
        raw = config.to_dict()
        undecided, unknown = raw.pop(UNDECIDED, False), raw.pop(_UNKNOWN, {})
        raw["ssm_cfg"] = {**unknown, **raw["ssm_cfg"]}
        if config.layer == "Mamba3" and not undecided:
            raw["ssm_cfg"].setdefault(FIELD, config.block_config().a_activation)
        for other in ("transformers", "codestral", "fla", "gguf"):
            raw.pop(other, None)
        return raw

    def our_key(self, key: str) -> str:
        """The same."""
        return key

    def foreign_key(self, key: str) -> str:
        """The same."""
        return key


def _read_mamba3(raw: dict[str, Any]) -> dict[str, Any]:
    """Set unknown entries of `ssm_cfg` aside, and note whether the activation of A is given."""
    known = {f.name for f in dataclasses.fields(Mamba3Config)} | ignored_options(Mamba3Config) | {"layer"}
    given: dict[str, Any] = raw["ssm_cfg"]
    if unknown := {name: value for name, value in given.items() if name not in known}:
        warnings.warn(
            f"ssm_cfg has entries that Mamba3 does not know: {', '.join(sorted(unknown))}; they are kept but not used",
            stacklevel=4,
        )
        raw = {**raw, "ssm_cfg": {k: v for k, v in given.items() if k in known}, _UNKNOWN: unknown}
    return raw if FIELD in given else {**raw, UNDECIDED: True}
