import copy
import math

import pytest
import torch

from anymamba import Mamba1, Mamba2, Mamba3, MambaLM, check_finite
from anymamba.scan import scan
from tests.scan.cases import make_inputs
from tests.support import in_another_process

BLOCKS = [Mamba1(16, d_state=8), Mamba2(16, d_state=8, headdim=8), Mamba3(16, d_state=8, headdim=8)]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: type(block).__name__)
def test_the_first_tensor_that_is_not_finite_is_named_with_its_index(block):
    x = torch.randn(2, 5, 16)
    with check_finite():
        block(x)
        block(x, mask=torch.tensor([5, 0]))  # Mamba-1 marks padding with an infinite step
    x[1, 3, 7] = math.nan
    assert torch.isnan(block(x)).any()
    with check_finite(), pytest.raises(FloatingPointError, match=r"prefill: input x is not finite: nan at \(1, 3, 7\)"):
        block(x)


def test_a_broken_state_a_parameter_and_a_scan_are_named():
    block, x = Mamba2(16, d_state=8, headdim=8), torch.randn(1, 16)
    _, cache = block.step(x)
    cache.ssm[0, 1, 2, 3] = math.inf
    with (
        check_finite(),
        pytest.raises(FloatingPointError, match=r"step: input cache.ssm is not finite: inf at \(0, 1, 2, 3\)"),
    ):
        block.step(x, cache)
    model = MambaLM(d_model=16, n_layer=2, vocab_size=10, ssm_cfg={"layer": "Mamba2", "d_state": 8, "headdim": 8})
    with torch.no_grad():
        model.backbone.layers[1].mixer.conv1d.weight[3] = math.nan
    with (
        check_finite(),
        pytest.raises(
            FloatingPointError,
            match=r"layers.1: Mamba2.prefill: causal_conv: input weight is not finite: nan at \(3, 0\)",
        ),
    ):
        model(torch.arange(4).unsqueeze(0))
    inputs = make_inputs(dtype=torch.float32)
    inputs["k"][0, 0] = 3e38
    inputs["v"][0, 0] = 3e38
    with check_finite(), pytest.raises(FloatingPointError, match=r"^scan: result y is not finite"):
        scan(**inputs)


PARAMETERS = [(block, name) for block in BLOCKS for name, _ in block.named_parameters()]


@torch.no_grad()
@pytest.mark.parametrize(("block", "name"), PARAMETERS, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_whichever_parameter_is_broken_it_is_found_in_a_sequence_and_in_a_token(block, name):
    block, x = copy.deepcopy(block), torch.randn(2, 5, 16)
    block.get_parameter(name).view(-1)[1] = math.nan
    for call in (lambda: block(x), lambda: block.step(x[:, 0])):
        assert not torch.isfinite(call()[0]).all()
        with (
            check_finite(),
            pytest.raises(FloatingPointError, match=r"Mamba\d.(prefill|step): .* is not finite: nan at"),
        ):
            call()


def test_the_environment_switches_it_on():
    code = """
import torch
from anymamba import Mamba2
try:
    Mamba2(16, d_state=8, headdim=8)(torch.full((1, 2, 16), float("inf")))
except FloatingPointError as error:
    print(error)
"""
    assert "input x is not finite: inf at (0, 0, 0)" in in_another_process(code, ANYMAMBA_CHECK_FINITE="1")
