"""The block families a language model can be built of: one line each."""

from __future__ import annotations

from anymamba.blocks.block import Block
from anymamba.blocks.mamba1 import Mamba1
from anymamba.blocks.mamba2 import Mamba2
from anymamba.blocks.mamba3 import Mamba3

# Keyed by the value of "layer" in the official `ssm_cfg`.
FAMILIES: dict[str, type[Block]] = {"Mamba1": Mamba1, "Mamba2": Mamba2, "Mamba3": Mamba3}


def family(name: str) -> type[Block]:
    """The block that `ssm_cfg["layer"]` names.

    Raises:
        ValueError: there is no such family.
    """
    if name not in FAMILIES:
        raise ValueError(f'ssm_cfg["layer"] must be one of {", ".join(FAMILIES)}, got {name!r}')
    return FAMILIES[name]
