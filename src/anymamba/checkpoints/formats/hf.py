"""The format of `transformers` (`MambaForCausalLM`, `Mamba2ForCausalLM`, `FalconMambaForCausalLM`).

It has its own config fields and names, and its vocabulary size includes the padding. With more than one group, it
normalized over all channels at once before version 5.23, where the official block does so group by group; we compute
what the weights were trained for, the official way.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, NamedTuple

import torch

from anymamba.checkpoints.formats.base import Format, check_fixed_fields, read_float
from anymamba.models.config import MambaLMConfig

# Name in transformers, our name, and the default in transformers.
_Field = tuple[str, str, Any]


class _Kind(NamedTuple):
    """A `model_type` of transformers."""

    layer: str  # our block family
    architecture: str  # its class
    model: tuple[_Field, ...]
    block: tuple[_Field, ...]
    fixed: dict[str, Any]  # fields of the file with the only values that transformers computes with
    block_fixed: dict[str, Any]  # fields of our block with the only values that transformers knows
    implied: dict[str, Any] = {}  # noqa: RUF012 (fields of our block that follow from the model type; never changed)


def _model_fields(width: int, layers: int, vocabulary: int, tied: bool) -> tuple[_Field, ...]:
    return (
        ("hidden_size", "d_model", width),
        ("num_hidden_layers", "n_layer", layers),
        ("vocab_size", "vocab_size", vocabulary),
        ("residual_in_fp32", "residual_in_fp32", True),
        ("tie_word_embeddings", "tie_embeddings", tied),
    )


_BLOCK_FIELDS: tuple[_Field, ...] = (
    ("expand", "expand", 2),
    ("conv_kernel", "d_conv", 4),
    ("use_bias", "bias", False),
    ("use_conv_bias", "conv_bias", True),
    ("time_step_min", "dt_min", 0.001),
    ("time_step_max", "dt_max", 0.1),
    ("time_step_floor", "dt_init_floor", 1e-4),
)
_FIXED = {"layer_norm_epsilon": 1e-5, "hidden_act": "silu"}
MAMBA1_FIELDS: tuple[_Field, ...] = (
    ("state_size", "d_state", 16),
    ("time_step_rank", "dt_rank", "auto"),
    ("time_step_scale", "dt_scale", 1.0),
    ("time_step_init_scheme", "dt_init", "random"),
    *_BLOCK_FIELDS,
)
_KINDS = {
    "mamba": _Kind(
        "Mamba1",
        "MambaForCausalLM",
        _model_fields(768, 32, 50280, tied=True),
        MAMBA1_FIELDS,
        _FIXED,
        {"inner_norms": "none"},
    ),
    "falcon_mamba": _Kind(
        "Mamba1",
        "FalconMambaForCausalLM",
        _model_fields(768, 32, 50280, tied=True),
        (*MAMBA1_FIELDS, ("mixer_rms_eps", "inner_norm_eps", 1e-6)),
        _FIXED,
        {"inner_norms": "plain"},
        {"inner_norms": "plain"},
    ),
    "mamba2": _Kind(
        "Mamba2",
        "Mamba2ForCausalLM",
        _model_fields(4096, 64, 32768, tied=False),
        (("state_size", "d_state", 128), ("head_dim", "headdim", 64), ("n_groups", "ngroups", 8), *_BLOCK_FIELDS),
        # norm_before_gate is ignored: transformers always gates first, although published configs say true.
        {**_FIXED, "rms_norm": True},
        {
            "d_ssm": None,
            "D_has_hdim": False,
            "rmsnorm": True,
            "norm_before_gate": False,
            "learnable_init_states": False,
            "norm_eps": 1e-5,
        },
    ),
}


def _warn_of_groups(groups: int) -> None:
    warnings.warn(
        f"transformers before 5.23 normalizes over all channels where the official block does so in {groups} groups, "
        "as we do, so its outputs differ for these weights",
        stacklevel=3,
    )


class TransformersFormat(Format):
    """The format of `MambaForCausalLM`, `Mamba2ForCausalLM` and `FalconMambaForCausalLM`."""

    name: ClassVar[str] = "transformers"
    config_files: ClassVar[tuple[str, ...]] = ("config.json",)
    weight_files: ClassVar[tuple[str, ...]] = ("model.safetensors", "pytorch_model.bin")

    def recognizes(self, raw: dict[str, Any]) -> bool:
        """Return whether the config has the fields `model_type` and `hidden_size`."""
        return "model_type" in raw and "hidden_size" in raw

    def read_config(self, raw: dict[str, Any]) -> MambaLMConfig:
        """Return our config; fields without a counterpart are kept for writing."""
        if (model_type := raw["model_type"]) not in _KINDS:
            expected = " or ".join(f'"{name}"' for name in (*_KINDS, "bamba", "granitemoehybrid"))
            raise ValueError(f'expected a transformers config with "model_type": {expected}, got {model_type!r}')
        kind = _KINDS[model_type]
        for name, value in kind.fixed.items():
            if raw.get(name, value) != value:
                raise ValueError(f"a transformers {model_type} model must have {name} = {value!r}, got {raw[name]!r}")
        block = {**kind.implied, **{ours: raw.get(theirs, default) for theirs, ours, default in kind.block}}
        used = {theirs for theirs, _, _ in (*kind.model, *kind.block)}
        if kind.layer == "Mamba2":
            block["dt_limit"] = tuple(float(read_float(x)) for x in raw.get("time_step_limit", [0.0, "Infinity"]))
            if "chunk_size" in raw:
                block["chunk_size"] = raw["chunk_size"]
            used |= {"time_step_limit", "chunk_size"}
        sizes: dict[str, Any] = {ours: raw.get(theirs, default) for theirs, ours, default in kind.model}
        config = MambaLMConfig(
            **sizes,
            ssm_cfg={"layer": kind.layer, **block},
            pad_vocab_size_multiple=1,
            extra={"transformers": {name: value for name, value in raw.items() if name not in used}},
        )
        block_config = config.block_config()
        if kind.layer == "Mamba2":
            if block_config.ngroups > 1:
                _warn_of_groups(block_config.ngroups)
            if raw.get("num_heads", block_config.nheads) != block_config.nheads:
                raise ValueError(
                    f"num_heads must be expand · hidden_size / head_dim = {block_config.nheads}, got {raw['num_heads']}"
                )
        elif raw.get("intermediate_size", block_config.d_inner) != block_config.d_inner:
            raise ValueError(
                f"intermediate_size must be expand · hidden_size = {block_config.d_inner}, "
                f"got {raw['intermediate_size']}"
            )
        return config

    def write_config(self, config: MambaLMConfig, dtype: torch.dtype) -> dict[str, Any]:
        """Invert `read_config`, for models that transformers can compute."""
        where = "the transformers format"
        names = {kind.layer: name for name, kind in _KINDS.items() if not kind.implied}
        if config.layer not in names:
            raise ValueError(f"{where} cannot hold this model: it knows {', '.join(names)} blocks, got {config.layer}")
        block, name = config.block_config(), names[config.layer]
        for other, kind in _KINDS.items():
            has_implied = kind.layer == config.layer and all(getattr(block, k) == v for k, v in kind.implied.items())
            if kind.implied and has_implied:
                name = other
        kind = _KINDS[name]
        fixed = {"d_intermediate": 0, "rms_norm": True, **kind.block_fixed, "expand": int(block.expand)}
        check_fixed_fields(where, config, fixed)
        derived: dict[str, Any]
        if kind.layer == "Mamba1":
            derived = {"intermediate_size": block.d_inner, "time_step_rank": block.dt_width}
        else:
            if block.ngroups > 1:
                _warn_of_groups(block.ngroups)
            derived = {
                "num_heads": block.nheads,
                "time_step_limit": list(block.dt_limit),
                "chunk_size": config.ssm_cfg.get("chunk_size") or 256,
            }
        raw = {
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **config.extra.get("transformers", {}),
            "architectures": [kind.architecture],
            "model_type": name,
            "dtype": str(dtype).removeprefix("torch."),
            **{theirs: getattr(config, ours) for theirs, ours, _ in kind.model},
            **{theirs: getattr(block, ours) for theirs, ours, _ in kind.block},
            **_FIXED,
            "expand": int(block.expand),
            "vocab_size": config.padded_vocab_size,
            **derived,
        }
        return dict(sorted(raw.items()))

    def our_key(self, key: str) -> str:
        """Return our name: `backbone.embeddings` becomes `backbone.embedding`."""
        return key.replace("backbone.embeddings.", "backbone.embedding.", 1)

    def foreign_key(self, key: str) -> str:
        """Invert `our_key`."""
        return key.replace("backbone.embedding.", "backbone.embeddings.", 1)
