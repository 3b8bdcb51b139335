"""The block families a language model can be built of: one line each."""

from __future__ import annotations

from typing import Any, NamedTuple

from anymamba.blocks.cache import CacheMethods
from anymamba.blocks.mamba2 import Mamba2, Mamba2Cache, Mamba2Config
from anymamba.blocks.mamba3 import Mamba3, Mamba3Cache, Mamba3Config


class Family(NamedTuple):
    """The three classes of a block family: module, config and cache."""

    block: Any
    config: Any
    cache: type[CacheMethods]


# Keyed by the value of "layer" in the official `ssm_cfg`.
FAMILIES: dict[str, Family] = {
    "Mamba2": Family(Mamba2, Mamba2Config, Mamba2Cache),
    "Mamba3": Family(Mamba3, Mamba3Config, Mamba3Cache),
}


def family(name: str) -> Family:
    """The family that `ssm_cfg["layer"]` names.

    Raises:
        ValueError: there is no such family, or not yet.
    """
    if name == "Mamba1":
        raise ValueError(
            f'Mamba-1, which a config without ssm_cfg["layer"] means, is not supported yet: expected one of '
            f"{', '.join(FAMILIES)}, as in ssm_cfg={{'layer': 'Mamba3'}}"
        )
    if name not in FAMILIES:
        raise ValueError(f'ssm_cfg["layer"] must be one of {", ".join(FAMILIES)}, got {name!r}')
    return FAMILIES[name]
