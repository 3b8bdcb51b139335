"""Block families that a stack can be built from, and the config of a block from a table of its fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from anymamba.blocks.attention import Attention
from anymamba.blocks.base import Block
from anymamba.blocks.block_config import FOREIGN_NAMES, ignored_options
from anymamba.blocks.mamba1 import Mamba1
from anymamba.blocks.mamba2 import Mamba2
from anymamba.blocks.mamba3 import Mamba3
from anymamba.core.config_fields import coerce_value, field_types, suggest

# Keyed by the value of "layer" in the official `ssm_cfg`; the last is the block of the official `attn_cfg`.
FAMILIES: dict[str, type[Block]] = {"Mamba1": Mamba1, "Mamba2": Mamba2, "Mamba3": Mamba3, "Attention": Attention}

MAX_CONFIG_NUMBER = 2**31 - 1  # nothing larger can be computed with

# Names that burn-mamba and transformers give to our fields of blocks, stacks and models.
_FOREIGN_NAMES = FOREIGN_NAMES | {
    "class_latents": "class_tokens",
    "dim": "d_model",
    "init_bias": "gate_bias",
    "init_bias_step": "gate_bias_step",
    "intermediate_size": "d_intermediate",
    "mamba_block": "ssm_cfg",
    "missing_lm_head": "tie_embeddings",
    "n_real_layers": "n_layer",
    "n_stream": "streams",
    "n_virtual_layers": "n_virtual",
    "num_hidden_layers": "n_layer",
    "output_merge": "merge",
    "per_virtual_layer": "gates_per",
    "residuals": "streams",
    "tie_word_embeddings": "tie_embeddings",
}


def our_name(name: str) -> str:
    """Return the name that a field of burn-mamba or transformers has here; other names are returned as they are."""
    return _FOREIGN_NAMES.get(name, name)


def suggest_field(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean n_layer?" for a foreign or misspelled name of a field, or an empty string."""
    known = list(known)
    return f"; did you mean {our_name(name)}?" if our_name(name) in known else suggest(name, known)


def get_family(name: str, table: str = "ssm_cfg") -> type[Block]:
    """Return the block class that the entry "layer" of a table names; raise `ValueError` if there is none."""
    if name not in FAMILIES:
        near = suggest(str(name), FAMILIES)
        raise ValueError(f'{table}["layer"] must be one of {", ".join(FAMILIES)}, got {name!r}{near}')
    return FAMILIES[name]


def family_name(ssm_cfg: dict[str, Any]) -> str:
    """Return the name of the block family; "Mamba1" if not given, like the official package."""
    return str(ssm_cfg.get("layer", "Mamba1"))


def make_block_config(where: str, ssm_cfg: Any, d_model: int, table: str = "ssm_cfg") -> Any:
    """Return the config of a block from a table: "layer" names the family, the rest are fields of its config.

    Raise `ValueError` for entries that the block does not know, and for invalid values; the message names the config
    `where` and its `table`.
    """
    if not isinstance(ssm_cfg, dict):
        raise ValueError(f"{where}: {table} must be a table of the block's fields, got {ssm_cfg!r}")
    name = family_name(ssm_cfg)
    kind = get_family(name, table).CONFIG
    fields = field_types(kind)
    # Entries that tune the official kernels are kept and written back, and change no result. `chunk_size` is among
    # them: it suits a GPU there. Pass `path=` to the model to choose a chunk length.
    ignored = ignored_options(kind) | {"chunk_size", "layer"}
    entries = {key: value for key, value in ssm_cfg.items() if key not in ignored}
    if unknown := sorted(set(entries) - set(fields)):
        near = suggest_field(unknown[0], fields)
        raise ValueError(f"{where}: {table} has entries that {name} does not know: {unknown}{near}")
    values = {
        key: coerce_value(f'{where}: {table}["{key}"]', value, fields[key], max_number=MAX_CONFIG_NUMBER)
        for key, value in entries.items()
    }
    required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING} - {"d_model"}
    if missing := sorted(required - set(values)):
        raise ValueError(f"{where}: {table} must have {', '.join(missing)} for {name}")
    return kind(**{**values, "d_model": d_model})
