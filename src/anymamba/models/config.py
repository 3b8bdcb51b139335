"""The configuration of a language model: the official fields, and whatever else its file says."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from anymamba.blocks.block import Block
from anymamba.blocks.config import IGNORED_OPTIONS
from anymamba.models.families import FAMILIES, family

# Entries of `ssm_cfg` that tune the official kernels. They are kept and written back, and change no result.
# `chunk_size` is among them: it suits a GPU there. Pass `path=` to the model for a chunk length of your own.
_KERNEL_OPTIONS = IGNORED_OPTIONS | {"chunk_size"}
# Fields of a block that its fresh parameters depend on and nothing else: no part of a trained model.
INITIALISATION = frozenset({"dt_min", "dt_max", "dt_init", "dt_init_floor", "dt_scale", "A_init_range", "conv_init"})
_MOST = 2**31 - 1  # of any number: nothing larger can be computed with


@dataclass(frozen=True, kw_only=True)
class MambaLMConfig:
    """Sizes and options of a language model, named as in the official `MambaConfig`."""

    d_model: int = 2560  # D, width of the residual stream
    d_intermediate: int = 0  # width of the gated MLP after each block, rounded up to a multiple of 128; 0: no MLP
    n_layer: int = 64
    vocab_size: int = 50277  # V
    ssm_cfg: dict[str, Any] = field(default_factory=dict)  # "layer": family of the blocks; the rest: fields of a block
    attn_layer_idx: list[int] = field(default_factory=list)
    attn_cfg: dict[str, Any] = field(default_factory=dict)
    rms_norm: bool = True  # False: LayerNorm
    residual_in_fp32: bool = True
    fused_add_norm: bool = True  # of the official kernels; changes no result
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True  # the head is the embedding
    extra: dict[str, Any] = field(default_factory=dict)  # fields of the file that are none of ours

    def __post_init__(self) -> None:
        """Refuse what cannot work, and keep tables and lists as they are now, whatever the caller does with them."""
        for name in ("ssm_cfg", "attn_layer_idx", "attn_cfg", "extra"):
            object.__setattr__(self, name, copy.deepcopy(getattr(self, name)))
        for f in dataclasses.fields(self):
            if f.type in ("int", "bool"):
                _typed(f.name, getattr(self, f.name), f)
        for name in ("d_model", "n_layer", "vocab_size", "pad_vocab_size_multiple"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"MambaLMConfig: {name} must be at least 1, got {value!r}")
        if self.d_intermediate < 0:
            raise ValueError(f"MambaLMConfig: d_intermediate must be 0 or a width, got {self.d_intermediate!r}")
        if not isinstance(self.ssm_cfg, dict):
            raise ValueError(f"MambaLMConfig: ssm_cfg must be a table of the block's fields, got {self.ssm_cfg!r}")
        if self.attn_layer_idx:
            raise ValueError(
                f"MambaLMConfig: attention layers are not supported, got attn_layer_idx = {self.attn_layer_idx}"
            )
        self.block_config()

    @property
    def layer(self) -> str:
        """Name of the block family, "Mamba1" where nothing is said, as officially."""
        return str(self.ssm_cfg.get("layer", "Mamba1"))

    @property
    def family(self) -> type[Block]:
        """The class of the blocks."""
        return family(self.layer)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to a multiple of `pad_vocab_size_multiple`."""
        return -(-self.vocab_size // self.pad_vocab_size_multiple) * self.pad_vocab_size_multiple

    @property
    def mlp_width(self) -> int:
        """F, `d_intermediate` rounded up to a multiple of 128; 0 without an MLP."""
        return -(-self.d_intermediate // 128) * 128

    def block_config(self) -> Any:
        """The config of every block.

        Raises:
            ValueError: `ssm_cfg` has entries that the block does not know, or values that cannot work.
        """
        fields = {f.name: f for f in dataclasses.fields(self.family.CONFIG)}
        given = {k: v for k, v in self.ssm_cfg.items() if k != "layer" and k not in _KERNEL_OPTIONS}
        if unknown := sorted(set(given) - set(fields)):
            near = _meant(unknown[0], fields)
            raise ValueError(f"MambaLMConfig: ssm_cfg has entries that {self.layer} does not know: {unknown}{near}")
        values = {name: _typed(f'ssm_cfg["{name}"]', value, fields[name]) for name, value in given.items()}
        return self.family.CONFIG(**{**values, "d_model": self.d_model})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MambaLMConfig:
        """From the official file's fields; those that are none of ours go to `extra`."""
        names = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        known = {name: value for name, value in values.items() if name in names}
        return cls(**known, extra={name: value for name, value in values.items() if name not in names})

    def to_dict(self) -> dict[str, Any]:
        """The inverse of `from_dict`."""
        values = dataclasses.asdict(self)
        extra = values.pop("extra")
        return {**values, **extra}


def expect_fields(fields: dict[str, Any]) -> None:
    """Refuse names that are no fields of a `MambaLMConfig`.

    Raises:
        TypeError: one is not; with the one that was probably meant, or where it belongs.
    """
    known = [f.name for f in dataclasses.fields(MambaLMConfig)]
    for name, value in fields.items():
        if name in known:
            continue
        of_blocks = {f.name for block in FAMILIES.values() for f in dataclasses.fields(block.CONFIG)}
        if name in of_blocks | {"layer"}:
            raise TypeError(f"MambaLM: {name} is a field of the blocks: give ssm_cfg={{{name!r}: {value!r}, ...}}")
        raise TypeError(f"MambaLM has no field {name!r}{_meant(name, [*known, 'device', 'dtype'])}")


def _meant(name: str, known: Iterable[str]) -> str:
    """A hint at the names that are like another."""
    near = difflib.get_close_matches(name, list(known))
    return f"; did you mean {', '.join(near)}?" if near else ""


def _typed(name: str, value: Any, field: dataclasses.Field[Any]) -> Any:
    """A value from a JSON file as the field's annotation wants it, a list as a tuple."""
    wanted, default = str(field.type), field.default
    number = isinstance(value, int | float if "float" in wanted else int) and not isinstance(value, bool)
    if wanted.startswith("tuple"):
        fine = isinstance(value, list | tuple) and isinstance(default, tuple) and len(value) == len(default)
        fine = fine and all(isinstance(x, int | float) and not isinstance(x, bool) for x in value)
        value = tuple(value) if fine else value
    elif "bool" in wanted:
        fine = isinstance(value, bool)
    elif "Literal" in wanted:
        fine = isinstance(value, str) or (number and wanted.startswith("int"))
    else:
        fine = number or (value is None and "None" in wanted)
    if not fine:
        raise ValueError(f"MambaLMConfig: {name} must be {wanted}, got {reprlib.repr(value)}")
    for x in value if isinstance(value, tuple) else [value]:
        if isinstance(x, int | float) and not abs(x) <= _MOST and not (x == math.inf and isinstance(value, tuple)):
            raise ValueError(f"MambaLMConfig: {name} must be a number of at most {_MOST:,}, got {reprlib.repr(x)}")
    return value
