"""The cases of Mamba-3 compared with our Mamba-2: SISO on both pathways, MIMO of rank 4, and quaternion rotation.

The layer has the sizes of mamba3-187m; `seeds` has those that burn-mamba reports. Sequences run on the portable path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from anymamba import Mamba2, Mamba3, SsdPath
from benchmarks.harness import Case, Contender
from benchmarks.mamba2 import (
    LAYER_130M,
    MODES,
    SEEDS,
    TINY,
    BlockShape,
    Mode,
    OnPath,
    set_up_block,
    set_up_step,
)

LAYER_187M = LAYER_130M


def block_of(family: type[Mamba2] | type[Mamba3], shape: BlockShape, **options: Any) -> Mamba2 | Mamba3:
    """Return a block with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return family(d_model=shape.d_model, d_state=shape.d_state, headdim=shape.headdim, **options)


FAMILIES: dict[str, Callable[[BlockShape], Mamba2 | Mamba3]] = {
    "mamba2": partial(block_of, Mamba2),
    "siso": partial(block_of, Mamba3),
    "mimo4": partial(block_of, Mamba3, is_mimo=True, mimo_rank=4),
    "quaternion": partial(block_of, Mamba3, rotation="quaternion"),
}


def sequence_case(name: str, mode: Mode, shape: BlockShape, path: SsdPath) -> Case:
    """Return the cases of every family over a sequence, on one path; SISO on both pathways."""

    def on_path(family: str, path: SsdPath, shape: BlockShape) -> nn.Module:
        return OnPath(FAMILIES[family](shape), path)

    builders = {
        **{family: partial(on_path, family, path) for family in FAMILIES},
        "siso double": partial(on_path, "siso", SsdPath(path.algorithm, path.chunk_len, "double")),
    }
    contenders = tuple(
        Contender(
            name=contender,
            setup=partial(set_up_block, build, mode, shape),
            tiny=partial(set_up_block, build, mode, TINY),
            computes=contender.split()[0],
        )
        for contender, build in builders.items()
    )
    return Case(name=f"{name}/{mode}", contenders=contenders, baseline="siso")


def step_case(name: str, shape: BlockShape) -> Case:
    """Return the cases of one token from a cache, by every family."""
    contenders = tuple(
        Contender(
            name=family,
            setup=partial(set_up_step, build, shape),
            tiny=partial(set_up_step, build, TINY),
            computes=family,
        )
        for family, build in FAMILIES.items()
    )
    return Case(name=f"{name}/step", contenders=contenders, baseline="siso")


CASES: tuple[Case, ...] = (
    *(
        sequence_case(
            f"mamba3/portable/t{t}", mode, dataclasses.replace(LAYER_187M, t=t), SsdPath.serial_recalculated()
        )
        for t in (512, 2048)
        for mode in MODES
    ),
    *(sequence_case("mamba3/portable/seeds", mode, SEEDS, SsdPath.serial_recalculated()) for mode in MODES),
    step_case("mamba3/layer", dataclasses.replace(LAYER_187M, t=64)),
    step_case("mamba3/seeds", SEEDS),
)
