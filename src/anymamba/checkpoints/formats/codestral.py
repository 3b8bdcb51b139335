"""The format of Mamba-Codestral (`mistral_inference`): params.json, and the official keys after a prefix `model.`.

It holds Mamba-2 models whose blocks have the official default sizes, with any number of groups.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from anymamba.checkpoints.formats.base import Format, check_fixed_fields
from anymamba.models.config import INITIALIZATION_FIELDS, MambaLMConfig

_SAME = ("vocab_size", "rms_norm", "residual_in_fp32", "fused_add_norm", "pad_vocab_size_multiple", "tie_embeddings")
_PREFIX = "model."


class CodestralFormat(Format):
    """The format with params.json and its fields `dim`, `n_layers` and `n_groups`."""

    name: ClassVar[str] = "codestral"
    config_files: ClassVar[tuple[str, ...]] = ("params.json", "config.json")
    weight_files: ClassVar[tuple[str, ...]] = ("consolidated.safetensors", "model.safetensors")

    def recognizes(self, raw: dict[str, Any]) -> bool:
        """Return whether the config has the fields of this format."""
        return "dim" in raw and "n_layers" in raw

    def read_config(self, raw: dict[str, Any]) -> MambaLMConfig:
        """Return a config of blocks with the official default sizes and `n_groups` groups; other fields are kept."""
        if raw.get("model_type", "mamba") != "mamba":
            raise ValueError(f'a Codestral model has "model_type": "mamba", got {raw["model_type"]!r}')
        used = ("dim", "n_layers", "n_groups", *_SAME)
        rest = {name: value for name, value in raw.items() if name not in used}
        return MambaLMConfig(
            d_model=raw["dim"],
            n_layer=raw["n_layers"],
            ssm_cfg={"layer": "Mamba2", "ngroups": raw.get("n_groups", 1)},
            extra={"codestral": rest} if rest else {},
            **{name: raw[name] for name in _SAME if name in raw},
        )

    def write_config(self, config: MambaLMConfig, dtype: torch.dtype) -> dict[str, Any]:
        """Invert `read_config`, for models that the format can hold."""
        check_fixed_fields("the Codestral format", config, {"layer": "Mamba2", "d_intermediate": 0})
        free = INITIALIZATION_FIELDS | {"d_model", "ngroups"}
        defaults = {f.name: f.default for f in dataclasses.fields(config.family.CONFIG) if f.name not in free}
        check_fixed_fields("the Codestral format", config, defaults)
        return {
            "dim": config.d_model,
            "n_layers": config.n_layer,
            "n_groups": config.block_config().ngroups,
            **{name: getattr(config, name) for name in _SAME},
            "model_type": "mamba",
            **config.extra.get("codestral", {}),
        }

    def our_key(self, key: str) -> str:
        """Return the name without the prefix."""
        return key.removeprefix(_PREFIX)

    def foreign_key(self, key: str) -> str:
        """Return the name with the prefix."""
        return _PREFIX + key
