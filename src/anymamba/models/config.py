"""The configuration of a language model: the official fields, those of its stack, and unknown fields of its file."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from anymamba.blocks.base import Block
from anymamba.core.config_fields import coerce_value, field_types
from anymamba.models.families import (
    FAMILIES,
    MAX_CONFIG_NUMBER,
    family_name,
    get_family,
    make_block_config,
    our_name,
    suggest_field,
)
from anymamba.models.stack.stack_config import MODEL_FIELDS, StackConfig

# Fields of a block that only affect its initial parameters, and so are not part of a trained model.
INITIALIZATION_FIELDS = frozenset(
    {"dt_min", "dt_max", "dt_init", "dt_init_floor", "dt_scale", "A_init_range", "conv_init"}
)


@dataclass(frozen=True, kw_only=True)
class MambaLMConfig:
    """Sizes and options of a language model, named as in the official `MambaConfig`, which lacks only `stack`."""

    d_model: int = 2560  # D, width of the residual stream
    d_intermediate: int = 0  # width of the gated MLP after each block, rounded up to a multiple of 128; 0: no MLP
    n_layer: int = 64
    vocab_size: int = 50277  # V
    ssm_cfg: dict[str, Any] = field(default_factory=dict)  # "layer": family of the blocks; the rest: fields of a block
    attn_layer_idx: list[int] = field(default_factory=list)
    attn_cfg: dict[str, Any] = field(default_factory=dict)
    rms_norm: bool = True  # False: LayerNorm
    residual_in_fp32: bool = True
    fused_add_norm: bool = True  # an option of the official kernels that changes no result
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True  # the head is the embedding
    stack: dict[str, Any] = field(default_factory=dict)  # further fields of `StackConfig`
    extra: dict[str, Any] = field(default_factory=dict)  # unknown fields of the file

    def __post_init__(self) -> None:
        """Check the fields, and copy tables and lists, so that later changes by the caller have no effect."""
        for name in ("ssm_cfg", "attn_layer_idx", "attn_cfg", "stack", "extra"):
            object.__setattr__(self, name, copy.deepcopy(getattr(self, name)))
        for name, kind in field_types(type(self)).items():
            if kind in (int, bool):
                coerce_value(f"MambaLMConfig: {name}", getattr(self, name), kind, max_number=MAX_CONFIG_NUMBER)
        for name in ("d_model", "n_layer", "vocab_size", "pad_vocab_size_multiple"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"MambaLMConfig: {name} must be at least 1, got {value!r}")
        if self.d_intermediate < 0:
            raise ValueError(f"MambaLMConfig: d_intermediate must be 0 or a width, got {self.d_intermediate!r}")
        if not isinstance(self.stack, dict):
            raise ValueError(f"MambaLMConfig: stack must be a table of fields of StackConfig, got {self.stack!r}")
        if self.attn_layer_idx:
            raise ValueError(
                f"MambaLMConfig: attention layers are not supported, got attn_layer_idx = {self.attn_layer_idx}"
            )
        self.block_config()
        if self.stack:
            self.stack_config()

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
        """F, `d_intermediate` rounded up to a multiple of 128; 0 without an MLP."""
        return -(-self.d_intermediate // 128) * 128

    def block_config(self) -> Any:
        """Return the config of every block.

        Raises:
            ValueError: `ssm_cfg` has entries that the block does not know, or invalid values.
        """
        return make_block_config("MambaLMConfig", self.ssm_cfg, self.d_model)

    def stack_config(self) -> StackConfig:
        """Return the config of the stack.

        Raises:
            ValueError: `stack` has entries that are not fields of `StackConfig`, or invalid values.
        """
        known = {f.name for f in dataclasses.fields(StackConfig)} - MODEL_FIELDS - {"final_norm"}
        if unknown := sorted(set(self.stack) - known):
            near = suggest_field(unknown[0], known)
            raise ValueError(f"MambaLMConfig: stack must have entries among {sorted(known)}, got {unknown}{near}")
        config = StackConfig(**{name: getattr(self, name) for name in MODEL_FIELDS}, **self.stack, final_norm=True)
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
    """Raise for names that are not fields of a `MambaLMConfig`.

    Raises:
        TypeError: One is not; the message suggests a similar name, or the table to which the field belongs.
    """
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
