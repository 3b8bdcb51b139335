"""The cases of the compiled kernels: against the portable paths, and against the projections no block can avoid."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from anymamba import SsdPath
from benchmarks.harness import Call, Case, Contender, forward
from benchmarks.mamba2 import (
    LAYER_130M,
    MODES,
    SEEDS,
    TINY,
    BlockShape,
    Mode,
    Projections,
    our_block,
    set_up_ssd,
    set_up_step,
    transformers_block,
)
from benchmarks.mamba3 import sequence_case

PATHS = (SsdPath.fused(), SsdPath.serial_recalculated(), SsdPath.serial(), SsdPath.minimal(64))
GROWTH = tuple(2**i for i in range(8, 18))
SEGMENT = 2048


def set_up_product(shape: BlockShape) -> Call:
    """Return a call of one torch matrix product with as many multiplications as the SSD's forward pass."""
    n, p, chunk = shape.d_state, shape.headdim, SsdPath.fused().chunk_len_or_optimal(shape.d_state, shape.headdim)
    a_token = shape.heads * (2 * n * p + (chunk + 1) * p // 2) + (chunk + 1) * n // 2
    size = 512
    a = torch.randn(max(1, shape.batch * shape.t * a_token // size**2), size)
    b = torch.randn(size, size)
    return forward(lambda: {"y": a @ b})


def scan_case(mode: Mode) -> Case:
    """Return the cases of the SSD, by the compiled kernels and by the portable algorithms."""
    contenders = tuple(
        Contender(
            name=path.algorithm,
            setup=partial(set_up_ssd, path, mode, LAYER_130M),
            tiny=partial(set_up_ssd, path, mode, TINY),
            computes="ssd",
        )
        for path in PATHS
    )
    if mode == "forward":
        product = Contender(
            name="as much arithmetic in one product",
            setup=partial(set_up_product, LAYER_130M),
            tiny=partial(set_up_product, TINY),
            computes="product",
        )
        contenders = (product, *contenders)
    return Case(name=f"kernels/scan/t{LAYER_130M.t}/{mode}", contenders=contenders, baseline="fused")


def step_case(batch: int) -> Case:
    """Return the cases of one token: our block, its projections alone, and transformers' block."""
    shape = dataclasses.replace(LAYER_130M, batch=batch, t=64)
    builders = (
        ("projections alone", Projections, "projections", "anymamba"),
        ("anymamba", our_block, "step", "anymamba"),
        ("transformers", transformers_block, "step", "transformers"),
    )
    contenders = tuple(
        Contender(
            name=name,
            setup=partial(set_up_step, build, shape),
            tiny=partial(set_up_step, build, TINY),
            computes=computes,
            library=library,
        )
        for name, build, computes, library in builders
    )
    return Case(name=f"kernels/step/b{batch}", contenders=contenders, baseline="projections alone")


def set_up_growth(t: int, d_model: int = LAYER_130M.d_model) -> Call:
    """Return a call of our block over `t` tokens in segments, so that memory does not grow with the length."""
    block = our_block(dataclasses.replace(LAYER_130M, d_model=d_model))
    segment_btd = torch.randn(1, min(t, SEGMENT), d_model, generator=torch.Generator().manual_seed(3))

    def run() -> dict[str, Tensor]:
        cache = None
        for _ in range(t // segment_btd.shape[1]):
            y_btd, cache = block.prefill(segment_btd, cache)
        return {"y": y_btd}

    return forward(run)


def growth_case() -> Case:
    """Return the case of time against length: every doubling of the length should double the time."""
    contenders = tuple(
        Contender(
            name=f"t{t}",
            setup=partial(set_up_growth, t),
            tiny=partial(set_up_growth, 256, 128),
            computes=f"{t} tokens",
            heavy=t > 16384,
        )
        for t in GROWTH
    )
    return Case(name="kernels/growth", contenders=contenders, baseline=f"t{SEGMENT}")


CASES: tuple[Case, ...] = (
    *(scan_case(mode) for mode in MODES),
    step_case(1),
    step_case(8),
    *(sequence_case("kernels/mamba3/t2048", mode, LAYER_130M, SsdPath.fused()) for mode in MODES),
    *(sequence_case("kernels/mamba3/seeds", mode, SEEDS, SsdPath.fused()) for mode in MODES),
    growth_case(),
)
