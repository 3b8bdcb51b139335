"""Files of earlier versions still open, and continue as they did."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anymamba import GenerationState, LMCache, MambaLM
from anymamba.training.api import open_run
from anymamba.training.metrics.loggers import read_metrics
from tests.support import FLOOR, LOSSES_FLOOR, MODEL_FLOOR, assert_near
from tests.training.cases import silent

FIXTURES = Path(__file__).parent / "fixtures"
MODELS = sorted(path.parent.name for path in FIXTURES.glob("*/generation.state"))


@pytest.fixture(params=MODELS)
def saved(request):
    """Return the directory of a model with its states, the model, and its expected results."""
    directory = FIXTURES / request.param
    return directory, MambaLM.from_pretrained(directory), load_file(directory / "expected.safetensors")


def test_there_is_a_model_of_every_kind():
    assert len(MODELS) == 7


def assert_continues(y, expected, exact, floor, name=""):
    """Assert that what comes next, and what came next then, differ from float64 by rounding alone."""
    assert y.dtype == expected.dtype
    assert_near(y, exact, floor, f"{name}now")
    assert_near(expected, exact, floor, f"{name}then")


@torch.no_grad()
def test_a_cache_continues(saved):
    directory, model, expected = saved
    cache = LMCache.load(directory / "cache.state", model)
    floor = MODEL_FLOOR if model.dtype == torch.float32 else FLOOR[model.dtype]
    wide, wide_cache = copy.deepcopy(model).double(), cache.to(torch.float64)
    for t in range(5):
        ids = expected["ids"][:, 8 + t]
        logits, cache = model.step(ids, cache)
        exact, wide_cache = wide.step(ids, wide_cache)
        assert_continues(logits, expected["logits"][:, t], exact, floor, f"step {t}, ")


@torch.no_grad()
def test_the_cache_of_a_block_continues(saved):
    directory, model, expected = saved
    block = model.backbone.layers[1].mixer
    cache, x = type(block.init_cache(1)).load(directory / "block.state"), expected["block_x"]
    exact, _ = copy.deepcopy(block).double().step(x.double(), cache.to(torch.float64))
    assert_continues(block.step(x, cache)[0], expected["block_y"], exact, FLOOR[model.dtype])


def test_a_generation_continues(saved):
    directory, model, expected = saved
    state = GenerationState.load(directory / "generation.state", model)
    assert torch.equal(state.logits, expected["next_logits"])
    sampling = {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.3}
    assert model.generate(None, 6, cache=state, **sampling).tokens.shape == expected["tokens"].shape
    if model.dtype == torch.float32:  # a narrow dtype rounds a draw to another token
        wide = copy.deepcopy(model).double()
        tokens = wide.generate(None, 6, cache=state.to(torch.float64), **sampling).tokens
        assert torch.equal(tokens, expected["tokens"])


def test_a_run_resumes(tmp_path):
    directory = shutil.copytree(FIXTURES / "run", tmp_path / "run")
    assert open_run(directory, {}, silent).run()
    rows, expected_rows = (read_metrics(path) for path in (directory / "metrics.csv", FIXTURES / "run-expected.csv"))
    assert [row.step for row in rows] == [row.step for row in expected_rows] == list(range(1, 9))
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row.loss == pytest.approx(expected.loss, rel=LOSSES_FLOOR)
        assert row.evaluation == pytest.approx(expected.evaluation, rel=LOSSES_FLOOR)
