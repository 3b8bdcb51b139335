"""Against vectors recorded from the official implementation."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from anymamba import Mamba2, SsdPath
from tests.scan.cases import ALGORITHMS
from tests.support import assert_near

FILES = sorted((Path(__file__).parents[1] / "golden").glob("mamba2_*.safetensors"))


def read(file):
    with safe_open(file, "pt") as golden:
        config = json.loads(golden.metadata()["config"])
        tensors = {name: golden.get_tensor(name) for name in golden.keys()}  # noqa: SIM118
    del config["use_mem_eff_path"]  # which of its kernels the official block uses
    if "dt_limit" in config:
        config["dt_limit"] = tuple(config["dt_limit"])
    block = Mamba2(**config)
    parameters = {name[6:]: x for name, x in tensors.items() if name.startswith("param.")}
    block.load_state_dict(parameters, strict=True)
    return block, tensors


def test_all_recorded_options_are_here():
    assert len(FILES) == 8


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_outputs_states_and_gradients_are_the_official_ones(file, algorithm):
    block, golden = read(file)
    u = golden["input.u"].requires_grad_()
    y, cache = block.prefill(u, path=SsdPath(algorithm))
    (y * golden["input.head"]).sum().backward()
    assert (y - golden["output.y"]).abs().max() <= 5e-6
    assert (cache.conv - golden["state.conv"]).abs().max() <= 5e-6
    assert (cache.ssm - golden["state.ssm"]).abs().max() <= 5e-6
    assert_near(u.grad, golden["grad.u"], 1e-5)
    for name, parameter in block.named_parameters():
        assert_near(parameter.grad, golden[f"grad.{name}"], 1e-5, name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_steps_are_the_official_ones(file):
    block, golden = read(file)
    cache = None
    with torch.no_grad():
        for t in range(golden["input.u"].shape[1]):
            y, cache = block.step(golden["input.u"][:, t], cache)
            assert (y - golden["output.y"][:, t]).abs().max() <= 5e-6
    assert (cache.ssm - golden["state.ssm"]).abs().max() <= 5e-6
