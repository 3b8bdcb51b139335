"""Accelerated models as objects: saved, copied, pickled, hooked, restored, rejected, reported."""

import copy
import io
import pickle
import types

import pytest
import torch
import transformers
from torch import nn

import anymamba.integrations.transformers
from anymamba.integrations.transformers import accelerate, disable, enable, report, restore
from tests.integrations.models import CONFIGS, ids, pair, plain, run_split
from tests.support import assert_near

ARCHITECTURES = list(CONFIGS)


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_restore_gives_back_every_bit(name):
    original, fast = pair(name)
    x = ids(2, 9)
    fast(x)
    assert restore(fast) is fast
    assert torch.equal(fast(x).logits, original(x).logits)
    assert torch.equal(run_split(fast, x, (5, 1, 3)), run_split(original, x, (5, 1, 3)))
    for module, reference in zip(fast.modules(), original.modules(), strict=True):
        assert type(module) is type(reference)
        assert vars(module).keys() == vars(reference).keys()
    assert not any(layer.accelerated for layer in report(fast).layers)


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_copies_and_pickles_are_accelerated_too(name):
    _, fast = pair(name)
    x = ids(1, 7)
    expected = run_split(fast, x, (5, 1, 1))
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), torch.load(buffer, weights_only=False)):
        assert all(layer.accelerated for layer in report(copied).layers)
        assert torch.equal(run_split(copied, x, (5, 1, 1)), expected)
        assert not any(layer.accelerated for layer in report(restore(copied)).layers)
    assert all(layer.accelerated for layer in report(fast).layers)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba2", "jamba", "falcon_h1"])
def test_what_is_saved_is_transformers_own(name, tmp_path):
    original, fast = pair(name)
    original.save_pretrained(tmp_path / "own")
    fast.save_pretrained(tmp_path / "fast")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "own" / file).read_bytes() == (tmp_path / "fast" / file).read_bytes()
    x = ids(1, 7)
    assert_near(type(original).from_pretrained(tmp_path / "fast")(x).logits, original(x).logits, 1e-5)


@torch.no_grad()
def test_enable_accelerates_what_is_loaded_and_built(tmp_path):
    original = plain("mamba2")
    original.save_pretrained(tmp_path)
    enable()
    enable()
    auto = transformers.AutoModelForCausalLM
    loaded, built = auto.from_pretrained(tmp_path), auto.from_config(original.config)
    direct, info = type(original).from_pretrained(tmp_path, output_loading_info=True)
    assert all(layer.accelerated for model in (loaded, built, direct) for layer in report(model).layers)
    assert not info["missing_keys"]
    assert not report(auto.from_config(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9))).layers
    disable()
    assert not any(layer.accelerated for layer in report(auto.from_pretrained(tmp_path)).layers)
    x = ids(1, 7)
    assert_near(loaded(x).logits, original(x).logits, 1e-5)


@torch.no_grad()
def test_hooks_on_mixers_and_their_parts_are_called():
    _, fast = pair("mamba2")
    x, seen = ids(1, 7), []
    mixer = fast.backbone.layers[0].mixer
    for module in (mixer, mixer.in_proj, mixer.norm, mixer.out_proj):
        module.register_forward_hook(lambda module, inputs, output: seen.append(module))
    fast(x)
    assert seen == [mixer.in_proj, mixer.norm, mixer.out_proj, mixer]


def test_accelerating_twice_changes_options_only():
    _, fast = pair("mamba2", n_groups=4)
    kinds = [type(module) for module in fast.modules()]
    accelerate(fast, norm="official", packing=False)
    assert [type(module) for module in fast.modules()] == kinds
    assert not fast._forward_pre_hooks
    accelerate(fast)
    accelerate(fast)
    assert len(fast._forward_pre_hooks) == len(fast._forward_hooks) == 1


def test_a_mixer_alone():
    mixer = accelerate(plain("mamba2").backbone.layers[0].mixer)
    assert report(mixer).layers[0].name == ""
    assert mixer(torch.randn(1, 5, 32)).shape == (1, 5, 32)


@torch.no_grad()
def test_a_mixer_that_differs_is_not_exchanged():
    model = plain("mamba2")
    mixer = model.backbone.layers[0].mixer
    mixer.head_dim = 8  # the description no longer fits the weights
    mixer.num_heads = 8
    with pytest.warns(UserWarning, match="Mamba2Mixer runs transformers' own forward: the comparison"):
        accelerate(model)
    assert not any(layer.accelerated for layer in report(model).layers)
    assert "comparison" in report(model).layers[0].reason


class Louder(nn.Module):
    """A norm as a later version might have it."""

    def __init__(self, norm):
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = norm.variance_epsilon
        self.group_size = norm.weight.shape[0]

    def forward(self, y, z):
        return 3 * self.weight * y * torch.sigmoid(z)


@torch.no_grad()
def test_check_sees_a_forward_that_computes_something_else():
    model = plain("mamba2")
    norm = Louder(model.backbone.layers[0].mixer.norm)
    Louder.__module__ = "transformers.models.later"
    model.backbone.layers[0].mixer.norm = norm
    with pytest.warns(UserWarning, match="its outputs differ from transformers' own by"):
        accelerate(model)
    assert not any(layer.accelerated for layer in report(model).layers)
    assert all(layer.accelerated for layer in report(accelerate(model, check=False)).layers)


def test_zamba_1_is_left_to_transformers_and_says_why():
    config = transformers.ZambaConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=40,
        n_mamba_heads=2, mamba_dt_rank=3, mamba_d_state=8, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
    )  # fmt: skip
    model = transformers.ZambaForCausalLM(config).eval()
    with pytest.warns(UserWarning, match="ZambaMambaMixer runs transformers' own forward: Zamba-1 has several heads"):
        accelerate(model)
    layers = report(model).layers
    assert layers
    assert not any(layer.accelerated for layer in layers)
    assert "Zamba-1 has several heads" in str(report(model))


def test_another_activation_is_left_to_transformers():
    original, fast = pair("mamba2", hidden_act="gelu")
    x = ids(1, 7)
    with torch.no_grad():
        assert torch.equal(fast(x).logits, original(x).logits)
    assert report(fast).layers[0].last_fallback == "its activation is gelu, not silu"
    assert "last fell back because its activation is gelu" in str(report(fast))


def test_another_device_is_left_to_transformers():
    model = plain("mamba2").to("meta")
    with pytest.warns(UserWarning, match="the mixers are on meta; transformers' own forward runs"):
        accelerate(model)
    assert model(ids(1, 7).to("meta")).logits.shape == (1, 7, 61)
    layer = report(model).layers[0]
    assert not layer.accelerated
    assert layer.reason == "its weights are on meta, not on a CPU"


def test_accelerate_s_hooks_are_left_to_transformers():
    hooks = pytest.importorskip("accelerate.hooks")
    original, fast = pair("mamba2")
    for layer in fast.backbone.layers:
        hooks.add_hook_to_module(layer.mixer.conv1d, hooks.AlignDevicesHook("cpu"))
    x = ids(1, 7)
    with torch.no_grad():
        assert_near(fast(x).logits, original(x).logits, 1e-5)
    assert "accelerate has hooks" in report(fast).layers[0].last_fallback


def test_a_forward_of_somebody_else_is_reported():
    _, fast = pair("mamba2")
    mixer = fast.backbone.layers[0].mixer
    mixer.forward = mixer.forward
    assert [layer.accelerated for layer in report(fast).layers] == [False, True]
    assert "given its own forward" in report(fast).layers[0].reason


def test_the_report_is_a_line_a_mixer():
    _, fast = pair("bamba")
    lines = str(report(fast)).splitlines()
    assert lines[0] == "2 of 2 mixers are accelerated"
    assert lines[1].startswith("  model.layers.0.mamba (BambaMixer): sequences: anymamba")
    assert len(lines) == 3


def test_a_model_without_mixers_and_things_that_are_no_models_raise(unchecked):
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9))
    with pytest.raises(ValueError, match="GPT2LMHeadModel has none of transformers' Mamba mixers"):
        accelerate(gpt2)
    with pytest.raises(ValueError, match='norm must be "transformers" or "official", got \'grouped\''):
        accelerate(plain("mamba2"), norm="grouped")
    for function in (accelerate, restore, report):
        with pytest.raises(TypeError, match="model must be a torch module, got str"):
            function("state-spaces/mamba2-130m")


@pytest.mark.parametrize("function", [lambda: accelerate(nn.Identity()), enable])
def test_a_version_below_the_floor_raises(function, monkeypatch):
    old = types.SimpleNamespace(__version__="5.14.2")
    monkeypatch.setattr(anymamba.integrations.transformers.architectures, "import_module", lambda name: old)
    with pytest.raises(ImportError, match=r"needs transformers >= 5.16, found 5.14.2: pip install"):
        function()


def test_a_missing_transformers_is_named(monkeypatch):
    def raise_missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(anymamba.integrations.transformers.architectures, "import_module", raise_missing)
    with pytest.raises(ImportError, match=r"not installed: pip install 'anymamba\[interop\]'"):
        accelerate(nn.Identity())
