"""Against vectors recorded from the official implementation."""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from anymamba import Mamba1, Mamba2, Mamba3, SsdPath
from tests.blocks.families import ALGORITHMS, PATHWAYS, unroll
from tests.support import FLOOR, assert_near

# Relative to float64: what is official is at most 2.3e-6 away (a gradient), ours 2.3e-6 (an angle: a cache holds it in
# float32, and every step rounds it once).
GOLDEN_FLOOR = 2 * FLOOR[torch.float32]

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


def outcome(block, tensors, run):
    """Return outputs, the states that the official cache holds, and gradients, by name."""
    u = tensors["input.u"].to(block.in_proj.weight.dtype).detach().requires_grad_()
    y, cache = run(block, u)
    parameters = dict(block.named_parameters())
    leaves = [u, *parameters.values()]
    grads = torch.autograd.grad((y * tensors["input.head"]).sum(), leaves)
    tensors_by_name = {"y": y.detach()} | dict(
        zip(("grad.u", *(f"grad.{name}" for name in parameters)), grads, strict=True)
    )
    names = {"conv": "conv", "ssm": "ssm", "k": "k", "v": "v", "angle": "rotation"}
    states = {name[6:]: getattr(cache, names[name[6:]]).detach() for name in tensors if name.startswith("state.")}
    return tensors_by_name | {f"state.{name}": x for name, x in states.items()}


@functools.cache
def exact(file):
    """Compute the same in float64."""
    block, tensors = read(file)
    return outcome(block.double(), tensors, lambda b, u: b.prefill(u, path=SsdPath("recurrent")))


def assert_exact(actual, file, tolerance):
    """Assert that results are near those in float64; angles are compared modulo a full circle."""
    for name, x in actual.items():
        expected = exact(file)[name]
        if name == "state.angle":
            x, expected = (
                torch.polar(torch.ones(()).double(), x.double()),
                torch.polar(torch.ones(()).double(), expected),
            )
            x, expected = torch.view_as_real(x), torch.view_as_real(expected)
        assert_near(x, expected, tolerance, name)


CASES = [
    (file, algorithm, pathway)
    for file in FILES
    for algorithm in ALGORITHMS[FAMILIES[file.stem[:6]]]
    for pathway in PATHWAYS[FAMILIES[file.stem[:6]]]
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_official_ones_are_near_ours_in_float64(file):
    golden = read(file)[1]
    official = {name.removeprefix("output."): x for name, x in golden.items()}
    assert_exact({name: official[name] for name in exact(file)}, file, GOLDEN_FLOOR)


@pytest.mark.parametrize(("file", "algorithm", "pathway"), CASES, ids=lambda case: getattr(case, "stem", case))
def test_outputs_states_and_gradients_are_near_the_same(file, algorithm, pathway):
    path = SsdPath(algorithm, pathway=pathway)
    assert_exact(outcome(*read(file), lambda block, u: block.prefill(u, path=path)), file, GOLDEN_FLOOR)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_steps_are_near_the_same(file):
    assert_exact(outcome(*read(file), lambda block, u: unroll(block, u, None)), file, GOLDEN_FLOOR)
