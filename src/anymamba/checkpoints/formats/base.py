"""The protocol of a checkpoint format: a config file, weight files, and a renaming of tensors.

Formats are registered in `FORMATS` of `formats/__init__.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch

from anymamba.models.config import MambaLMConfig


class StoredTensor(NamedTuple):
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@runtime_checkable
class Format(Protocol):
    """An adapter between a checkpoint format and `MambaLM`.

    Attributes:
        name: Name of the format.
        config_files: Possible names of the config file; the first one is written.
        weight_files: Possible names of the weight file; the first one is written. A name may stand for a set of shards
            with a file `<name>.index.json`.
    """

    name: ClassVar[str]
    config_files: ClassVar[tuple[str, ...]]
    weight_files: ClassVar[tuple[str, ...]]

    def recognizes(self, raw: dict[str, Any]) -> bool:
        """Return whether a config file's content is of this format."""

    def read_config(self, raw: dict[str, Any]) -> MambaLMConfig:
        """Return our config for a config file's content."""

    def write_config(self, config: MambaLMConfig, dtype: torch.dtype) -> dict[str, Any]:
        """Return the content of a config file for our config, and weights of `dtype`."""

    def our_key(self, key: str) -> str:
        """Return the name of a tensor in our state dict; unknown names are returned unchanged."""

    def foreign_key(self, key: str) -> str:
        """Return the name of a tensor in this format."""

    def stored_parts(self, config: MambaLMConfig, name: str, rows: int) -> dict[str, int]:
        """Return the rows of each part of one of our tensors that is stored as several; empty if it is stored as one.

        A part is named as `part_name` says, in `our_key` and `foreign_key` too.
        """
        return {}


def part_name(name: str, part: str) -> str:
    """Return the name of a part of a tensor: `mixer.in_proj.weight[q]`."""
    return f"{name}[{part}]"


def read_float(value: Any) -> Any:
    """Return a number as JSON files spell it: infinity may be `{"__float__": "Infinity"}` or `"Infinity"`."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        value = value["__float__"]
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError as error:
            raise ValueError(f"expected a number, got {value!r}") from error
    return value


def check_fixed_fields(where: str, config: MambaLMConfig, fixed: dict[str, Any]) -> None:
    """Raise `ValueError` unless the config and its blocks have the only values that a format can express."""
    check_plain_stack(where, config)
    block = config.block_config()
    values = {name: getattr(config, name) if hasattr(config, name) else getattr(block, name) for name in fixed}
    if different := {name: value for name, value in values.items() if value != fixed[name]}:
        expected = {name: fixed[name] for name in different}
        raise ValueError(f"{where} cannot hold this model: it needs {expected}, got {different}")


def check_plain_stack(where: str, config: MambaLMConfig, *, allow_attention: bool = False) -> None:
    """Raise `ValueError` unless the layers are composed as officially: other formats can express nothing else."""
    if config.attn_layer_idx and not allow_attention:
        raise ValueError(
            f"{where} cannot hold this model: it has no attention layers, got attn_layer_idx = {config.attn_layer_idx}"
        )
    if config.stack:
        raise ValueError(
            f'{where} cannot hold this model: it has no {", ".join(config.stack)}; format="anymamba" holds every stack'
        )
