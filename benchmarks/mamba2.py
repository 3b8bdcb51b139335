"""The cases of Mamba-2: the SSD alone, whole blocks against transformers, one token, and growth with length.

The SSD and the blocks have the sizes of a layer of mamba2-130m; `seeds` has those that burn-mamba reports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.blocks.mamba2 import Mamba2
from anymamba.core.linear import apply_linear
from anymamba.scan import SsdPath, ssd
from benchmarks.harness import Call, Case, Contender, forward, forward_backward
from benchmarks.peers import TransformersMamba2

Mode = Literal["forward", "forward+backward"]

MODES: tuple[Mode, ...] = ("forward", "forward+backward")
LENGTHS = (512, 2048, 8192)
SSD_PATHS = (SsdPath.serial_recalculated(), SsdPath.serial(), SsdPath.minimal())


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Sizes of a block with one group and expand = 2, and of its input."""

    batch: int
    t: int
    d_model: int
    d_state: int
    headdim: int

    @property
    def heads(self) -> int:
        """Return the number of heads h."""
        return 2 * self.d_model // self.headdim


LAYER_130M = BlockShape(batch=1, t=2048, d_model=768, d_state=128, headdim=64)
SEEDS = BlockShape(batch=2, t=256, d_model=256, d_state=64, headdim=64)
TINY = BlockShape(batch=1, t=256, d_model=128, d_state=32, headdim=64)


class Block(Protocol):
    """A block that can be timed token by token."""

    def prefill(self, x: Tensor, /) -> tuple[Tensor, Any]:
        """Map (b, t, d) to (b, t, d) and a cache."""

    def step(self, x: Tensor, cache: Any, /) -> tuple[Tensor, Any]:
        """Map (b, d) to (b, d) and the next cache."""


def set_up_ssd(path: SsdPath, mode: Mode, shape: BlockShape) -> Call:
    """Return a call of the SSD on random inputs, with step sizes and decay rates as officially initialized."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator)
    sizes_bt = (shape.batch, shape.t)
    inputs = {
        "x": normal(*sizes_bt, shape.heads, shape.headdim),
        "dt": F.softplus(normal(*sizes_bt, shape.heads) - 4),
        "A": -torch.empty(shape.heads).uniform_(1, 16, generator=generator),
        "B": normal(*sizes_bt, 1, shape.d_state),
        "C": normal(*sizes_bt, 1, shape.d_state),
        "D": normal(shape.heads),
    }
    if mode == "forward":
        return forward(lambda: dict(zip(("y", "final state"), ssd(**inputs, path=path), strict=True)))
    head = normal(*sizes_bt, shape.heads, shape.headdim)
    for tensor in inputs.values():
        tensor.requires_grad_()
    return forward_backward(lambda: ssd(**inputs, path=path)[0], head, inputs)


def our_block(shape: BlockShape) -> Mamba2:
    """Return our block with the same weights at every call; norm and skip are random too, so that both matter."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        block = Mamba2(d_model=shape.d_model, d_state=shape.d_state, headdim=shape.headdim)
        for parameter in (block.norm.weight, block.D):
            parameter.add_(0.1 * torch.randn_like(parameter))
    return block


def transformers_block(shape: BlockShape) -> TransformersMamba2:
    """Return transformers' block with the weights of ours."""
    weights = our_block(shape).state_dict()
    return TransformersMamba2(weights, d_model=shape.d_model, d_state=shape.d_state, headdim=shape.headdim)


def transformers_mixer(shape: BlockShape) -> nn.Module:
    """Return transformers' block as a module from (b, t, d) to (b, t, d)."""
    return transformers_block(shape).mixer


class OnPath(nn.Module):
    """A block on one path of the scan."""

    def __init__(self, block: nn.Module, path: SsdPath) -> None:
        """Keep the block and the path."""
        super().__init__()
        self.block = block
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, t, d) to (b, t, d)."""
        block: Any = self.block
        y_btd: Tensor = block.prefill(x, path=self.path)[0]
        return y_btd


class Projections(nn.Module):
    """The two projections of a block with nothing between them: (b, t, d) -> (b, t, d)."""

    def __init__(self, shape: BlockShape) -> None:
        """Keep the projections of our block."""
        super().__init__()
        block = our_block(shape)
        self.width = block.config.d_inner
        self.in_proj = block.in_proj
        self.out_proj = block.out_proj

    def forward(self, x: Tensor) -> Tensor:
        """Project in, drop all channels but those of the output projection, project out."""
        return apply_linear(self.out_proj, apply_linear(self.in_proj, x)[..., : self.width])

    def prefill(self, x: Tensor, /) -> tuple[Tensor, None]:
        """Process a sequence or a token as a block without a cache does."""
        return self(x), None

    def step(self, x: Tensor, cache: None, /) -> tuple[Tensor, None]:
        """Process a sequence or a token as a block without a cache does."""
        return self(x), None


class TorchProjections(Projections):
    """The same projections by torch's own product, as an `nn.Linear` computes it."""

    def forward(self, x: Tensor) -> Tensor:
        """Project in, drop all channels but those of the output projection, project out."""
        out: Tensor = self.out_proj(self.in_proj(x)[..., : self.width])
        return out


def portable_block(shape: BlockShape) -> nn.Module:
    """Return our block on the portable algorithm."""
    return OnPath(our_block(shape), SsdPath.serial_recalculated())


def set_up_block(build: Callable[[BlockShape], nn.Module], mode: Mode, shape: BlockShape) -> Call:
    """Return a call of a block on random input, with gradients of input and parameters if `mode` asks for them."""
    generator = torch.Generator().manual_seed(1)
    block = build(shape)
    x_btd, head_btd = torch.randn(2, shape.batch, shape.t, shape.d_model, generator=generator)
    if mode == "forward":
        return forward(lambda: {"y": block(x_btd)})
    x_btd.requires_grad_()
    return forward_backward(
        lambda: block(x_btd),
        head_btd,
        {"x": x_btd, **{name.removeprefix("block."): p for name, p in block.named_parameters()}},
    )


def set_up_step(build: Callable[[BlockShape], Block], shape: BlockShape) -> Call:
    """Return a call of one token after `shape.t` others; each call continues from the cache of the previous one."""
    generator = torch.Generator().manual_seed(1)
    block = build(shape)
    x_btd = torch.randn(shape.batch, shape.t, shape.d_model, generator=generator)
    x_bd = torch.randn(shape.batch, shape.d_model, generator=generator)
    with torch.no_grad():
        _, cache = block.prefill(x_btd)

    def step() -> dict[str, Tensor]:
        nonlocal cache
        y_bd, cache = block.step(x_bd, cache)
        return {"y": y_bd}

    return forward(step)


def ssd_case(t: int, mode: Mode) -> Case:
    """Return the cases of the SSD by each algorithm, with its default chunk length."""
    shape = dataclasses.replace(LAYER_130M, t=t)
    contenders = tuple(
        Contender(
            name=path.algorithm,
            setup=partial(set_up_ssd, path, mode, shape),
            tiny=partial(set_up_ssd, path, mode, TINY),
            computes="ssd",
        )
        for path in SSD_PATHS
    )
    return Case(name=f"ssd/t{t}/{mode}", contenders=contenders, baseline=SSD_PATHS[0].algorithm)


def block_case(name: str, mode: Mode, shape: BlockShape, *, heavy_peers: bool) -> Case:
    """Return the cases of our block, its portable algorithm, its projections alone, and transformers' block."""
    builders: tuple[tuple[str, Callable[[BlockShape], nn.Module], str, str], ...] = (
        ("anymamba", our_block, "block", "anymamba"),
        ("anymamba (portable)", portable_block, "block", "anymamba"),
        ("projections alone", Projections, "projections", "anymamba"),
        ("projections alone, torch's own product", TorchProjections, "projections", "anymamba"),
        ("transformers", transformers_mixer, "block", "transformers"),
    )
    contenders = tuple(
        Contender(
            name=contender,
            setup=partial(set_up_block, build, mode, shape),
            tiny=partial(set_up_block, build, mode, TINY),
            computes=computes,
            library=library,
            heavy=heavy_peers and library == "transformers",
        )
        for contender, build, computes, library in builders
    )
    return Case(name=f"{name}/{mode}", contenders=contenders, baseline="anymamba")


def step_case(name: str, shape: BlockShape) -> Case:
    """Return the cases of one token from a cache, by our block and by transformers'."""
    contenders = tuple(
        Contender(
            name=contender,
            setup=partial(set_up_step, build, shape),
            tiny=partial(set_up_step, build, TINY),
            computes="step",
            library=contender,
        )
        for contender, build in (("anymamba", our_block), ("transformers", transformers_block))
    )
    return Case(name=f"{name}/step", contenders=contenders, baseline="anymamba")


def growth_case(mode: Mode, short: int, long: int) -> Case:
    """Return the cases of our block at two lengths: their ratio shows how time grows with length."""
    contenders = tuple(
        Contender(
            name=f"t{t}",
            setup=partial(set_up_block, our_block, mode, dataclasses.replace(LAYER_130M, t=t)),
            tiny=partial(set_up_block, our_block, mode, TINY),
            computes=f"block of {t}",
        )
        for t in (short, long)
    )
    return Case(name=f"linear/{mode}", contenders=contenders, baseline=f"t{short}")


CASES: tuple[Case, ...] = (
    *(ssd_case(t, mode) for t in LENGTHS for mode in MODES),
    *(
        block_case(f"block/t{t}", mode, dataclasses.replace(LAYER_130M, t=t), heavy_peers=t == max(LENGTHS))
        for t in LENGTHS
        for mode in MODES
    ),
    *(block_case("seeds", mode, SEEDS, heavy_peers=False) for mode in MODES),
    step_case("seeds", SEEDS),
    *(growth_case(mode, 2048, 8192) for mode in MODES),
)
