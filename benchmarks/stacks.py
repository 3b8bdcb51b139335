"""The cases of stacks: both directions against blocks and flips by hand, virtual layers, and the horizon's memory.

A case of the horizon has a contender for each depth, of which only the last passes keep a graph: what they need above
their parameters and inputs should not grow with depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anymamba import BidirectionalStack, Stack
from benchmarks.harness import Call, Case, Contender, forward
from benchmarks.mamba2 import LAYER_130M, MODES, TINY, BlockShape, Mode, set_up_block

DEPTHS = (4, 8, 16)
_NARROW = dataclasses.replace(LAYER_130M, d_model=256, t=512)


def _fields(shape: BlockShape) -> dict[str, Any]:
    block = {"layer": "Mamba2", "d_state": shape.d_state, "headdim": shape.headdim}
    return {"d_model": shape.d_model, "ssm_cfg": block, "final_norm": False}


def pair(shape: BlockShape) -> nn.Module:
    """One pair of our bidirectional stack, with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BidirectionalStack(**_fields(shape), n_layer=2)


class ByHand(nn.Module):
    """The same pair: two norms and blocks, and flips."""

    def __init__(self, shape: BlockShape) -> None:
        """Take the layers of the stack."""
        super().__init__()
        self.layers = pair(shape).layers

    def forward(self, x: Tensor) -> Tensor:
        """(b, t, d) -> (b, t, d)."""
        there, back = self._parts(0), self._parts(1)
        f, g = there[1](there[0](x)), back[1](back[0](x.flip(1))).flip(1)
        return x + (f + g) / 2

    def _parts(self, index: int) -> tuple[Any, Any]:
        layer: Any = self.layers[index]  # type: ignore[index]
        return layer.norm, layer.mixer


def pair_case(mode: Mode, shape: BlockShape) -> Case:
    """A bidirectional pair beside two blocks and flips by hand."""
    builders: dict[str, Callable[[BlockShape], nn.Module]] = {"pair": pair, "by hand": ByHand}
    contenders = tuple(
        Contender(
            name=name,
            setup=partial(set_up_block, build, mode, shape),
            tiny=partial(set_up_block, build, mode, TINY),
            computes="pair",
        )
        for name, build in builders.items()
    )
    return Case(name=f"stacks/pair/t{shape.t}/{mode}", contenders=contenders, baseline="by hand")


def deep(depth: int, shape: BlockShape) -> nn.Module:
    """A stack whose last two passes keep a graph."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Stack(**_fields(shape), n_layer=1, n_virtual=depth, grad_horizon=2)


def horizon_case(shape: BlockShape) -> Case:
    """Training at several depths, two passes of each within the horizon."""
    contenders = tuple(
        Contender(
            name=f"{depth} passes",
            setup=partial(set_up_block, partial(deep, depth), "forward+backward", shape),
            tiny=partial(set_up_block, partial(deep, depth), "forward+backward", TINY),
            computes=f"stack of {depth}",
        )
        for depth in DEPTHS
    )
    return Case(name="stacks/horizon", contenders=contenders, baseline=f"{DEPTHS[0]} passes")


def _set_up_steps(fields: dict[str, Any], shape: BlockShape) -> Call:
    """One token through a stack; each call continues from the cache that the one before it left."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stack = Stack(**_fields(shape), **fields).eval()
        x_bd = torch.randn(shape.batch, shape.d_model)
    cache = stack.init_cache(shape.batch)

    def step() -> dict[str, Tensor]:
        nonlocal cache
        with torch.no_grad():
            y_bd, cache = stack.step(x_bd, cache)
        return {"y": y_bd}

    return forward(step)


def virtual_case(shape: BlockShape) -> Case:
    """Steps of eight virtual layers over two beside those of eight real ones."""
    kinds: dict[str, dict[str, Any]] = {"virtual": {"n_layer": 2, "n_virtual": 8}, "real": {"n_layer": 8}}
    contenders = tuple(
        Contender(
            name=name,
            setup=partial(_set_up_steps, fields, shape),
            tiny=partial(_set_up_steps, fields, TINY),
            computes=f"{name} layers",
        )
        for name, fields in kinds.items()
    )
    return Case(name="stacks/virtual/step", contenders=contenders, baseline="real")


CASES: tuple[Case, ...] = (
    *(pair_case(mode, dataclasses.replace(LAYER_130M, t=512)) for mode in MODES),
    horizon_case(_NARROW),
    virtual_case(_NARROW),
)
