"""What is odd but right is computed as its plain form is, and what is wrong meets one sentence."""

import contextlib

import pytest
import torch

from anymamba import SsdPath
from anymamba.core.registry import kernels_off
from tests.blocks.families import FEW, FEW_BY_ALGORITHM, PATHWAYS, make_block, random_cache, results, unroll
from tests.support import FLOOR, assert_all_near


@pytest.mark.parametrize("t", [1, 9])
@pytest.mark.parametrize(("options", "algorithm"), FEW_BY_ALGORITHM)
def test_a_batch_of_one_trains(options, algorithm, t):
    """A dimension of one has strides that say nothing, and a copy keeps them."""
    block = make_block(options)
    x, cache = torch.randn(1, t, 16, dtype=torch.float64), random_cache(block, 1)
    stepped = results(block, x, cache, unroll)
    for pathway in PATHWAYS[type(block)]:
        path = SsdPath(algorithm, 4, pathway)
        found = results(block, x, cache, lambda b, x, c, path=path: b.prefill(x, c, path=path))
        assert_all_near(found, stepped, FLOOR[torch.float64])


def spread(tensor):
    """The same numbers in every second place of a wider tensor."""
    return torch.stack([tensor, torch.full_like(tensor, float("nan"))], -1)[..., 0]


@pytest.mark.parametrize("run", [unroll, lambda b, x, c: b.prefill(x, c)], ids=["steps", "prefill"])
@pytest.mark.parametrize("options", FEW)
def test_a_cache_need_not_be_contiguous(options, run):
    block, x = make_block(options), torch.randn(2, 5, 16, dtype=torch.float64)
    cache = random_cache(block, 2)
    strided = type(cache)(*(spread(tensor.detach()).requires_grad_() for tensor in cache))
    assert not any(tensor.is_contiguous() for tensor in strided)
    assert_all_near(results(block, x, strided, run), results(block, x, cache, run), FLOOR[torch.float64])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("options", FEW)
def test_what_is_no_tensor_is_refused(options):
    block = make_block(options)
    for call in (block, block.prefill, block.step):
        for x in (None, [[0.0] * 16]):
            with pytest.raises(TypeError, match=rf"x must be a tensor, got {type(x).__name__}"):
                call(x)


@pytest.mark.parametrize("options", [*FEW, "mamba1 weighted inner norms", "mamba2 learnable start", "mamba3 out norm"])
def test_a_parameter_that_was_freed_is_named(options):
    """Read all the same, it would end the process."""
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    for name, _ in make_block(options).named_parameters():
        block = make_block(options)
        with torch.no_grad():
            block.step(x[:, 0])
        block.get_parameter(name).untyped_storage().resize_(0)
        for call in (lambda b: b(x), lambda b: b.step(x[:, 0]), lambda b: b.step_infinite(x[:, 0])):
            for context in (contextlib.nullcontext, torch.no_grad, kernels_off):
                with context(), pytest.raises(ValueError, match=rf"the parameter {name} has no memory"):
                    call(block)
