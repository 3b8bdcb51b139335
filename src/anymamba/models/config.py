"""The configuration of a language model: the official fields, those of its stack, and unknown fields of its file.

A file may not record the activation of Mamba-3's decay rates: the official block used softplus until June 2026 and has
used a heavy tail since, with the same names and shapes. A file that does not name the activation is read as the newer
kind, and its config is marked as ambiguous until the user chooses, or sample texts decide
(`anymamba.generation.detect_activation`).
"""

from __future__ import annotations

import copy
import dataclasses
import reprlib
import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from anymamba.blocks.base import Block
from anymamba.models.families import FAMILIES, family_name, get_family, make_block_config, our_name, suggest_field
from anymamba.models.stack.stack_config import MODEL_FIELDS, StackConfig, check_numbers

# Fields of a block that only affect its initial parameters, and so are not part of a trained model.
INITIALIZATION_FIELDS = frozenset(
    {"dt_min", "dt_max", "dt_init", "dt_init_floor", "dt_scale", "A_init_range", "conv_init"}
)

ACTIVATION_FIELD = "a_activation"
ACTIVATIONS = ("heavy_tail", "softplus")
AMBIGUOUS_ACTIVATION = "ambiguous_activation"  # a key of `MambaLMConfig.extra`


_Config = TypeVar("_Config")


def let_use_cache_be_set(config: type[_Config]) -> type[_Config]:
    """Let trainers of other libraries set `use_cache` of a frozen dataclass.

    It is not a field, and nothing here reads it.
    """
    set_frozen: Any = config.__setattr__

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if name == "use_cache":
            object.__setattr__(self, name, value)
        else:
            set_frozen(self, name, value)

    config.__setattr__ = set_attribute  # type: ignore[method-assign]
    return config


@let_use_cache_be_set
@dataclass(frozen=True, kw_only=True)
class MambaLMConfig:
    """Sizes and options of a language model, named as in the official `MambaConfig`, which lacks only `stack`."""

    d_model: int = 2560  # D, width of the residual stream
    d_intermediate: int = 0  # width of the gated MLP after each block, rounded up to a multiple of 128; 0: no MLP
    n_layer: int = 64
    vocab_size: int = 50277  # V
    ssm_cfg: dict[str, Any] = field(default_factory=dict)  # "layer": family of the blocks; the rest: fields of a block
    attn_layer_idx: list[int] = field(default_factory=list)  # layers whose block is attention
    attn_cfg: dict[str, Any] = field(default_factory=dict)  # fields of `AttentionConfig`, for those layers
    rms_norm: bool = True  # False: LayerNorm
    residual_in_fp32: bool = True
    fused_add_norm: bool = True  # an option of the official kernels that changes no result
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True  # the head is the embedding
    stack: dict[str, Any] = field(default_factory=dict)  # further fields of `StackConfig`
    extra: dict[str, Any] = field(default_factory=dict)  # unknown fields of the file

    # What other libraries read. A model always returns a cache, which costs nothing in training.
    model_type: ClassVar[str] = "anymamba"
    use_cache: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the fields, and copy tables and lists, so that later changes by the caller have no effect."""
        for name in ("ssm_cfg", "attn_layer_idx", "attn_cfg", "stack", "extra"):
            object.__setattr__(self, name, copy.deepcopy(getattr(self, name)))
        check_numbers(self, at_least_one=("d_model", "n_layer", "vocab_size", "pad_vocab_size_multiple"))
        if not isinstance(self.stack, dict):
            raise ValueError(f"MambaLMConfig: stack must be a table of fields of StackConfig, got {self.stack!r}")
        self.block_config()
        self._check_attention_layers()
        if self.stack:
            self.stack_config()

    def _check_attention_layers(self) -> None:
        layers = self.attn_layer_idx
        is_list = isinstance(layers, list | tuple) and all(type(i) is int for i in layers)
        if not is_list or not all(0 <= i < self.n_layer for i in layers):
            expected = f"a list of layers, 0 to {self.n_layer - 1}"
            raise ValueError(f"MambaLMConfig: attn_layer_idx must be {expected}, got {reprlib.repr(layers)}")
        if not isinstance(self.attn_cfg, dict):
            raise ValueError(f"MambaLMConfig: attn_cfg must be a table of the block's fields, got {self.attn_cfg!r}")
        if not layers:
            return
        self.attention_config()
        if self.stack.get("layer_cfgs"):
            raise ValueError(
                f"MambaLMConfig: attn_layer_idx cannot be combined with the stack's layer_cfgs, got {layers}; "
                'name attention in layer_cfgs, as {"layer": "Attention", ...}'
            )

    @property
    def layer(self) -> str:
        """Name of the block family; "Mamba1" if not given, like the official package."""
        return family_name(self.ssm_cfg)

    @property
    def family(self) -> type[Block]:
        """Class of the blocks."""
        return get_family(self.layer)

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the embedding: `vocab_size` rounded up to a multiple of `pad_vocab_size_multiple`."""
        return -(-self.vocab_size // self.pad_vocab_size_multiple) * self.pad_vocab_size_multiple

    @property
    def mlp_width(self) -> int:
        """F, the width of the MLPs; 0 without any."""
        return self.stack_config().mlp_width

    def block_config(self) -> Any:
        """Return the config of every block that is not attention."""
        return make_block_config("MambaLMConfig", self.ssm_cfg, self.d_model)

    def attention_config(self) -> Any:
        """Return the config of the blocks of the attention layers."""
        return make_block_config("MambaLMConfig", self._attention_table(), self.d_model, "attn_cfg")

    def _attention_table(self) -> dict[str, Any]:
        return {**self.attn_cfg, "layer": "Attention"}

    def stack_config(self) -> StackConfig:
        """Return the config of the stack."""
        known = {f.name for f in dataclasses.fields(StackConfig)} - MODEL_FIELDS - {"final_norm"}
        if unknown := sorted(set(self.stack) - known):
            near = suggest_field(unknown[0], known)
            raise ValueError(f"MambaLMConfig: stack must have entries among {sorted(known)}, got {unknown}{near}")
        fields = {name: getattr(self, name) for name in MODEL_FIELDS} | self.stack
        if self.attn_layer_idx:
            tables = {True: self._attention_table(), False: self.ssm_cfg}
            fields["layer_cfgs"] = [tables[i in self.attn_layer_idx] for i in range(self.n_layer)]
        config = StackConfig(**fields, final_norm=True)
        if config.has_class_tokens():
            raise ValueError(
                "MambaLMConfig: a language model has one output per token: its stack cannot have class tokens"
            )
        return config

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MambaLMConfig:
        """Return the config with the fields of an official file; unknown ones go to `extra`."""
        names = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        known = {name: value for name, value in values.items() if name in names}
        return cls(**known, extra={name: value for name, value in values.items() if name not in names})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as `from_dict` takes them; `stack` is left out if it is empty, as in an official file."""
        values = dataclasses.asdict(self)
        extra = values.pop("extra")
        if not values["stack"]:
            del values["stack"]
        return {**values, **extra}


def check_fields(fields: dict[str, Any]) -> None:
    """Raise `TypeError` for a name that is not a field, with a similar name or the table to which the field belongs."""
    known = [f.name for f in dataclasses.fields(MambaLMConfig)]
    stack_fields = {f.name for f in dataclasses.fields(StackConfig)}
    block_fields = {f.name for block in FAMILIES.values() for f in dataclasses.fields(block.CONFIG)} | {"layer"}
    for name, value in fields.items():
        if name in known:
            continue
        ours = our_name(name)
        for part, table, names in (("stack", "stack", stack_fields), ("blocks", "ssm_cfg", block_fields)):
            if ours in names and ours not in known:
                raise TypeError(f"MambaLM: {name} is a field of the {part}: give {table}={{{ours!r}: {value!r}, ...}}")
        raise TypeError(f"MambaLM has no field {name!r}{suggest_field(name, [*known, 'device', 'dtype'])}")


def is_ambiguous(config: MambaLMConfig) -> bool:
    """Return whether the model's file does not name the activation, and nobody has chosen since."""
    return bool(config.extra.get(AMBIGUOUS_ACTIVATION)) and ACTIVATION_FIELD not in config.ssm_cfg


def with_block_options(config: MambaLMConfig, options: dict[str, Any]) -> MambaLMConfig:
    """Return the config with some options of its blocks replaced; raise `ValueError` for invalid ones."""
    extra = config.extra
    if ACTIVATION_FIELD in options:
        extra = {name: value for name, value in extra.items() if name != AMBIGUOUS_ACTIVATION}
    return dataclasses.replace(config, ssm_cfg={**config.ssm_cfg, **options}, extra=extra)


def set_activation(model: Any, activation: str) -> None:
    """Make a language model compute with another activation of its decay rates."""
    model.config = with_block_options(model.config, {ACTIVATION_FIELD: activation})
    for layer in model.backbone.layers:
        if hasattr(layer.mixer.config, ACTIVATION_FIELD):
            layer.mixer.config = dataclasses.replace(layer.mixer.config, a_activation=activation)


def warn_if_ambiguous(where: str, config: MambaLMConfig, pass_: str) -> None:
    """Warn that the activation is unknown; `pass_` tells how to choose one."""
    if is_ambiguous(config):
        warnings.warn(
            f"{where}: the config does not name the activation of Mamba-3's decay rates; using heavy_tail (official "
            f"since June 2026). For older weights pass {pass_}",
            stacklevel=3,
        )
