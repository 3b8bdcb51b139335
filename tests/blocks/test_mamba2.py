import math

import numpy as np
import pytest
import torch

from anymamba import Mamba2, Mamba2Cache, Mamba2Config, Mamba3
from tests.blocks.families import SMALL


def make_block(dtype=torch.float64, **options):
    block = Mamba2(**{**SMALL, **options}, dtype=dtype)
    if block.config.learnable_init_states:
        block.init_states.data.normal_()
    return block


def test_a_learnable_start_is_the_state_and_is_not_added_to_a_cache():
    block = make_block(learnable_init_states=True)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    fresh = block.init_cache(2)
    assert torch.equal(fresh.ssm[1], block.init_states)
    assert torch.equal(block.prefill(x)[0], block.prefill(x, fresh)[0])
    zeros = Mamba2Cache(fresh.conv, torch.zeros_like(fresh.ssm))
    block_without = make_block()
    block_without.load_state_dict({n: p for n, p in block.state_dict().items() if n != "init_states"})
    assert torch.equal(block.prefill(x, zeros)[0], block_without(x))
    assert torch.equal(block.step(x[:, 0], zeros)[0], block_without.step(x[:, 0])[0])


def test_initialization_is_the_official_one():
    block = Mamba2(d_model=512, conv_init=0.25, A_init_range=(2, 3), dt_min=0.01, dt_max=0.02)
    a = block.A_log.exp()
    assert 2 <= a.min() <= a.max() <= 3
    dt = torch.nn.functional.softplus(block.dt_bias)
    assert 0.0099 < dt.min() <= dt.max() < 0.0201
    assert 0.2 < block.conv1d.weight.abs().max() <= 0.25
    assert (block.D == 1).all()
    assert (block.norm.weight == 1).all()
    assert block.in_proj.weight.abs().max() <= 1 / math.sqrt(512)
    assert block.in_proj.bias is None
    assert all(p._no_weight_decay for p in (block.dt_bias, block.A_log, block.D))


def test_a_config_a_number_or_fields_build_the_same_block():
    shapes = [
        {name: p.shape for name, p in block.named_parameters()}
        for block in (Mamba2(Mamba2Config(**SMALL)), Mamba2(16, d_state=8, headdim=8), Mamba2(**SMALL))
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert Mamba2(Mamba2Config(**SMALL), device="meta").in_proj.weight.is_meta


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"headdim": 7}, "headdim must divide the 32 channels of the SSM, got headdim = 7"),
        ({"ngroups": 3}, "ngroups must divide the 4 heads, got ngroups = 3"),
        ({"expand": 1.3}, "must be an integer, got 1.3"),
        ({"d_ssm": 64}, "d_ssm must be between 1 and d_inner = 32, got 64"),
        ({"d_conv": 0}, "d_conv must be at least 1, got 0"),
        ({"chunk_size": 0}, "chunk_size must be None or at least 1, got 0"),
        ({"A_init_range": (0, 1)}, "A_init_range must satisfy"),
        ({"dt_min": 1, "dt_max": 0.1}, "dt_min <= dt_max must hold"),
        ({"dt_limit": (1, 0)}, "dt_limit must satisfy"),
    ],
)
def test_a_config_that_cannot_work_is_rejected(fields, message):
    with pytest.raises(ValueError, match=f"Mamba2Config: .*{message}"):
        Mamba2(**{**SMALL, **fields})


@pytest.mark.usefixtures("unchecked")
def test_a_config_and_fields_together_are_rejected():
    with pytest.raises(TypeError, match=r"not both; got also \['headdim'\]"):
        Mamba2(Mamba2Config(**SMALL), headdim=4)
    with pytest.raises(TypeError, match="has no field 'd_stat'; did you mean d_state"):
        Mamba2(16, d_stat=8)


def test_options_of_the_official_kernels_are_ignored():
    assert Mamba2(16, headdim=8, layer_idx=3, use_mem_eff_path=True).config == Mamba2Config(d_model=16, headdim=8)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("field", "value"), [("d_model", 16.0), ("headdim", "8"), ("d_state", True)])
def test_sizes_are_integers(field, value):
    with pytest.raises(TypeError, match=f"{field} must be an integer, got {value!r}"):
        Mamba2(**{**SMALL, field: value})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "value"), [("x", np.zeros((2, 5, 16))), ("mask", [5, 3]), ("cu_seqlens", [0, 5]), ("cache", None)]
)
def test_what_is_no_tensor_is_rejected_by_name(name, value):
    value = Mamba3(16, d_state=8, headdim=8).init_cache(2) if name == "cache" else value
    arguments = {"x": torch.randn(2, 5, 16), name: value}
    with pytest.raises(TypeError, match=f"{name} must be a .*, got {type(value).__name__}"):
        make_block(torch.float32).prefill(**arguments)


@pytest.mark.usefixtures("unchecked")
def test_bad_input_says_what_was_expected_and_what_came():
    block = make_block(torch.float32)
    x, cache = torch.randn(2, 5, 16), make_block(torch.float32).init_cache(3)
    with pytest.raises(ValueError, match=r"x must have shape \(b, t, d=16\), got \(2, 5, 15\)"):
        block(x[..., :15])
    with pytest.raises(ValueError, match=r"x must have shape \(b, t, d=16\), got \(5, 16\)"):
        block(x[0])
    with pytest.raises(ValueError, match="at least one step, got t = 0"):
        block(x[:, :0])
    with pytest.raises(TypeError, match=r"x must be torch.float32, got torch.float64"):
        block(x.double())
    with pytest.raises(ValueError, match="x must be on cpu, got meta"):
        block(x.to("meta"))
    with pytest.raises(ValueError, match=r"cache.conv must have shape \(2, 48, 4\), got \(3, 48, 4\)"):
        block.prefill(x, cache)
    with pytest.raises(ValueError, match=r"Mamba2.step: cache.conv must have shape"):
        block.step(x[:, 0], cache)
    with pytest.raises(TypeError, match=r"cache.ssm must be torch.float32, got torch.float64"):
        block.step(x[:, 0], Mamba2Cache(cache.conv[:2], cache.ssm[:2].double()))
    with pytest.raises(ValueError, match="cu_seqlens cannot be combined with mask"):
        block(x[:1], mask=torch.ones(1, 5).bool(), cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"boolean mask must have shape \(b=2, t=5\), got \(2, 4\)"):
        block(x, mask=torch.ones(2, 4).bool())
    with pytest.raises(ValueError, match="lengths must be between 0 and t = 5"):
        block(x, mask=torch.tensor([6, 1]))
    with pytest.raises(TypeError, match="mask must be boolean"):
        block(x, mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="strictly increasing"):
        block(x[:1], cu_seqlens=torch.tensor([0, 3, 3, 5]))
