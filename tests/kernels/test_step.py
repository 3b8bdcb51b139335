"""The compiled decode step: the same numbers as the portable one, from a cache that it leaves alone."""

import pytest
import torch

from anymamba import Mamba2
from anymamba.kernels import library
from tests.support import FLOOR, assert_near

pytestmark = pytest.mark.skipif(library.LIBRARY.handle is None, reason=library.LIBRARY.reason)

OPTIONS = {
    "base": {},
    "groups": {"ngroups": 2},
    "awkward": {"headdim": 3, "d_model": 15, "d_state": 17},
    "skip per channel": {"D_has_hdim": True},
    "norm first": {"norm_before_gate": True, "ngroups": 2},
    "no norm": {"rmsnorm": False},
    "mlp": {"d_ssm": 16},
    "dt limit": {"dt_limit": (0.01, 0.02)},
    "no conv bias": {"conv_bias": False},
    "width 1": {"d_conv": 1},
}


def steps(block, tokens):
    """Outputs of a few steps, and the last cache."""
    cache, outputs = None, []
    for x in tokens:
        y, cache = block.step(x, cache)
        outputs.append(y)
    return torch.stack(outputs), cache


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_compiled_step_equals_the_portable_one(options, dtype, monkeypatch):
    block = Mamba2(**{"d_model": 16, "d_state": 9, "headdim": 8, **options}, dtype=dtype)
    tokens = torch.randn(5, 3, block.config.d_model, dtype=dtype)
    with torch.no_grad():
        y, cache = steps(block, tokens)
        monkeypatch.setattr("anymamba.kernels.library.missing", lambda device, dtype: "switched off by the test")
        y_portable, cache_portable = steps(block, tokens)
    assert_near(y, y_portable, FLOOR[dtype])
    assert_near(cache.ssm, cache_portable.ssm, FLOOR[dtype])
    assert torch.equal(cache.conv, cache_portable.conv)


@torch.no_grad()
def test_the_old_cache_does_not_change():
    block = Mamba2(d_model=16, d_state=8, headdim=8)
    _, cache = block.step(torch.randn(2, 16))
    before = cache.clone()
    block.step(torch.randn(2, 16), cache)
    assert torch.equal(cache.conv, before.conv)
    assert torch.equal(cache.ssm, before.ssm)


@torch.no_grad()
def test_neither_threads_nor_the_batch_move_a_bit():
    projected = {"z": torch.randn(6, 32), "xbc": torch.randn(6, 32 + 2 * 9), "dt": torch.randn(6, 4)}
    cache = (torch.randn(6, 50, 4), torch.randn(6, 4, 8, 9))
    parameters = (torch.randn(50, 4), torch.randn(50), torch.randn(4), torch.randn(4), torch.randn(4), torch.randn(32))
    others = (1, 32, False, 1e-5, 0.0, float("inf"))

    def run(rows):
        inputs = [x[rows] for x in (*projected.values(), *cache)]
        return torch.ops.anymamba.mamba2_step(*inputs, *parameters, *others)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    together = run(slice(None))
    torch.set_num_threads(1)
    for row in range(6):
        for alone, batched in zip(run(slice(row, row + 1)), together, strict=True):
            assert torch.equal(alone[0], batched[row])
    torch.set_num_threads(before)


def test_a_step_that_needs_a_gradient_has_one():
    block = Mamba2(d_model=16, d_state=8, headdim=8)
    y, _ = block.step(torch.randn(2, 16))
    y.sum().backward()
    assert all(p.grad is not None for p in block.parameters())


@torch.no_grad()
@pytest.mark.usefixtures("unchecked")
def test_the_operator_passes_opcheck():
    inputs = (torch.randn(2, 8), torch.randn(2, 14), torch.randn(2, 2), torch.randn(2, 14, 4), torch.randn(2, 2, 4, 3))
    parameters = (torch.randn(14, 4), None, torch.randn(2), torch.randn(2), torch.randn(8), None)
    arguments = (*inputs, *parameters, 1, 8, False, 1e-5, 0.0, 1.0)
    torch.library.opcheck(torch.ops.anymamba.mamba2_step.default, arguments)
