"""Odd but valid inputs are computed as their plain form is, and invalid ones raise one sentence."""

import contextlib

import pytest
import torch

from anymamba import Mamba1, Mamba2, Mamba3, SsdPath
from anymamba.blocks import Block
from anymamba.core.operators import Operator
from anymamba.core.registry import Implementation, kernels_off
from tests.blocks.families import FEW, FEW_BY_ALGORITHM, OPTIONS, PATHWAYS, make_block, random_cache, results, unroll
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
        prefilled = results(block, x, cache, lambda b, x, c, path=path: b.prefill(x, c, path=path))
        assert_all_near(prefilled, stepped, FLOOR[torch.float64])


def spread(tensor):
    """Return the same numbers as every second element of a wider tensor."""
    unused = float("nan") if tensor.is_floating_point() else -1
    return torch.stack([tensor, torch.full_like(tensor, unused)], -1)[..., 0]


@pytest.mark.parametrize("run", [unroll, lambda b, x, c: b.prefill(x, c)], ids=["steps", "prefill"])
@pytest.mark.parametrize("options", FEW)
def test_a_cache_need_not_be_contiguous(options, run):
    block, x = make_block(options), torch.randn(2, 5, 16, dtype=torch.float64)
    cache = random_cache(block, 2)
    strided = type(cache)(*(spread(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in cache))
    assert not any(tensor.is_contiguous() for tensor in strided if tensor.numel())
    assert_all_near(results(block, x, strided, run), results(block, x, cache, run), FLOOR[torch.float64])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("options", FEW)
def test_what_is_no_tensor_is_rejected(options):
    block = make_block(options)
    for call in (block, block.prefill, block.step):
        for x in (None, [[0.0] * 16]):
            with pytest.raises(TypeError, match=rf"x must be a tensor, got {type(x).__name__}"):
                call(x)


@pytest.mark.parametrize("options", [*FEW, "mamba1 weighted inner norms", "mamba2 learnable start", "mamba3 out norm"])
def test_a_parameter_that_was_freed_is_named(options):
    """Reading it would end the process."""
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    for name, _ in make_block(options).named_parameters():
        block = make_block(options)
        with torch.no_grad():
            block.step(x[:, 0])
        block.get_parameter(name).untyped_storage().resize_(0)
        calls = [lambda b: b(x), lambda b: b.step(x[:, 0])]
        if type(block).step_infinite is not Block.step_infinite:
            calls.append(lambda b: b.step_infinite(x[:, 0]))
        for call in calls:
            for context in (contextlib.nullcontext, torch.no_grad, kernels_off):
                with context(), pytest.raises(ValueError, match=rf"the parameter {name} has no memory"):
                    call(block)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("options", FEW)
def test_two_rows_are_not_mistaken_for_an_output_and_a_cache(options):
    """`y, cache = block.forward(x, None)` would unpack the rows of a batch of two."""
    block, x = make_block(options), torch.randn(2, 5, 16, dtype=torch.float64)
    for cache in (None, block.init_cache(2)):
        with pytest.raises(TypeError, match=r"forward: return_cache must be given with a cache: .*prefill"):
            block.forward(x, cache)
        y, new = block(x, cache, return_cache=True)
        assert torch.equal(block(x, cache, return_cache=False), y)
        assert type(new) is block.CACHE


@pytest.mark.usefixtures("unchecked")
def test_a_path_is_given_by_its_name():
    block, x = make_block("mamba2", torch.float32), torch.randn(2, 5, 16)
    for call in (block.prefill, block.forward):
        with pytest.raises(TypeError, match=r"must be given by name, such as path=SsdPath\(algorithm='minimal'"):
            call(x, None, SsdPath.minimal(4))


@pytest.mark.parametrize("family", [Mamba1, Mamba2, Mamba3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_default_dtype_is_that_of_the_parameters(family, dtype):
    expected = {name: x.dtype for name, x in family(32, dtype=dtype).named_parameters()}
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        block = family(32)
    finally:
        torch.set_default_dtype(previous)
    assert {name: x.dtype for name, x in block.named_parameters()} == expected


@pytest.mark.parametrize("options", OPTIONS)
def test_on_the_meta_device_nothing_is_computed_but_shapes(options, monkeypatch):
    """No implementation runs, so no loop over time does, whatever the length."""
    block, t = make_block(options).to("meta"), 2**18
    x = torch.empty(1, t, 16, dtype=torch.float64, device="meta", requires_grad=True)
    implementation = Implementation(lambda *_: pytest.fail("computed"), lambda *_: pytest.fail("computed"))
    monkeypatch.setattr(Operator, "choose", lambda *_: implementation)
    y, cache = block.prefill(x)
    assert y.shape == x.shape
    time = {name: 1 + (name in cache.GROWING_FIELDS) for name in cache._fields}
    assert {name: getattr(cache, name).shape[time[name] :] for name in cache._fields} == block.cache_shapes()
    y.sum().backward()
    assert x.grad.shape == x.shape
