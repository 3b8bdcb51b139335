"""Against vectors recorded from the official implementation."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from anymamba import Mamba1, Mamba2, Mamba3, SsdPath
from tests.blocks.families import ALGORITHMS, PATHWAYS
from tests.support import assert_near

FAMILIES = {"mamba1": Mamba1, "mamba2": Mamba2, "mamba3": Mamba3}
FILES = sorted((Path(__file__).parents[1] / "golden").glob("mamba[123]_*.safetensors"))


def read(file):
    with safe_open(file, "pt") as golden:
        config = json.loads(golden.metadata()["config"])
        tensors = {name: golden.get_tensor(name) for name in golden.keys()}  # noqa: SIM118
    for switch in ("use_mem_eff_path", "fuse_pregate_headwise_norm"):  # which of its kernels the official block uses
        config.pop(switch, None)
    if "dt_limit" in config:
        config["dt_limit"] = tuple(config["dt_limit"])
    block = FAMILIES[file.stem[:6]](**config)
    parameters = {name[6:]: x for name, x in tensors.items() if name.startswith("param.")}
    block.load_state_dict(parameters, strict=True)
    return block, tensors


def test_all_recorded_options_are_here():
    assert len(FILES) == 17


def assert_states(cache, golden, tolerance=5e-6):
    """Every state that the official cache holds; an angle modulo a full turn."""
    names = {"conv": "conv", "ssm": "ssm", "k": "k", "v": "v", "angle": "rotation"}
    states = {name[6:]: x for name, x in golden.items() if name.startswith("state.")}
    for name, expected in states.items():
        difference = (getattr(cache, names[name]) - expected).detach()
        if name == "angle":
            difference = difference - 2 * math.pi * torch.round(difference / (2 * math.pi))
        assert difference.abs().max() <= tolerance, name


CASES = [
    (file, algorithm, pathway)
    for file in FILES
    for algorithm in ALGORITHMS[FAMILIES[file.stem[:6]]]
    for pathway in PATHWAYS[FAMILIES[file.stem[:6]]]
]


@pytest.mark.parametrize(("file", "algorithm", "pathway"), CASES, ids=lambda case: getattr(case, "stem", case))
def test_outputs_states_and_gradients_are_the_official_ones(file, algorithm, pathway):
    block, golden = read(file)
    u = golden["input.u"].requires_grad_()
    y, cache = block.prefill(u, path=SsdPath(algorithm, pathway=pathway))
    (y * golden["input.head"]).sum().backward()
    assert (y - golden["output.y"]).abs().max() <= 5e-6
    assert_states(cache, golden)
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
    assert_states(cache, golden, 1e-5)  # a cache holds its angle in float32, so every step rounds it once
