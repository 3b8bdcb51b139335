"""A new block family is its own file and one line of `families.py`: it trains, generates and saves by that alone."""

import importlib
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from anymamba import MambaLM, decoder
from anymamba.analysis import Recurrence, dual_matrix, initial_state_term, register_recurrence, values
from anymamba.blocks.base import Block
from anymamba.blocks.block_config import make_config
from anymamba.cli.main import main
from anymamba.core.cache_io import SavableTree
from anymamba.models.families import FAMILIES
from anymamba.scan import scan
from anymamba.training import resume, train
from tests.support import FLOOR, assert_near
from tests.training.cases import silent, tiny, write_corpus

# The package's function of this name hides the module.
analysis_recurrence = importlib.import_module("anymamba.analysis.recurrence")


@dataclass(frozen=True, kw_only=True)
class LeakyConfig:
    """A leaky average of what came before, a channel at a time."""

    d_model: int
    rate: float = 0.1


class _Fields(NamedTuple):
    mean: Tensor


class LeakyCache(_Fields, SavableTree):
    """The average so far, (b, d, 1, 1)."""

    __slots__ = ()
    FP32_FIELDS = frozenset({"mean"})


class Leaky(Block):
    """`h_t = exp(-rate) h_{t-1} + in_proj(x_t)`, `y_t = out_proj(h_t)`."""

    CONFIG = LeakyConfig
    CACHE = LeakyCache

    def __init__(self, config=None, *, device=None, dtype=None, **fields):
        super().__init__(make_config(LeakyConfig, config, fields))
        self.in_proj = nn.Linear(self.d_model, self.d_model, device=device, dtype=dtype)
        self.out_proj = nn.Linear(self.d_model, self.d_model, device=device, dtype=dtype)

    def cache_shapes(self):
        return {"mean": (self.d_model, 1, 1)}

    def mix(self, x, cache, *, path, lengths, cu_seqlens):
        v = self.in_proj(x)
        decay = torch.full(v.shape, -self.config.rate, dtype=cache.mean.dtype, device=x.device)
        if lengths is not None:
            real = (torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)).unsqueeze(-1)
            v, decay = v * real, decay * real
        ones = torch.ones_like(v[:, :, None, :1, None])
        v = v[:, :, None, :, None]
        y, mean = scan(v, ones, ones, decay, initial_state=cache.mean, path=path, cu_seqlens=cu_seqlens)
        return self.out_proj(y[:, :, 0, :, 0]), LeakyCache(mean)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(FAMILIES, "Leaky", Leaky)


def test_prefill_equals_steps_and_padded_and_packed_rows_equal_rows_alone():
    block = Leaky(8, dtype=torch.float64)
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    y, cache = block.prefill(x)
    stepped = None
    for t in range(7):
        y_t, stepped = block.step(x[:, t], stepped)
        assert_near(y_t, y[:, t], FLOOR[torch.float64])
    assert_near(stepped.mean, cache.mean, FLOOR[torch.float64])
    padded, _ = block.prefill(x, mask=torch.tensor([7, 3]))
    assert_near(padded[1, :3], y[1, :3], FLOOR[torch.float64])
    packed, _ = block.prefill(x.flatten(0, 1).unsqueeze(0), cu_seqlens=torch.tensor([0, 7, 14]))
    assert_near(packed.view(2, 7, 8), y, FLOOR[torch.float64])


def test_a_language_model_of_it_generates_and_saves(tmp_path):
    model = MambaLM(d_model=8, n_layer=2, vocab_size=20, ssm_cfg={"layer": "Leaky", "rate": 0.3}).eval()
    ids = torch.randint(20, (2, 5))
    tokens = model.generate(ids, 6).tokens
    assert "Leaky has no compiled step" in decoder(model).reason or "not built" in decoder(model).reason
    model.save_pretrained(tmp_path)
    again = MambaLM.from_pretrained(tmp_path)
    assert again.config.block_config().rate == 0.3
    assert torch.equal(again.generate(ids, 6).tokens, tokens)
    state = again.generate(ids, 3, return_state=True).state
    state.save(tmp_path / "state", again)
    resumed = type(state).load(tmp_path / "state", again)
    assert torch.equal(again.generate(None, 3, cache=resumed).tokens, tokens[:, 3:])


def test_it_trains_and_resumes(tmp_path):
    model = {"family": "Leaky", "d_state": None, "headdim": None, "block": {"rate": 0.2}}
    config = tiny(write_corpus(tmp_path / "corpus"), model=model)
    stopped = train(config, tmp_path / "run", callbacks=[lambda row: row.step == 3], report=silent)
    assert (stopped.step, stopped.finished) == (3, False)
    assert isinstance(stopped.model.backbone.layers[0].mixer, Leaky)
    again = resume(tmp_path / "run", report=silent)
    assert (again.step, again.finished) == (6, True)


def read_leaky(block, x, cache):
    v = block.in_proj(x)[:, :, None, :, None]
    ones = torch.ones_like(v)
    one_per_head = ones[:, :, 0, :, 0]
    return Recurrence(
        v=v,
        k=ones,
        q=ones,
        log_decay=-block.config.rate * one_per_head,
        gamma=one_per_head,
        kappa=torch.zeros_like(one_per_head),
        dt=one_per_head,
        initial_state=cache.mean,
        skip=torch.zeros_like(v),
        rotation=None,
        finish=lambda y: block.out_proj(y[:, :, 0, :, 0]),
    )


def test_a_page_needs_its_recurrence_and_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(analysis_recurrence, "_READERS", dict(analysis_recurrence._READERS))
    model = MambaLM(d_model=8, n_layer=2, vocab_size=256, pad_vocab_size_multiple=1, ssm_cfg={"layer": "Leaky"})
    model.save_pretrained(tmp_path / "model")
    command = ["inspect", str(tmp_path / "model"), "--prompt", "hello", "--out", str(tmp_path / "page.html")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "whose recurrence is known (Mamba1, Mamba2, Mamba3), got Leaky" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "page.html").exists()
    register_recurrence(Leaky, read_leaky, lambda cache: cache.mean)
    assert main(command) == 0
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_its_dual_matrix_gives_its_output(monkeypatch):
    monkeypatch.setattr(analysis_recurrence, "_READERS", dict(analysis_recurrence._READERS))
    register_recurrence(Leaky, read_leaky, lambda cache: cache.mean)
    block, x = Leaky(8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    cache = block.prefill(x)[1]
    y = dual_matrix(block, x, cache) @ values(block, x, cache) + initial_state_term(block, x, cache)
    assert_near(block.out_proj(y[..., 0].mT), block.prefill(x, cache)[0], FLOOR[torch.float64])
