"""The format of `transformers` (`Mamba2ForCausalLM`): its own config fields, and `embeddings` for `embedding`.

Its vocabulary is counted with the padding. With more than one group, transformers normalises over all channels at once
where the official block does so group by group; we compute what the weights were trained for, the official way.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch

from anymamba.models.config import MambaLMConfig
from anymamba.models.formats.base import read_float, require

# transformers' field, ours, and the value that transformers takes where the file is silent.
_MODEL_FIELDS = (
    ("hidden_size", "d_model", 4096),
    ("num_hidden_layers", "n_layer", 64),
    ("vocab_size", "vocab_size", 32768),
    ("residual_in_fp32", "residual_in_fp32", True),
    ("tie_word_embeddings", "tie_embeddings", False),
)
_BLOCK_FIELDS = (
    ("state_size", "d_state", 128),
    ("head_dim", "headdim", 64),
    ("expand", "expand", 2),
    ("conv_kernel", "d_conv", 4),
    ("n_groups", "ngroups", 8),
    ("use_bias", "bias", False),
    ("use_conv_bias", "conv_bias", True),
    ("time_step_min", "dt_min", 0.001),
    ("time_step_max", "dt_max", 0.1),
    ("time_step_floor", "dt_init_floor", 1e-4),
)
# Not norm_before_gate: transformers gates first whatever it says, and published configs say true.
_FIXED = {"layer_norm_epsilon": 1e-5, "hidden_act": "silu", "rms_norm": True}
_BLOCK_FIXED = {
    "d_ssm": None,
    "D_has_hdim": False,
    "rmsnorm": True,
    "norm_before_gate": False,
    "learnable_init_states": False,
}


def _warn_of_groups(groups: int) -> None:
    warnings.warn(
        f"transformers normalises over all channels where the official block does so in {groups} groups, as we do: it "
        "computes something else with these weights",
        stacklevel=3,
    )


class TransformersFormat:
    """config.json of `Mamba2ForCausalLM`."""

    name: ClassVar[str] = "transformers"
    config_files: ClassVar[tuple[str, ...]] = ("config.json",)
    weight_files: ClassVar[tuple[str, ...]] = ("model.safetensors", "pytorch_model.bin")

    def recognises(self, raw: dict[str, Any]) -> bool:
        """By its field `hidden_size`."""
        return "model_type" in raw and "hidden_size" in raw

    def read_config(self, raw: dict[str, Any]) -> MambaLMConfig:
        """Translate the fields; those without a counterpart are kept for writing."""
        if (model_type := raw["model_type"]) in ("mamba", "falcon_mamba"):
            raise ValueError("Mamba-1 models are not supported yet, only Mamba-2 in the transformers format")
        if model_type != "mamba2":
            raise ValueError(f'expected a transformers config with "model_type": "mamba2", got {model_type!r}')
        for name, value in _FIXED.items():
            if raw.get(name, value) != value:
                raise ValueError(f"a transformers Mamba-2 model must have {name} = {value!r}, got {raw[name]!r}")
        block = {ours: raw.get(theirs, default) for theirs, ours, default in _BLOCK_FIELDS}
        limits = raw.get("time_step_limit", [0.0, "Infinity"])
        block["dt_limit"] = tuple(float(read_float(x)) for x in limits)
        if "chunk_size" in raw:
            block["chunk_size"] = raw["chunk_size"]
        used = {theirs for theirs, _, _ in (*_MODEL_FIELDS, *_BLOCK_FIELDS)} | {"time_step_limit", "chunk_size"}
        config = MambaLMConfig(
            **{ours: raw.get(theirs, default) for theirs, ours, default in _MODEL_FIELDS},
            ssm_cfg={"layer": "Mamba2", **block},
            pad_vocab_size_multiple=1,
            extra={"transformers": {name: value for name, value in raw.items() if name not in used}},
        )
        if (groups := config.block_config().ngroups) > 1:
            _warn_of_groups(groups)
        heads = config.block_config().nheads
        if raw.get("num_heads", heads) != heads:
            raise ValueError(f"num_heads must be expand · hidden_size / head_dim = {heads}, got {raw['num_heads']}")
        return config

    def write_config(self, config: MambaLMConfig, dtype: torch.dtype) -> dict[str, Any]:
        """The inverse of `read_config`, for models that transformers can compute."""
        require("the transformers format", config, {"layer": "Mamba2", "d_intermediate": 0, "rms_norm": True})
        block = config.block_config()
        require("the transformers format", config, {**_BLOCK_FIXED, "expand": int(block.expand)})
        if block.ngroups > 1:
            _warn_of_groups(block.ngroups)
        silent = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        raw = {
            **silent,
            **config.extra.get("transformers", {}),
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "dtype": str(dtype).removeprefix("torch."),
            **{theirs: getattr(config, ours) for theirs, ours, _ in _MODEL_FIELDS},
            **{theirs: getattr(block, ours) for theirs, ours, _ in _BLOCK_FIELDS},
            "layer_norm_epsilon": _FIXED["layer_norm_epsilon"],
            "hidden_act": _FIXED["hidden_act"],
            "expand": int(block.expand),
            "vocab_size": config.padded_vocab_size,
            "num_heads": block.nheads,
            "time_step_limit": list(block.dt_limit),
            "chunk_size": config.ssm_cfg.get("chunk_size") or 256,
        }
        return dict(sorted(raw.items()))

    def our_key(self, key: str) -> str:
        """`backbone.embeddings` is our `backbone.embedding`."""
        return key.replace("backbone.embeddings.", "backbone.embedding.", 1)

    def their_key(self, key: str) -> str:
        """The inverse of `our_key`."""
        return key.replace("backbone.embedding.", "backbone.embeddings.", 1)
