"""Promises of Mamba-1 alone."""

import math

import pytest
import torch

from anymamba import Mamba1, Mamba1Config
from tests.support import relative_error


def test_sizes_and_initial_values_are_the_official_ones():
    block = Mamba1(d_model=40, d_state=6)
    assert {name: tuple(p.shape) for name, p in block.named_parameters()} == {
        "A_log": (80, 6),
        "D": (80,),
        "in_proj.weight": (160, 40),
        "conv1d.weight": (80, 1, 4),
        "conv1d.bias": (80,),
        "x_proj.weight": (3 + 12, 80),
        "dt_proj.weight": (80, 3),
        "dt_proj.bias": (80,),
        "out_proj.weight": (40, 80),
    }
    assert torch.allclose(block.A_log.exp(), torch.arange(1.0, 7.0).expand(80, 6))
    assert (block.D == 1).all()
    sizes = torch.nn.functional.softplus(block.dt_proj.bias)
    assert sizes.min() > 0.00099
    assert sizes.max() < 0.101
    assert block.dt_proj.weight.abs().max() <= 1 / math.sqrt(3)
    constant = Mamba1(d_model=40, dt_init="constant", dt_scale=2.0, dt_rank=4)
    assert torch.allclose(constant.dt_proj.weight, torch.ones(()))


def test_rates_and_skips_stay_wide():
    block = Mamba1(d_model=16, dtype=torch.bfloat16)
    assert block.A_log.dtype == block.D.dtype == torch.float32
    assert block.dt_proj.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_step_sizes_keep_their_digits(how):
    """A bias of -7 has two digits in bfloat16, were the sum with it rounded."""
    block = Mamba1(d_model=64)
    with torch.no_grad():
        block.dt_proj.bias.copy_(block.dt_proj.bias.bfloat16())  # so that both dtypes have the same
    x = 0.1 * torch.randn(1, 50, 128)
    expected = torch.nn.functional.softplus(block._project_selection(x)[0])
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            dt = block._project_selection(x)[0]
    else:
        dt = block.bfloat16()._project_selection(x.bfloat16())[0]
    assert dt.dtype == torch.float32
    assert relative_error(torch.nn.functional.softplus(dt), expected) < 2e-3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dt_rank": 0}, "dt_rank must be .auto. or an integer, at least 1, got 0"),
        ({"dt_rank": True}, "dt_rank must be .auto. or an integer, at least 1, got True"),
        ({"dt_scale": -1}, "dt_scale must be a positive number, got -1"),
        ({"dt_scale": "x"}, "dt_scale must be a positive number, got .x"),
        ({"dt_init": "zero"}, "dt_init must be random or constant, got 'zero"),
        ({"dt_min": 0.2}, "0 < dt_min <= dt_max must hold, got 0.2 and 0.1"),
        ({"expand": 1.3}, "expand · d_model must be an integer"),
        ({"d_state": 0}, "d_state must be at least 1, got 0"),
    ],
)
def test_what_cannot_work_is_rejected(fields, message, unchecked):
    with pytest.raises(ValueError, match=message):
        Mamba1Config(d_model=16, **fields)


def test_a_cache_of_another_block_is_rejected(unchecked):
    block, x = Mamba1(d_model=16), torch.randn(2, 16)
    with pytest.raises(TypeError, match="cache must be a Mamba1Cache, got tuple"):
        block.step(x.requires_grad_(), (1, 2))
    with pytest.raises(ValueError, match=r"cache.ssm must have shape \(2, 32, 16\)"):
        block.step(x, Mamba1(d_model=16, d_state=8).init_cache(2))
