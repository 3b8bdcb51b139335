"""What the configs of all families share: how they are made from arguments, and checks of their fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from anymamba.core.config_fields import field_types, suggest

# Options of the official blocks that tune kernels or distribute them over devices; they do not change results.
IGNORED_OPTIONS = frozenset({"use_mem_eff_path", "use_fast_path", "process_group", "sequence_parallel", "layer_idx"})

MAX_CONFIG_NUMBER = 2**31 - 1  # nothing larger can be computed with

# Numbers that follow from others, by the names that people give them, and the fields to set instead.
_DERIVED_NUMBERS = {
    **dict.fromkeys(("nheads", "n_heads", "num_heads"), ("headdim", "there are expand · d_model / headdim heads")),
    "d_inner": ("expand", "it is expand · d_model"),
}

# Names that burn-mamba and transformers give to our fields.
FOREIGN_NAMES = {
    "a_init_range": "A_init_range",
    "conv_kernel": "d_conv",
    "has_conv_bias": "conv_bias",
    "has_learnable_init_state": "learnable_init_states",
    "has_outproj_norm": "is_outproj_norm",
    "has_proj_bias": "bias",
    "head_dim": "headdim",
    "hidden_size": "d_model",
    "is_norm_before_gate": "norm_before_gate",
    "n_groups": "ngroups",
    "per_head_dim": "headdim",
    "state_rank": "d_state",
    "state_size": "d_state",
    "time_step_rank": "dt_rank",
    "use_bias": "bias",
    "use_conv_bias": "conv_bias",
}

_Config = TypeVar("_Config")


class BlockConfig:
    """Base class of the configs, which have at least d_model, expand, dt_min and dt_max."""

    d_model: int
    expand: int | float
    dt_min: int | float
    dt_max: int | float

    def __new__(cls, *_: Any, **fields: Any) -> Any:
        """Check the fields before they meet the signature of `__init__`, whose error has no hint."""
        cls.check_given_fields(fields)
        return super().__new__(cls)

    @classmethod
    def check_given_fields(cls, fields: dict[str, Any]) -> None:
        """Raise `TypeError` for unknown fields, with the name that was probably meant."""
        check_field_names(cls, fields)

    @property
    def d_inner(self) -> int:
        """Return E = expand · d_model."""
        return int(self.expand * self.d_model)

    def check_common_fields(self) -> None:
        """Raise unless sizes and choices are valid, and the fields that all families have work together."""
        check_sizes(self)
        name = type(self).__name__
        for field, annotation in field_types(type(self)).items():
            if get_origin(annotation) is Literal and (value := getattr(self, field)) not in get_args(annotation):
                *others, last = get_args(annotation)
                raise ValueError(f"{name}: {field} must be {', '.join(others)} or {last}, got {value!r}")
        if self.expand <= 0 or not float(self.expand * self.d_model).is_integer():
            raise ValueError(f"{name}: expand · d_model must be an integer, got {self.expand} · {self.d_model}")
        if not 0 < self.dt_min <= self.dt_max:
            raise ValueError(f"{name}: 0 < dt_min <= dt_max must hold, got {self.dt_min} and {self.dt_max}")

    def check_heads(self, channels: int) -> None:
        """Raise unless heads divide these channels, groups divide the heads, and `dt_limit` is a range."""
        c, name = cast(Any, self), type(self).__name__  # families with heads have these fields
        if channels % c.headdim:
            expected = f"headdim must divide the {channels} channels of the SSM"
            raise ValueError(f"{name}: {expected}, got headdim = {c.headdim}")
        if c.nheads % c.ngroups:
            raise ValueError(f"{name}: ngroups must divide the {c.nheads} heads, got ngroups = {c.ngroups}")
        if not 0 <= c.dt_limit[0] <= c.dt_limit[1]:
            raise ValueError(f"{name}: dt_limit must satisfy 0 <= low <= high, got {c.dt_limit}")


def ignored_options(kind: type[Any]) -> frozenset[str]:
    """Return the options of the official block that do not change results: the common ones and a family's own."""
    return IGNORED_OPTIONS | getattr(kind, "IGNORED", frozenset())


def make_config(
    kind: type[_Config], config: _Config | int | None, fields: dict[str, Any], positional: tuple[Any, ...] = ()
) -> _Config:
    """Return `config` itself, or a config made from `d_model` and fields.

    Args:
        kind: Class of the config; its `LAST_POSITIONAL_FIELD` is the last field in the same position as officially.
        config: Config, or d_model.
        fields: Fields by name.
        positional: Fields after d_model, by position.

    Raises:
        TypeError: Both a config and fields are given, a field is unknown, or there are too many positions.
    """
    name = kind.__name__
    fields = _with_positions(kind, fields, positional)
    if isinstance(config, kind):
        if fields:
            raise TypeError(f"{name}: give a config or its fields, not both; got also {sorted(fields)}")
        return config
    fields = {key: value for key, value in fields.items() if key not in ignored_options(kind)}
    if config is not None:
        fields = {"d_model": config, **fields}
    check_field_names(kind, fields)
    if "d_model" not in fields:
        raise TypeError(f"{name}: d_model must be given")
    return kind(**fields)


def _with_positions(kind: Any, fields: dict[str, Any], positional: tuple[Any, ...]) -> dict[str, Any]:
    """Return the fields by name, including those given by position."""
    names = [field.name for field in dataclasses.fields(kind)]
    order = names[1 : names.index(getattr(kind, "LAST_POSITIONAL_FIELD", names[0])) + 1]
    if len(positional) > len(order):
        last = f"; give those after {order[-1]} by name" if order else "; give fields by name"
        raise TypeError(f"{kind.__name__}: at most {1 + len(order)} positions, got {1 + len(positional)}{last}")
    if duplicates := [name for name in order[: len(positional)] if name in fields]:
        raise TypeError(f"{kind.__name__}: {duplicates[0]} was given twice, by its position and by its name")
    return {**dict(zip(order, positional, strict=False)), **fields}


def check_field_names(kind: Any, names: Iterable[str]) -> None:
    """Raise `TypeError` for the first name that is not a field, with the field that was probably meant."""
    known = [field.name for field in dataclasses.fields(kind)]
    for name in sorted(set(names) - set(known)):
        ours = FOREIGN_NAMES.get(name)
        field, formula = _DERIVED_NUMBERS.get(name, ("", ""))
        if field in known:
            hint = f": {formula}, so give {field}"
        else:
            hint = f"; did you mean {ours}?" if ours in known else suggest(name, known)
        raise TypeError(f"{kind.__name__} has no field {name!r}{hint}")


def check_sizes(config: Any) -> None:
    """Raise unless every field annotated as `int` is an integer from 1 to 2³¹ - 1, or 0 if in `OPTIONAL_SIZES`.

    Raises:
        TypeError: A field is not an integer.
        ValueError: A field is below 1, or larger than anything can be computed with.
    """
    for field in dataclasses.fields(config):
        value, where = getattr(config, field.name), f"{type(config).__name__}: {field.name}"
        if field.type not in ("int", "int | None") or (value is None and field.type == "int | None"):
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{where} must be an integer, got {value!r}")
        least = 0 if field.name in getattr(config, "OPTIONAL_SIZES", ()) else 1
        if value < least and field.name != "d_ssm":  # which has its own range
            none = "None or " if field.type == "int | None" else ""
            raise ValueError(f"{where} must be {none}at least {least}, got {value}")
        if value > MAX_CONFIG_NUMBER:
            raise ValueError(f"{where} must be at most {MAX_CONFIG_NUMBER}, got {value}")
