"""The cases of Mamba-1: a layer of mamba-130m, compared with transformers' block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from anymamba import Mamba1, SsdPath
from anymamba.core.linear import apply_linear
from benchmarks.harness import Case, Contender
from benchmarks.mamba2 import TINY, BlockShape, Mode, OnPath, set_up_block, set_up_step
from benchmarks.peers import TransformersMamba1

LAYER_130M = BlockShape(batch=1, t=2048, d_model=768, d_state=16, headdim=1)


def our_block(shape: BlockShape) -> Mamba1:
    """Return our block with the same weights at every call; the skip is random too, so that it matters."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        block = Mamba1(d_model=shape.d_model, d_state=shape.d_state)
        block.D.add_(0.1 * torch.randn_like(block.D))
    return block


def portable_block(shape: BlockShape) -> nn.Module:
    """Return our block on the portable algorithm."""
    return OnPath(our_block(shape), SsdPath.serial_recalculated())


def transformers_block(shape: BlockShape) -> TransformersMamba1:
    """Return transformers' block with the weights of ours."""
    return TransformersMamba1(our_block(shape).state_dict(), d_model=shape.d_model, d_state=shape.d_state)


class Projections(nn.Module):
    """The four projections of a block with nothing between them: (b, t, d) -> (b, t, d)."""

    def __init__(self, shape: BlockShape) -> None:
        """Keep the projections of our block."""
        super().__init__()
        block = our_block(shape)
        self.width = block.config.d_inner
        self.rank = block.config.dt_width
        self.in_proj = block.in_proj
        self.x_proj = block.x_proj
        self.dt_proj = block.dt_proj
        self.out_proj = block.out_proj

    def forward(self, x: Tensor) -> Tensor:
        """Project in, select, and project out."""
        inner_bti = apply_linear(self.in_proj, x)[..., : self.width]
        step_bti = self.dt_proj(apply_linear(self.x_proj, inner_bti)[..., : self.rank])
        return apply_linear(self.out_proj, step_bti)


def block_case(mode: Mode, t: int) -> Case:
    """Return the cases of our block, its portable algorithm, its projections alone, and transformers' block."""
    shape = dataclasses.replace(LAYER_130M, t=t)
    builders: tuple[tuple[str, Callable[[BlockShape], nn.Module], str, str], ...] = (
        ("anymamba", our_block, "block", "anymamba"),
        ("anymamba (portable)", portable_block, "block", "anymamba"),
        ("projections alone", Projections, "projections", "anymamba"),
        ("transformers", lambda shape: transformers_block(shape).mixer, "block", "transformers"),
    )
    contenders = tuple(
        Contender(
            name=name,
            setup=partial(set_up_block, build, mode, shape),
            tiny=partial(set_up_block, build, mode, TINY),
            computes=computes,
            library=library,
            heavy=library == "transformers" and mode != "forward",
        )
        for name, build, computes, library in builders
    )
    return Case(name=f"mamba1/t{t}/{mode}", contenders=contenders, baseline="anymamba")


def step_case() -> Case:
    """Return the cases of one token from a cache."""
    contenders = tuple(
        Contender(
            name=name,
            setup=partial(set_up_step, build, LAYER_130M),
            tiny=partial(set_up_step, build, TINY),
            computes="step",
            library=name,
        )
        for name, build in (("anymamba", our_block), ("transformers", transformers_block))
    )
    return Case(name="mamba1/step", contenders=contenders, baseline="anymamba")


# A training step of transformers at 2,048 tokens did not finish within five minutes.
CASES = (block_case("forward", 2048), block_case("forward+backward", 512), step_case())
