"""The format of `fla` (flash-linear-attention): `mamba`, `mamba2` and `mamba3` models; read only.

Its files and names of tensors are those of transformers; its configs have other fields and defaults. Its Mamba-3 uses
softplus.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from anymamba.checkpoints.formats.base import read_float
from anymamba.checkpoints.formats.hf import MAMBA1_FIELDS, TransformersFormat
from anymamba.models.config import MambaLMConfig

# Name in fla, our name, and the default in fla.
_MODEL = (
    ("hidden_size", "d_model", 2048),
    ("num_hidden_layers", "n_layer", 48),
    ("vocab_size", "vocab_size", 32000),
    ("tie_word_embeddings", "tie_embeddings", False),
)
_SHARED = (("expand", "expand", 2), ("use_bias", "bias", False))
_STEPS = (("dt_min", "dt_min", 0.001), ("dt_max", "dt_max", 0.1), ("dt_init_floor", "dt_init_floor", 1e-4))
_HEADS = (("state_size", "d_state", 128), ("head_dim", "headdim", 64), ("n_groups", "ngroups", 1))
_BLOCKS: dict[str, tuple[str, tuple[tuple[str, str, Any], ...]]] = {
    "mamba": ("Mamba1", MAMBA1_FIELDS),
    "mamba2": (
        "Mamba2",
        (
            *_HEADS,
            *_SHARED,
            *_STEPS,
            ("conv_kernel", "d_conv", 4),
            ("use_conv_bias", "conv_bias", True),
            ("D_has_hdim", "D_has_hdim", False),
            ("rmsnorm", "rmsnorm", True),
            ("norm_before_gate", "norm_before_gate", False),
        ),
    ),
    "mamba3": (
        "Mamba3",
        (
            *_HEADS,
            *_SHARED,
            *_STEPS,
            ("rope_fraction", "rope_fraction", 0.5),
            ("A_floor", "A_floor", 1e-4),
            ("is_outproj_norm", "is_outproj_norm", False),
            ("is_mimo", "is_mimo", False),
            ("mimo_rank", "mimo_rank", 4),
        ),
    ),
}
_RESIDUAL_IN_FP32 = {"mamba": False, "mamba2": True, "mamba3": True}  # the defaults
_FIXED = {"norm_eps": 1e-5, "hidden_act": "silu"}


class FlaFormat(TransformersFormat):
    """The format of fla's `MambaForCausalLM`, `Mamba2ForCausalLM` and `Mamba3ForCausalLM`."""

    name: ClassVar[str] = "fla"

    def recognizes(self, raw: dict[str, Any]) -> bool:
        """Return whether there is a field `norm_eps`, which transformers names differently, or the type is `mamba3`."""
        kind = raw.get("model_type")
        return "hidden_size" in raw and (kind == "mamba3" or (kind in ("mamba", "mamba2") and "norm_eps" in raw))

    def read_config(self, raw: dict[str, Any]) -> MambaLMConfig:
        """Return our config; fields without a counterpart are kept."""
        kind = raw["model_type"]
        for name, value in _FIXED.items():
            if raw.get(name, value) != value:
                raise ValueError(f"a {kind} model of fla must have {name} = {value!r}, got {raw[name]!r}")
        layer, fields = _BLOCKS[kind]
        block = {ours: raw.get(theirs, default) for theirs, ours, default in fields}
        if kind == "mamba2":
            if block["ngroups"] != 1:
                raise ValueError(f"a mamba2 model of fla must have n_groups = 1 to be read, got {block['ngroups']}")
            block["dt_limit"] = [float(read_float(x)) for x in raw.get("dt_limit", [0.0, "Infinity"])]
        elif kind == "mamba3":
            block["a_activation"] = "softplus"
        used = {theirs for theirs, _, _ in (*_MODEL, *fields)} | {"residual_in_fp32", "dt_limit"}
        return MambaLMConfig(
            **{ours: raw.get(theirs, default) for theirs, ours, default in _MODEL},
            ssm_cfg={"layer": layer, **block},
            residual_in_fp32=raw.get("residual_in_fp32", _RESIDUAL_IN_FP32[kind]),
            pad_vocab_size_multiple=1,
            extra={"fla": {name: value for name, value in raw.items() if name not in used}},
        )

    def write_config(self, config: MambaLMConfig, dtype: torch.dtype) -> dict[str, Any]:
        """Raise `ValueError`: the format can only be read."""
        raise ValueError("the fla format can be read but not written; pass official or transformers")
