"""Prompts of few rows go through the compiled product, which computes a row the same alone and among others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anymamba.generation.prefill import prefill, start
from anymamba.generation.products import CompiledProducts
from anymamba.ground.operators import kernels_off
from anymamba.kernels.cpu.library import missing
from anymamba.kernels.cpu.product import MOST_ROWS, covers
from tests.models.cases import FAMILIES, small_lm
from tests.support import FLOOR, MODEL_FLOOR, assert_near

compiled = pytest.mark.skipif(bool(missing(torch.float32)), reason="no compiled kernels here")


def operands(m, i, o, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=generator) for shape in ((m, i), (o, i), (o,)))


def linear(*args):
    with torch.no_grad(), CompiledProducts():
        return F.linear(*args)


@compiled
@pytest.mark.parametrize(("i", "o"), [(1, 1), (7, 3), (64, 9), (100, 40), (768, 133)])
@pytest.mark.parametrize("m", [1, 2, 3, 31, 64, 65, MOST_ROWS])
def test_a_row_is_the_same_alone_and_among_others(m, i, o):
    x, weight, bias = operands(m, i, o)
    assert not covers(x, weight)  # a gradient could be asked for
    y = linear(x, weight, bias)
    assert_near(y, F.linear(x.double(), weight.double(), bias.double()), FLOOR[torch.float32])
    assert torch.equal(y, torch.cat([linear(row, weight, bias) for row in x.split(1)]))
    assert torch.equal(linear(x, weight), linear(x.flip(0), weight).flip(0))


@compiled
def test_any_layout_and_number_of_axes():
    x, weight, bias = operands(30, 20, 10)
    y = linear(x, weight, bias)
    assert torch.equal(linear(x.view(5, 6, 20), weight, bias), y.view(5, 6, 10))
    assert torch.equal(linear(x.T.contiguous().T, weight.T.contiguous().T, bias), y)
    assert torch.equal(linear(x[3], nn.Parameter(weight), bias), y[3])


def test_everything_else_is_left_to_torch():
    x, weight, bias = operands(MOST_ROWS + 1, 20, 10)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert linear(x[:0], weight).shape == (0, 10)
    assert linear(x[:2].double(), weight.double()).dtype == torch.float64
    few = x[:2].requires_grad_()
    with CompiledProducts():
        F.linear(few, weight).sum().backward()
    assert_near(few.grad, weight.sum(0).expand(2, -1), FLOOR[torch.float32])
    with torch.no_grad():
        plain = F.linear(x[:2], weight)
        with kernels_off(), CompiledProducts():
            assert torch.equal(F.linear(x[:2], weight), plain)
    with pytest.raises(RuntimeError, match="shapes"):
        linear(x, weight[:, 1:])


@compiled
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_gives_what_the_model_gives(family):
    model = small_lm(family)
    ids_1t = torch.randint(0, 61, (1, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.double()(ids_1t, logits="last").logits[:, 0]
    logits_1v, _ = prefill(model.float(), list(ids_1t))
    assert_near(logits_1v, expected, MODEL_FLOOR)
    state = start(model, ids_1t)
    assert torch.equal(state.logits, logits_1v)
