"""The official format (`mamba_ssm`), whose names of tensors are ours, and our own, which adds a table `stack` to it.

config.json has the fields of `MambaConfig`; the weights are model.safetensors (a tied head is left out) or
pytorch_model.bin. The official Mamba-3 takes any further option and ignores it, so such entries of `ssm_cfg` are stored
separately and written back; and its file may not name the activation of A (`anymamba.models.config`), which is known
for published models (`anymamba.checkpoints.known`).
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, ClassVar

import torch

from anymamba.blocks.block_config import ignored_options
from anymamba.blocks.mamba3 import Mamba3Config
from anymamba.checkpoints.formats.base import Format, check_plain_stack, read_float
from anymamba.checkpoints.known import find_known_checkpoint
from anymamba.models.config import (
    ACTIVATION_FIELD,
    AMBIGUOUS_ACTIVATION,
    MambaLMConfig,
    is_ambiguous,
    with_block_options,
)

_UNKNOWN = "unknown_ssm_cfg"  # where unknown entries of `ssm_cfg` are kept
_OUR_TYPE = "anymamba_lm"


class OfficialFormat(Format):
    """The format of `mamba_ssm`, whose names of tensors are ours."""

    name: ClassVar[str] = "official"
    config_files: ClassVar[tuple[str, ...]] = ("config.json",)
    weight_files: ClassVar[tuple[str, ...]] = ("model.safetensors", "pytorch_model.bin")

    def recognizes(self, raw: dict[str, Any]) -> bool:
        """Return whether there is a field `d_model`, and the model type is not ours."""
        return "d_model" in raw and raw.get("model_type") != _OUR_TYPE

    def read_config(self, raw: dict[str, Any]) -> MambaLMConfig:
        """Return our config: the fields are ours, and infinities may be spelled in two ways."""
        ssm_cfg = raw.get("ssm_cfg", {})
        if isinstance(ssm_cfg, dict) and "dt_limit" in ssm_cfg:
            raw = {**raw, "ssm_cfg": {**ssm_cfg, "dt_limit": [read_float(x) for x in ssm_cfg["dt_limit"]]}}
        if isinstance(ssm_cfg, dict) and ssm_cfg.get("layer") == "Mamba3":
            raw = _read_mamba3(raw)
        config = MambaLMConfig.from_dict(raw)
        if is_ambiguous(config) and (known := find_known_checkpoint(config)) is not None:
            config = with_block_options(config, {ACTIVATION_FIELD: known.activation})
        return config

    def write_config(self, config: MambaLMConfig, dtype: torch.dtype) -> dict[str, Any]:
        """Return all fields, without those of `extra` that other formats own: the official reader accepts no others."""
        check_plain_stack("the official format", config, allow_attention=True)
        return self._all_fields(config)

    def _all_fields(self, config: MambaLMConfig) -> dict[str, Any]:
        raw = config.to_dict()
        is_ambiguous, unknown = raw.pop(AMBIGUOUS_ACTIVATION, False), raw.pop(_UNKNOWN, {})
        raw["ssm_cfg"] = {**unknown, **raw["ssm_cfg"]}
        if config.layer == "Mamba3" and not is_ambiguous:
            raw["ssm_cfg"].setdefault(ACTIVATION_FIELD, config.block_config().a_activation)
        for other in ("transformers", "codestral", "fla", "gguf"):
            raw.pop(other, None)
        return raw

    def our_key(self, key: str) -> str:
        """Return the name unchanged."""
        return key

    def foreign_key(self, key: str) -> str:
        """Return the name unchanged."""
        return key


class AnymambaFormat(OfficialFormat):
    """Our own format, for every stack: the official one with `"model_type": "anymamba_lm"`."""

    name: ClassVar[str] = "anymamba"
    weight_files: ClassVar[tuple[str, ...]] = ("model.safetensors",)

    def recognizes(self, raw: dict[str, Any]) -> bool:
        """Return whether the model type is ours."""
        return raw.get("model_type") == _OUR_TYPE

    def read_config(self, raw: dict[str, Any]) -> MambaLMConfig:
        """Return the config: all fields are ours."""
        return super().read_config({name: value for name, value in raw.items() if name != "model_type"})

    def write_config(self, config: MambaLMConfig, dtype: torch.dtype) -> dict[str, Any]:
        """Return all fields."""
        return {"model_type": _OUR_TYPE, **self._all_fields(config)}


def _read_mamba3(raw: dict[str, Any]) -> dict[str, Any]:
    """Move unknown entries of `ssm_cfg` to `extra`, and mark the config if it does not name the activation of A."""
    known = {f.name for f in dataclasses.fields(Mamba3Config)} | ignored_options(Mamba3Config) | {"layer"}
    ssm_cfg: dict[str, Any] = raw["ssm_cfg"]
    if unknown := {name: value for name, value in ssm_cfg.items() if name not in known}:
        warnings.warn(
            f"ssm_cfg has entries that Mamba3 does not know: {', '.join(sorted(unknown))}; they are kept but not used",
            stacklevel=4,
        )
        raw = {**raw, "ssm_cfg": {k: v for k, v in ssm_cfg.items() if k in known}, _UNKNOWN: unknown}
    return raw if ACTIVATION_FIELD in ssm_cfg else {**raw, AMBIGUOUS_ACTIVATION: True}
