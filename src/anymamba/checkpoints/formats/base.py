"""What a checkpoint format is: a config file, weight files, and a renaming of keys."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from anymamba.models.config import MambaLMConfig


@runtime_checkable
class Format(Protocol):
    """An adapter between a checkpoint format and `MambaLM`.

    Attributes:
        name: of the format.
        config_files: names its config may have, the one to write first.
        weight_files: names its weights may have, the one to write first. A name may stand for a sharded set, which has
            a file `<name>.index.json`.
    """

    name: ClassVar[str]
    config_files: ClassVar[tuple[str, ...]]
    weight_files: ClassVar[tuple[str, ...]]

    def recognizes(self, raw: dict[str, Any]) -> bool:
        """Whether a config file's content is of this format."""

    def read_config(self, raw: dict[str, Any]) -> MambaLMConfig:
        """The config file's content as our config."""

    def write_config(self, config: MambaLMConfig, dtype: torch.dtype) -> dict[str, Any]:
        """The inverse of `read_config`, for weights of `dtype`."""

    def our_key(self, key: str) -> str:
        """The name of a parameter in our state dict; any unknown name is returned as it is."""

    def foreign_key(self, key: str) -> str:
        """The inverse of `our_key`."""


def read_float(value: Any) -> Any:
    """A number as JSON files spell it: `Infinity` is also written as `{"__float__": "Infinity"}` or `"Infinity"`."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        value = value["__float__"]
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError as error:
            raise ValueError(f"expected a number, got {value!r}") from error
    return value


def require(where: str, config: MambaLMConfig, wanted: dict[str, Any]) -> None:
    """Raise unless the config and its blocks have the only values that a format can express."""
    check_plain_stack(where, config)
    block = config.block_config()
    found = {name: getattr(config, name) if hasattr(config, name) else getattr(block, name) for name in wanted}
    if wrong := {name: value for name, value in found.items() if value != wanted[name]}:
        expected = {name: wanted[name] for name in wrong}
        raise ValueError(f"{where} cannot hold this model: it needs {expected}, got {wrong}")


def check_plain_stack(where: str, config: MambaLMConfig) -> None:
    """Raise unless the layers are put together as officially: other formats can express nothing else."""
    if config.stack:
        raise ValueError(
            f'{where} cannot hold this model: it has no {", ".join(config.stack)}; format="anymamba" holds every stack'
        )
