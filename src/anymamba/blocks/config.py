"""What the blocks' configurations share: how they are given, and checks of their sizes."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, TypeVar

# Options of the official blocks that tune its kernels or place them on several devices; they change no result.
IGNORED_OPTIONS = frozenset({"use_mem_eff_path", "use_fast_path", "process_group", "sequence_parallel", "layer_idx"})

_Config = TypeVar("_Config")


def ignored_options(kind: type[Any]) -> frozenset[str]:
    """Options of the official block that change no result: those that all have, and those of a family's config."""
    return IGNORED_OPTIONS | getattr(kind, "IGNORED", frozenset())


def make_config(kind: type[_Config], config: _Config | int | None, fields: dict[str, Any]) -> _Config:
    """The config that a block is made from: one, or `d_model` and fields.

    Raises:
        TypeError: both were given, or unknown fields.
    """
    name = kind.__name__
    if isinstance(config, kind):
        if fields:
            raise TypeError(f"{name}: give a config or its fields, not both; got also {sorted(fields)}")
        return config
    fields = {key: value for key, value in fields.items() if key not in ignored_options(kind)}
    if config is not None:
        fields = {"d_model": config, **fields}
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(fields.keys() - set(known)):
        near = difflib.get_close_matches(unknown[0], known)
        raise TypeError(f"{name} has no field {unknown[0]!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    if "d_model" not in fields:
        raise TypeError(f"{name}: d_model must be given")
    return kind(**fields)


def expect_sizes(config: Any) -> None:
    """Raise unless every field annotated as `int` is a whole number, at least 1.

    Raises:
        TypeError: a field is not a whole number.
        ValueError: a field is below 1.
    """
    for field in dataclasses.fields(config):
        value, where = getattr(config, field.name), f"{type(config).__name__}: {field.name}"
        if field.type not in ("int", "int | None") or (value is None and field.type == "int | None"):
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{where} must be a whole number, got {value!r}")
        if value < 1 and field.name != "d_ssm":  # which has a range of its own
            none = "None or " if field.type == "int | None" else ""
            raise ValueError(f"{where} must be {none}at least 1, got {value}")
