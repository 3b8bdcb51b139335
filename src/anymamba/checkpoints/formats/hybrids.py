"""The formats of transformers' hybrid models: Bamba, and Granite 4 H without experts (`GraniteMoeHybridForCausalLM`).

Layers are Mamba-2 or attention, each with a gated MLP. Queries, keys and values are stored apart, and so are Bamba's
gates and values. The residual stream is float32 here, where transformers' has the dtype of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from anymamba.checkpoints.formats.base import Format, read_float
from anymamba.models.config import MambaLMConfig
from anymamba.models.stack.stack_config import StackConfig

_MAMBA_TYPES = ("mamba", "linear_attention")  # names of layer types: in published files, and in transformers 5
_ATTENTION_TYPES = ("attention", "full_attention")
_LAYER = re.compile(r"(backbone|model)\.layers\.(\d+)\.(.+)")
# Fields of the config: name in transformers, our name, and the default in transformers.
_MODEL = (
    ("hidden_size", "d_model", 4096),
    ("num_hidden_layers", "n_layer", 32),
    ("tie_word_embeddings", "tie_embeddings", False),
)
_BLOCK = (
    ("mamba_d_state", "d_state", 256),
    ("mamba_n_groups", "ngroups", 1),
    ("mamba_d_conv", "d_conv", 4),
    ("mamba_expand", "expand", 2),
    ("mamba_conv_bias", "conv_bias", True),
    ("mamba_proj_bias", "bias", False),
)
_FIXED = {"hidden_act": "silu", "attention_dropout": 0.0}
_BLOCK_FIXED = {
    "d_ssm": None,
    "D_has_hdim": False,
    "rmsnorm": True,
    "norm_before_gate": False,
    "learnable_init_states": False,
}
_ATTENTION_FIXED = {
    "mlp_dim": 0,
    "d_conv": 0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale": 1.0,
    "window": None,
    "softcap": None,
}
_MULTIPLIERS = ("input_multiplier", "residual_multiplier", "output_multiplier")


class HybridFormat(Format):
    """What the formats share; a subclass adds its names, defaults and MLP.

    Attributes:
        MODEL_TYPE: The `model_type` of its configs.
        ARCHITECTURE: Its class in transformers.
        DEFAULTS: Defaults of fields that differ between the formats.
        NAMES: Names of tensors outside the layers, by ours.
        LAYER_NAMES: Names of tensors of a layer, by ours without those of its block.
        MLP: `mlp_cfg` of its models, without the bias.
    """

    MODEL_TYPE: ClassVar[str]
    ARCHITECTURE: ClassVar[str]
    DEFAULTS: ClassVar[dict[str, Any]]
    NAMES: ClassVar[dict[str, str]]
    LAYER_NAMES: ClassVar[dict[str, str]]
    MLP: ClassVar[dict[str, Any]]
    config_files: ClassVar[tuple[str, ...]] = ("config.json",)
    weight_files: ClassVar[tuple[str, ...]] = ("model.safetensors", "pytorch_model.bin")

    def recognizes(self, raw: dict[str, Any]) -> bool:
        """Return whether the config has this model type."""
        return raw.get("model_type") == self.MODEL_TYPE

    # Config

    def read_config(self, raw: dict[str, Any]) -> MambaLMConfig:
        """Return our config; fields without a counterpart are kept for writing."""
        fields = {**self.DEFAULTS, **{name: default for name, _, default in (*_MODEL, *_BLOCK)}, **raw}
        self._check_fixed(raw)
        heads = fields["mamba_n_heads"]
        width = int(fields["mamba_expand"] * fields["hidden_size"])
        headdim = width // heads if fields["mamba_d_head"] == "auto" else fields["mamba_d_head"]
        if heads * headdim != width:
            raise ValueError(
                f"mamba_n_heads · mamba_d_head must be mamba_expand · hidden_size = {width}, got {heads} · {headdim}"
            )
        limits = [float(read_float(x)) for x in fields["time_step_limit"]]
        eps = fields["rms_norm_eps"]
        block = {ours: fields[theirs] for theirs, ours, _ in _BLOCK}
        stack, used = self._read_stack(fields)
        used |= {theirs for theirs, _, _ in (*_MODEL, *_BLOCK)} | {"vocab_size", "rms_norm_eps", "time_step_limit"}
        used |= {"mamba_n_heads", "mamba_d_head", "num_attention_heads", "num_key_value_heads", "attention_bias"}
        return MambaLMConfig(
            **{ours: fields[theirs] for theirs, ours, _ in _MODEL},
            vocab_size=fields["vocab_size"],
            d_intermediate=self._mlp_width(fields),
            ssm_cfg={"layer": "Mamba2", **block, "headdim": headdim, "dt_limit": limits, "norm_eps": eps},
            attn_layer_idx=self._attention_layers(fields),
            attn_cfg=self._read_attention(fields),
            pad_vocab_size_multiple=1,
            stack={"norm_eps": eps, **stack},
            extra={self.name: {name: value for name, value in raw.items() if name not in used}},
        )

    def write_config(self, config: MambaLMConfig, dtype: torch.dtype) -> dict[str, Any]:
        """Invert `read_config`, for models that transformers can compute."""
        self._check_stack(config)
        block, attention = config.block_config(), config.attention_config()
        raw = {
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **config.extra.get(self.name, {}),
            "architectures": [self.ARCHITECTURE],
            "model_type": self.MODEL_TYPE,
            "dtype": str(dtype).removeprefix("torch."),
            **{theirs: getattr(config, ours) for theirs, ours, _ in _MODEL},
            **{theirs: getattr(block, ours) for theirs, ours, _ in _BLOCK},
            "vocab_size": config.padded_vocab_size,
            "mamba_expand": int(block.expand),
            "mamba_n_heads": block.nheads,
            "mamba_d_head": block.headdim,
            "time_step_limit": list(block.dt_limit),
            "rms_norm_eps": block.norm_eps,
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.kv_heads,
            "attention_bias": attention.qkv_proj_bias,
            **self._write_fields(config),
        }
        return dict(sorted(raw.items()))

    def _check_fixed(self, raw: dict[str, Any]) -> None:
        for name, value in _FIXED.items():
            if raw.get(name, value) != value:
                raise ValueError(f"a {self.MODEL_TYPE} model must have {name} = {value!r}, got {raw[name]!r}")

    def _check_stack(self, config: MambaLMConfig) -> None:
        """Raise `ValueError` for a model that the format cannot hold."""
        where, stack = f"the {self.name} format cannot hold this model: it needs", config.stack_config()
        if config.layer != "Mamba2" or not config.attn_layer_idx:
            raise ValueError(f"{where} Mamba2 and attention layers, got {stack.layer}")
        width = config.d_model // config.attention_config().num_heads
        required = StackConfig(
            **{name: getattr(stack, name) for name in ("d_model", "n_layer", "ssm_cfg", "layer_cfgs", "norm_eps")},
            **{name: getattr(stack, name) for name in (*_MULTIPLIERS, "d_intermediate", "residual_in_fp32")},
            mlp_cfg={**stack.mlp_cfg, **self.MLP},
            checkpointing=stack.checkpointing,
        )
        parts: list[tuple[Any, Mapping[str, Any]]] = [
            (stack, required.to_dict()),
            (
                config.block_config(),
                {**_BLOCK_FIXED, "norm_eps": stack.norm_eps, "expand": int(config.block_config().expand)},
            ),
            (config.attention_config(), {**_ATTENTION_FIXED, "head_width": width}),
        ]
        for part, fixed in parts:
            for name, value in fixed.items():
                if (actual := getattr(part, name)) != value:
                    raise ValueError(f"{where} {name} = {value!r} of its {type(part).__name__}, got {actual!r}")
        attention = config.attention_config()
        if attention.qkv_proj_bias != attention.out_proj_bias:
            raise ValueError(f"{where} biases on all projections of attention or on none")

    def _attention_layers(self, fields: dict[str, Any]) -> list[int]:
        """Return the indices of the attention layers."""
        raise NotImplementedError

    def _read_attention(self, fields: dict[str, Any]) -> dict[str, Any]:
        bias = fields["attention_bias"]
        return {
            "num_heads": fields["num_attention_heads"],
            "num_heads_kv": fields["num_key_value_heads"],
            "qkv_proj_bias": bias,
            "out_proj_bias": bias,
        }

    def _read_rotation(self, fields: dict[str, Any], fraction: float) -> dict[str, Any]:
        """Return our fields of rotary positions; raise `ValueError` for a kind of them that we do not compute."""
        parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in ("default", "linear"):
            raise ValueError(f"rope_type must be default or linear to be read, got {kind!r}")
        theta = parameters.get("rope_theta", fields.get("rope_theta", 10000.0))
        width = fields["hidden_size"] // fields["num_attention_heads"]
        scale = float(parameters.get("factor", 1.0)) if kind == "linear" else 1.0
        return {
            "rotary_emb_dim": int(width * fraction),
            "rotary_emb_base": float(theta),
            **({"rotary_emb_scale": scale} if scale != 1 else {}),
        }

    def _read_stack(self, fields: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
        """Return our fields of the stack, and the names of the fields that were used."""
        raise NotImplementedError

    def _mlp_width(self, fields: dict[str, Any]) -> int:
        raise NotImplementedError

    def _write_fields(self, config: MambaLMConfig) -> dict[str, Any]:
        """Return the fields that the formats do not share."""
        raise NotImplementedError

    # Tensors

    def stored_parts(self, config: MambaLMConfig, name: str, rows: int) -> dict[str, int]:
        """Return the parts that attention's projections, and Bamba's gates and values, are stored as."""
        match = _LAYER.fullmatch(name)
        if match is None:
            return {}
        layer, rest = int(match[2]), match[3]
        module = rest.rpartition(".")[0]
        if layer in config.attn_layer_idx:
            attention = config.attention_config()
            kv_rows = attention.kv_heads * attention.head_width
            if module == "mixer.in_proj":
                return {"q": rows - 2 * kv_rows, "k": kv_rows, "v": kv_rows}
            if module == "mixer.out_proj":  # one part, which tells it from that of Mamba-2
                return {"o": rows}
        return {}

    def our_key(self, key: str) -> str:
        """Return our name: `self_attn.q_proj.weight` becomes the part `mixer.in_proj.weight[q]`."""
        for ours, theirs in self.NAMES.items():
            if key == theirs:
                return ours
        if (match := _LAYER.fullmatch(key)) is None or match[1] != "model":
            return key
        layer, rest = match[2], match[3]
        module, _, kind = rest.rpartition(".")
        if module in self._our_modules():
            name, part = self._our_modules()[module]
            return f"backbone.layers.{layer}.{name}.{kind}{f'[{part}]' if part else ''}"
        if rest.startswith("mamba."):
            return f"backbone.layers.{layer}.mixer.{rest.removeprefix('mamba.')}"
        return key

    def foreign_key(self, key: str) -> str:
        """Invert `our_key`."""
        if key in self.NAMES:
            return self.NAMES[key]
        name, _, part = key.removesuffix("]").partition("[")
        if (match := _LAYER.fullmatch(name)) is None or match[1] != "backbone":
            return key
        module, _, kind = match[3].rpartition(".")
        for theirs, ours in self._our_modules().items():
            if ours == (module, part):
                return f"model.layers.{match[2]}.{theirs}.{kind}"
        return f"model.layers.{match[2]}.mamba.{match[3].removeprefix('mixer.')}"

    def _our_modules(self) -> dict[str, tuple[str, str]]:
        """Return our module, and the part of it, of each of theirs within a layer."""
        attention = {f"self_attn.{part}_proj": ("mixer.in_proj", part) for part in ("q", "k", "v")}
        attention["self_attn.o_proj"] = ("mixer.out_proj", "o")
        return {**attention, **{theirs: (ours, "") for ours, theirs in self.LAYER_NAMES.items()}}


class BambaFormat(HybridFormat):
    """The format of `BambaForCausalLM`."""

    name: ClassVar[str] = "bamba"
    MODEL_TYPE = "bamba"
    ARCHITECTURE = "BambaForCausalLM"
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "vocab_size": 128000,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "attn_layer_indices": None,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "time_step_limit": (0.0, float("inf")),
        "mlp_bias": False,
    }
    NAMES: ClassVar[dict[str, str]] = {
        "backbone.embedding.weight": "model.embed_tokens.weight",
        "backbone.norm_f.weight": "model.final_layernorm.weight",
    }
    LAYER_NAMES: ClassVar[dict[str, str]] = {
        "norm": "input_layernorm",
        "norm2": "pre_ff_layernorm",
        "mlp.fc2": "feed_forward.down_proj",
    }
    MLP: ClassVar[dict[str, Any]] = {"multiple_of": 1, "gate_first": True}

    def _attention_layers(self, fields: dict[str, Any]) -> list[int]:
        return list(fields["attn_layer_indices"] or [])

    def _read_attention(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {**super()._read_attention(fields), **self._read_rotation(fields, 0.5)}

    def _mlp_width(self, fields: dict[str, Any]) -> int:
        return int(fields["intermediate_size"])

    def _read_stack(self, fields: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
        used = {"attn_layer_indices", "intermediate_size", "mlp_bias", "rope_parameters", "rope_theta", "rope_scaling"}
        return {"mlp_cfg": {**self.MLP, "bias": fields["mlp_bias"]}}, used

    def _check_stack(self, config: MambaLMConfig) -> None:
        super()._check_stack(config)
        stack, attention = config.stack_config(), config.attention_config()
        fixed = {**dict.fromkeys(_MULTIPLIERS, 1.0), "softmax_scale": None, "rotary_emb_dim": attention.head_width // 2}
        for name, value in fixed.items():
            if (actual := getattr(stack, name, getattr(attention, name, None))) != value:
                raise ValueError(f"the bamba format cannot hold this model: it needs {name} = {value}, got {actual}")

    def _write_fields(self, config: MambaLMConfig) -> dict[str, Any]:
        return {
            "attn_layer_indices": list(config.attn_layer_idx),
            "intermediate_size": config.d_intermediate,
            "mlp_bias": config.stack_config().mlp_config().bias,
            "rope_parameters": _write_rotation(config) | {"partial_rotary_factor": 0.5},
        }

    def stored_parts(self, config: MambaLMConfig, name: str, rows: int) -> dict[str, int]:
        """Return the parts of attention's projections, and of the MLP's gates and values."""
        if ".mlp.fc1." in name:
            return {"gate": rows // 2, "up": rows // 2}
        return super().stored_parts(config, name, rows)

    def _our_modules(self) -> dict[str, tuple[str, str]]:
        parts = {f"feed_forward.{part}_proj": ("mlp.fc1", part) for part in ("gate", "up")}
        return {**super()._our_modules(), **parts}


class GraniteFormat(HybridFormat):
    """The format of `GraniteMoeHybridForCausalLM`, for models without experts."""

    name: ClassVar[str] = "granitemoehybrid"
    MODEL_TYPE = "granitemoehybrid"
    ARCHITECTURE = "GraniteMoeHybridForCausalLM"
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "vocab_size": 32000,
        "shared_intermediate_size": 1024,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "time_step_limit": (0.0, float("inf")),
        "num_local_experts": 8,
        "position_embedding_type": None,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "attention_multiplier": 1.0,
    }
    NAMES: ClassVar[dict[str, str]] = {
        "backbone.embedding.weight": "model.embed_tokens.weight",
        "backbone.norm_f.weight": "model.norm.weight",
    }
    LAYER_NAMES: ClassVar[dict[str, str]] = {
        "norm": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "mlp.fc1": "shared_mlp.input_linear",
        "mlp.fc2": "shared_mlp.output_linear",
    }
    MLP: ClassVar[dict[str, Any]] = {"multiple_of": 1, "gate_first": True}

    def _check_fixed(self, raw: dict[str, Any]) -> None:
        super()._check_fixed(raw)
        if experts := raw.get("num_local_experts", self.DEFAULTS["num_local_experts"]):
            raise ValueError(f"models with experts are not supported: num_local_experts must be 0, got {experts}")

    def _attention_layers(self, fields: dict[str, Any]) -> list[int]:
        types = fields.get("layer_types") or fields.get("layers_block_type") or ["mamba"] * fields["num_hidden_layers"]
        if unknown := [kind for kind in types if kind not in _MAMBA_TYPES + _ATTENTION_TYPES]:
            raise ValueError(f"layer_types must be among {(*_MAMBA_TYPES, *_ATTENTION_TYPES)}, got {unknown[0]!r}")
        if len(types) != fields["num_hidden_layers"]:
            raise ValueError(f"layer_types must have {fields['num_hidden_layers']} entries, got {len(types)}")
        return [i for i, kind in enumerate(types) if kind in _ATTENTION_TYPES]

    def _read_attention(self, fields: dict[str, Any]) -> dict[str, Any]:
        if (kind := fields["position_embedding_type"]) not in (None, "nope", "rope"):
            raise ValueError(f'position_embedding_type must be None, "nope" or "rope", got {kind!r}')
        rotation = self._read_rotation(fields, 1.0) if kind == "rope" else {}
        return {**super()._read_attention(fields), "softmax_scale": fields["attention_multiplier"], **rotation}

    def _mlp_width(self, fields: dict[str, Any]) -> int:
        return int(fields["shared_intermediate_size"])

    def _read_stack(self, fields: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
        stack = {
            "mlp_cfg": dict(self.MLP),
            "input_multiplier": float(fields["embedding_multiplier"]),
            "residual_multiplier": float(fields["residual_multiplier"]),
            "output_multiplier": 1 / fields["logits_scaling"],
        }
        used = {"layer_types", "layers_block_type", "shared_intermediate_size", "position_embedding_type"}
        used |= {"embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"}
        return stack, used | {"num_local_experts", "rope_parameters", "rope_theta", "rope_scaling"}

    def _check_stack(self, config: MambaLMConfig) -> None:
        super()._check_stack(config)
        attention = config.attention_config()
        if attention.rotary_emb_dim not in (0, attention.head_width):
            raise ValueError(
                "the granitemoehybrid format cannot hold this model: it needs rotary_emb_dim = 0 or "
                f"{attention.head_width}, got {attention.rotary_emb_dim}"
            )

    def _write_fields(self, config: MambaLMConfig) -> dict[str, Any]:
        stack, attention = config.stack_config(), config.attention_config()
        types = {True: "attention", False: "mamba"}
        is_rotary = bool(attention.rotary_emb_dim)
        scale = attention.head_width**-0.5 if attention.softmax_scale is None else attention.softmax_scale
        return {
            "layer_types": [types[i in config.attn_layer_idx] for i in range(config.n_layer)],
            "shared_intermediate_size": config.d_intermediate,
            "position_embedding_type": "rope" if is_rotary else "nope",
            "embedding_multiplier": stack.input_multiplier,
            "residual_multiplier": stack.residual_multiplier,
            "logits_scaling": round(1 / stack.output_multiplier, 9),
            "attention_multiplier": scale,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            **({"rope_parameters": _write_rotation(config)} if is_rotary else {}),
        }


def _write_rotation(config: MambaLMConfig) -> dict[str, Any]:
    attention = config.attention_config()
    kind = {"rope_theta": attention.rotary_emb_base}
    if attention.rotary_emb_scale != 1:
        return {**kind, "rope_type": "linear", "factor": attention.rotary_emb_scale}
    return {**kind, "rope_type": "default"}
