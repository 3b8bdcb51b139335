"""The block families a language model can be built of: one line each."""

from __future__ import annotations

from typing import Any, NamedTuple

from anymamba.blocks.mamba1 import Mamba1, Mamba1Cache, Mamba1Config
from anymamba.blocks.mamba2 import Mamba2, Mamba2Cache, Mamba2Config
from anymamba.blocks.mamba3 import Mamba3, Mamba3Cache, Mamba3Config
from anymamba.ground.states import SavedTree


class Family(NamedTuple):
    """The three classes of a block family: module, config and cache."""

    block: Any
    config: Any
    cache: type[SavedTree]


# Keyed by the value of "layer" in the official `ssm_cfg`.
FAMILIES: dict[str, Family] = {
    "Mamba1": Family(Mamba1, Mamba1Config, Mamba1Cache),
    "Mamba2": Family(Mamba2, Mamba2Config, Mamba2Cache),
    "Mamba3": Family(Mamba3, Mamba3Config, Mamba3Cache),
}


def family(name: str) -> Family:
    """The family that `ssm_cfg["layer"]` names.

    Raises:
        ValueError: there is no such family.
    """
    if name not in FAMILIES:
        raise ValueError(f'ssm_cfg["layer"] must be one of {", ".join(FAMILIES)}, got {name!r}')
    return FAMILIES[name]
