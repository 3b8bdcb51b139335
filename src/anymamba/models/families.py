"""Block families that a stack can be built from, and the config of a block from a table of its fields.

Families of other people come from `register_family`, or from entry points of installed packages, which are loaded when
somebody names their family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from anymamba.blocks.attention import Attention
from anymamba.blocks.base import Block
from anymamba.blocks.block_config import FOREIGN_NAMES, MAX_CONFIG_NUMBER, ignored_options
from anymamba.blocks.mamba1 import Mamba1
from anymamba.blocks.mamba2 import Mamba2
from anymamba.blocks.mamba3 import Mamba3
from anymamba.core.cache_io import SavableTree
from anymamba.core.config_fields import coerce_value, field_types, suggest

# Keyed by the value of "layer" in the official `ssm_cfg`; the last is the block of the official `attn_cfg`.
FAMILIES: dict[str, type[Block]] = {"Mamba1": Mamba1, "Mamba2": Mamba2, "Mamba3": Mamba3, "Attention": Attention}
BUILT_IN = frozenset(FAMILIES)
ENTRY_POINTS = "anymamba.families"  # the group in which a package names its families: Leaky = "package.module:Leaky"

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


def register_family(name: str, family: type[Block]) -> None:
    """Make a block family known: to models, by `ssm_cfg={"layer": name}`, to checkpoints and to the command line.

    Registering a family again changes nothing. A class of the same module and name replaces the former one, as when a
    cell of a notebook runs again.

    Args:
        name: Name of the family, which checkpoints store.
        family: Subclass of `Block` with `CONFIG`, `CACHE`, `cache_shapes` and `mix`.

    Raises:
        TypeError: The name is not a string, or the family is not a subclass of `Block`.
        ValueError: Another family has this name, or the family lacks something.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"register_family: the name must be a string that is not empty, got {name!r}")
    if not (isinstance(family, type) and issubclass(family, Block)):
        raise TypeError(f"register_family: {name} must be a subclass of anymamba.blocks.Block, got {family!r}")
    registered = FAMILIES.get(name, family)
    if (registered.__module__, registered.__qualname__) != (family.__module__, family.__qualname__):
        raise ValueError(
            f"register_family: {name} is the name of {registered.__module__}.{registered.__qualname__} already, "
            f"got {family.__module__}.{family.__qualname__}"
        )
    if missing := _missing_parts(family):
        raise ValueError(f"register_family: {name} must have {'; '.join(missing)}")
    FAMILIES[name] = family


def _missing_parts(family: type[Block]) -> list[str]:
    """Return what a family lacks to be used in models."""
    config: Any = getattr(family, "CONFIG", None)
    cache: Any = getattr(family, "CACHE", None)
    is_config = isinstance(config, type) and dataclasses.is_dataclass(config)
    is_cache = isinstance(cache, type) and issubclass(cache, SavableTree) and hasattr(cache, "_fields")
    parts = {
        "CONFIG, a dataclass with a field d_model": is_config and "d_model" in field_types(config),
        "CACHE, a named tuple and anymamba.blocks.SavableTree": is_cache,
        "a method cache_shapes": family.cache_shapes is not Block.cache_shapes,
        "a method mix": family.mix is not Block.mix,
    }
    return [part for part, is_there in parts.items() if not is_there]


def get_family(name: str, where: str = 'ssm_cfg["layer"]') -> type[Block]:
    """Return the block class of a name, of which an error says `where` it was given.

    Raises:
        ValueError: There is no such family, or the package that provides it cannot be used.
    """
    if name not in FAMILIES:
        points = list(entry_points(group=ENTRY_POINTS))
        matches = [point for point in points if point.name == name]
        if not matches:
            names = list(dict.fromkeys([*FAMILIES, *(point.name for point in points)]))
            raise ValueError(
                f"{where} must be one of {', '.join(names)}, got {name!r}"
                f"{suggest(str(name), names) or '; anymamba.register_family adds a family'}"
            )
        _load_entry_point(where, matches)
    return FAMILIES[name]


def _load_entry_point(where: str, matches: list[EntryPoint]) -> None:
    """Register the family of the entry points with one name, of which there must be one."""
    values = sorted({point.value for point in matches})
    if len(values) > 1:
        raise ValueError(f"{where}: several packages provide {matches[0].name}: {', '.join(values)}")
    try:
        register_family(matches[0].name, matches[0].load())
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{where}: cannot load the entry point {matches[0].name} = {values[0]} ({cause})") from error


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
    kind = get_family(name, f'{table}["layer"]').CONFIG
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
    missing_default = dataclasses.MISSING
    required = {f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is missing_default}
    if missing := sorted(required - {"d_model", *values}):
        raise ValueError(f"{where}: {table} must have {', '.join(missing)} for {name}")
    return kind(**{**values, "d_model": d_model})
