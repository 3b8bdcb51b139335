"""A block family of somebody's own file trains, generates, saves and runs in every command once it is registered."""

import importlib
import re
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from anymamba import MambaLM, decoder, register_family
from anymamba.analysis import Recurrence, dual_matrix, initial_state_term, register_recurrence, values
from anymamba.blocks import Block, Mamba2, SavableTree, make_config
from anymamba.cli.main import main
from anymamba.models.families import FAMILIES
from anymamba.scan import scan
from anymamba.training import resume, train
from anymamba.training.config.sections import ModelSection
from anymamba.training.config.tabular_config import SequenceModelSection
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
def registered():
    register_family("Leaky", Leaky)
    yield
    del FAMILIES["Leaky"]


class TestRegistration:
    def test_again_or_from_the_same_cell_of_a_notebook_is_no_clash(self):
        register_family("Leaky", Leaky)
        again = type("Leaky", (Leaky,), {"__module__": Leaky.__module__})
        register_family("Leaky", again)
        assert FAMILIES["Leaky"] is again

    def test_a_name_belongs_to_one_family(self):
        with pytest.raises(
            ValueError, match=r"Mamba2 is the name of anymamba.blocks.mamba2.Mamba2 already, got .*Leaky"
        ):
            register_family("Mamba2", Leaky)
        assert FAMILIES["Mamba2"] is Mamba2

    @pytest.mark.parametrize("family", [nn.Linear, Leaky(8), "Leaky"])
    @pytest.mark.usefixtures("unchecked")
    def test_a_family_is_a_subclass_of_block(self, family):
        with pytest.raises(TypeError, match=r"Other must be a subclass of anymamba.blocks.Block, got "):
            register_family("Other", family)

    @pytest.mark.parametrize("name", ["", None])
    @pytest.mark.usefixtures("unchecked")
    def test_a_name_is_a_string(self, name):
        with pytest.raises(TypeError, match="the name must be a string that is not empty"):
            register_family(name, Leaky)

    def test_what_is_missing_is_one_error(self):
        with pytest.raises(ValueError, match=r"Other must have CONFIG, .*; CACHE, .*; a method cache_shapes; .* mix$"):
            register_family("Other", type("Other", (Block,), {}))

    @pytest.mark.parametrize(
        ("parts", "expected"),
        [
            ({"CONFIG": dict}, "CONFIG, a dataclass with a field d_model$"),
            ({"CONFIG": LeakyConfig(d_model=8)}, "CONFIG, a dataclass with a field d_model$"),
            ({"CACHE": tuple}, "CACHE, a named tuple and anymamba.blocks.SavableTree$"),
            ({"CACHE": SavableTree}, "CACHE, a named tuple and anymamba.blocks.SavableTree$"),
        ],
    )
    def test_config_and_cache_are_of_the_kinds_that_models_need(self, parts, expected):
        with pytest.raises(ValueError, match=f"Other must have {expected}"):
            register_family("Other", type("Other", (Leaky,), parts))
        assert "Other" not in FAMILIES


def write_package(directory, name, value):
    """Write what pip records of an installed package with one family."""
    metadata = directory / f"{name.lower()}_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.lower()}-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[anymamba.families]\n{name} = {value}\n")


class TestEntryPoints:
    def test_a_family_of_an_installed_package_is_loaded_when_it_is_named(self, tmp_path, monkeypatch):
        write_package(tmp_path, "Dripping", f"{__name__}:Leaky")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ValueError, match=r"must be one of .*, Dripping, got .Driping.; did you mean Dripping"):
            MambaLM(d_model=8, n_layer=1, vocab_size=20, ssm_cfg={"layer": "Driping"})
        assert "Dripping" not in FAMILIES
        try:
            model = MambaLM(d_model=8, n_layer=1, vocab_size=20, ssm_cfg={"layer": "Dripping"})
            assert isinstance(model.backbone.layers[0].mixer, Leaky)
        finally:
            FAMILIES.pop("Dripping", None)

    @pytest.mark.parametrize(
        ("value", "error"),
        [
            ("no_such_module:Leaky", "ModuleNotFoundError: No module named 'no_such_module'"),
            (f"{__name__}:LeakyCache", "TypeError: .*must be a subclass of anymamba.blocks.Block"),
        ],
    )
    @pytest.mark.usefixtures("unchecked")
    def test_one_that_cannot_be_loaded_is_one_error(self, tmp_path, monkeypatch, value, error):
        write_package(tmp_path, "Broken", value)
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ValueError, match=rf'"layer"\]: cannot load the entry point Broken = {value} \({error}'):
            MambaLM(d_model=8, n_layer=1, vocab_size=20, ssm_cfg={"layer": "Broken"})


def test_a_checkpoint_of_an_unknown_family_says_how_to_add_it():
    with pytest.raises(ValueError, match=r"got 'Unheard'; anymamba.register_family adds a family$"):
        MambaLM(d_model=8, n_layer=1, vocab_size=20, ssm_cfg={"layer": "Unheard"})


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


@dataclass(frozen=True, kw_only=True)
class SizedConfig:
    """A config with sizes, of which one has a default."""

    d_model: int
    headdim: int
    d_state: int = 5


class Sized(Leaky):
    """A family with heads."""

    CONFIG = SizedConfig


def test_the_trainer_fits_heads_and_leaves_other_sizes_to_the_family():
    register_family("Sized", Sized)
    try:
        sizes = ModelSection(family="Sized", d_model=96).lm_config(256).ssm_cfg
        assert sizes == {"layer": "Sized", "headdim": 32, "d_state": 5}
        sizes = SequenceModelSection(family="Sized", d_model=48).stack_fields()["ssm_cfg"]
        assert sizes == {"layer": "Sized", "headdim": 16, "d_state": 5}
        chosen = ModelSection(family="Sized", d_model=96, headdim=24, d_state=7).lm_config(256)
        assert chosen.block_config() == SizedConfig(d_model=96, headdim=24, d_state=7)
    finally:
        del FAMILIES["Sized"]


def test_commands_train_describe_and_run_it(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus")
    sizes = ["--model.n_layer", "1", "--model.d_model", "16", "--model.block", "{rate = 0.2}"]
    steps = ["--batch.tokens", "64", "--batch.length", "32", "--schedule.steps", "2", "--schedule.warmup", "1"]
    options = ["--data.sources", str(corpus), *sizes, *steps, "--evaluation.sample_tokens", "2"]
    model = tmp_path / "run"
    assert main(["train", "--model.family", "Leaky", *options, "--out", str(model)]) == 0
    capsys.readouterr()
    assert main(["info", str(model)]) == 0
    described = capsys.readouterr().out
    assert "Leaky" in described
    assert re.search(r"^block +rate 0\.2$", described, re.MULTILINE)
    for weights in ([], ["--weights", "int8"]):
        assert main(["generate", str(model), "--prompt", "alpha", "--max-new-tokens", "3", *weights]) == 0


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
