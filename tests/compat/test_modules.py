"""The official blocks and models by their names, against what the official package recorded."""

import copy
import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from anymamba.compat import install, uninstall
from tests.support import MODEL_FLOOR, assert_near

GOLDEN = Path(__file__).parents[1] / "golden"
BLOCKS = sorted(GOLDEN.glob("mamba[123]_*.safetensors"))
MODELS = sorted(path for path in GOLDEN.glob("lm_*") if not path.name.startswith("lm_hf"))
NAMES = {"mamba1": "Mamba", "mamba2": "Mamba2", "mamba3": "Mamba3"}
STATES = {"mamba1": ("conv", "ssm"), "mamba2": ("conv", "ssm"), "mamba3": ("angle", "ssm", "k", "v")}


@pytest.fixture(autouse=True)
def stand_in():
    install()
    yield
    uninstall()


def params(length):
    return importlib.import_module("mamba_ssm.utils.generation").InferenceParams(max_seqlen=length, max_batch_size=2)


def recorded(file, **options):
    with safe_open(file, "pt") as golden:
        config = json.loads(golden.metadata()["config"])
        tensors = {name: golden.get_tensor(name) for name in golden.keys()}  # noqa: SIM118
    block = getattr(importlib.import_module("mamba_ssm"), NAMES[file.stem[:6]])(**config, **options)
    block.load_state_dict({name[6:]: x for name, x in tensors.items() if name.startswith("param.")}, strict=True)
    return block, tensors


def assert_states(file, states, golden, tolerance=1e-5):
    for name, state in zip(STATES[file.stem[:6]], states, strict=True):
        if f"state.{name}" in golden:
            difference = state - golden[f"state.{name}"]
            if name == "angle":
                difference = difference - 2 * math.pi * torch.round(difference / (2 * math.pi))
            assert difference.abs().max() <= tolerance, name


@pytest.mark.parametrize("file", BLOCKS, ids=lambda file: file.stem)
def test_outputs_states_and_gradients_are_the_official_ones(file):
    block, golden = recorded(file, layer_idx=0)
    u = golden["input.u"].requires_grad_()
    y = block(u)
    (y * golden["input.head"]).sum().backward()
    assert (y - golden["output.y"]).abs().max() <= 5e-6
    assert_near(u.grad, golden["grad.u"], 1e-5)
    for name, parameter in block.named_parameters():
        assert_near(parameter.grad, golden[f"grad.{name}"], 1e-5, name)
    kept = params(u.shape[1])
    with torch.no_grad():
        assert_near(block(u, inference_params=kept), y, 1e-6)
    assert_states(file, kept.key_value_memory_dict[0], golden)


@pytest.mark.parametrize("file", BLOCKS, ids=lambda file: file.stem)
def test_steps_change_their_states_in_place(file):
    block, golden = recorded(file)
    u, y = golden["input.u"], golden["output.y"]
    states = block.allocate_inference_cache(u.shape[0], u.shape[1])
    with torch.no_grad():
        for t in range(u.shape[1]):
            out, *after = block.step(u[:, t : t + 1], *states)
            assert all(new is old for new, old in zip(after, states, strict=True))
            assert (out - y[:, t : t + 1]).abs().max() <= 1e-5
    assert_states(file, states, golden)


@pytest.mark.parametrize("file", BLOCKS[:1] + BLOCKS[1:2] + BLOCKS[-1:], ids=lambda file: file.stem)
def test_a_prompt_and_then_tokens_through_inference_params(file):
    block, golden = recorded(file, layer_idx=3)
    u, y, kept = golden["input.u"], golden["output.y"], params(99)
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 6), (6, 7), (7, u.shape[1])):  # the last, several tokens from the states
            assert (block(u[:, start:stop], inference_params=kept) - y[:, start:stop]).abs().max() <= 1e-5
            kept.seqlen_offset = stop
    assert_states(file, kept.key_value_memory_dict[3], golden)
    kept.reset(99, 2)
    with torch.no_grad():
        assert (block(u, inference_params=kept) - y).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["Mamba2", "Mamba3", "Mamba2Simple"])
def test_packed_rows_are_sequences_alone(name):
    modules = {"Mamba2": "mamba2", "Mamba3": "mamba3", "Mamba2Simple": "mamba2_simple"}
    kind = getattr(importlib.import_module(f"mamba_ssm.modules.{modules[name]}"), name)
    block = kind(16, 8, headdim=8, layer_idx=0)
    u, seq_idx = torch.randn(2, 9, 16), torch.tensor([[0] * 4 + [1] * 5, [2] * 9], dtype=torch.int32)
    y = block(u, seq_idx=seq_idx)
    assert_near(y[:1, 4:], block(u[:1, 4:]), 5e-6)
    assert_near(y[:1, :4], block(u[:1, :4]), 5e-6)
    assert_near(y[1:], block(u[1:]), 5e-6)
    if name != "Mamba2Simple":
        kept = params(9)
        assert_near(block(u[:1], cu_seqlens=torch.tensor([0, 4, 9]), inference_params=kept), y[:1], 5e-6)
        assert kept.key_value_memory_dict[0][1].shape[0] == 2


def test_rows_end_to_end_and_positions_of_the_constructor():
    mamba2 = importlib.import_module("mamba_ssm").Mamba2
    block = mamba2(16, 8, 3, None, 3, 8)
    assert (block.d_state, block.d_conv, block.d_inner, block.headdim) == (8, 3, 48, 8)
    u = torch.randn(2, 5, 16)
    assert_near(block(u.flatten(0, 1), seqlen=5), block(u).flatten(0, 1), 0)


@pytest.mark.parametrize("source", MODELS, ids=lambda path: path.name)
def test_models_give_the_official_logits_and_generate_greedily(source):
    kind = importlib.import_module("mamba_ssm.models.mixer_seq_simple").MambaLMHeadModel
    golden = load_file(source / "golden.safetensors")
    model = kind.from_pretrained(str(source), device="cpu", dtype=torch.float32)
    ids = golden["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits
        assert_near(logits, golden["logits"], MODEL_FLOOR)
        assert_near(model(ids, num_last_tokens=2).logits, logits[:, -2:], 0)
    quick = model.generate(ids, ids.shape[1] + 6, cg=True)
    model.lm_head.register_forward_hook(lambda *_: None)  # now every module is called
    assert torch.equal(model.generate(ids, ids.shape[1] + 6), quick)
    full = model.generate(ids, ids.shape[1] + 3, output_scores=True, return_dict_in_generate=True)
    with torch.no_grad():
        assert_near(full.scores[-1], model(full.sequences).logits[:, -2], MODEL_FLOOR)


def test_a_model_trains_is_copied_and_saved_as_the_official_one(tmp_path):
    models = importlib.import_module("mamba_ssm.models.mixer_seq_simple")
    config = importlib.import_module("mamba_ssm.models.config_mamba").MambaConfig(
        d_model=16, n_layer=2, vocab_size=30, d_intermediate=32, ssm_cfg={"layer": "Mamba2", "headdim": 8}
    )
    torch.manual_seed(3)
    model = models.MambaLMHeadModel(config)
    ids = torch.randint(30, (2, 7))
    model(ids).logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    twin = copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    loaded = models.MambaLMHeadModel.from_pretrained(str(tmp_path))
    for other in (twin, loaded):
        assert torch.equal(other(ids).logits, model(ids).logits)
        assert torch.equal(other.generate(ids, 10), model.generate(ids, 10))
    model.backbone.layers[1].mixer.D.data.add_(1)  # no copy of the parameters is kept
    assert not torch.equal(
        model.generate(ids, 20, output_scores=True, return_dict_in_generate=True).scores[0],
        twin.generate(ids, 20, output_scores=True, return_dict_in_generate=True).scores[0],
    )
    hf = importlib.import_module("mamba_ssm.utils.hf")
    assert hf.load_config_hf(str(tmp_path))["d_model"] == 16
    assert hf.load_state_dict_hf(str(tmp_path)).keys() == model.state_dict().keys()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rms_norm", [False, True])
def test_layers_are_the_same_fused_or_not(fused, rms_norm):
    create = importlib.import_module("mamba_ssm.models.mixer_seq_simple").create_block
    layer = create(16, 24, {"layer": "Mamba1"}, rms_norm=rms_norm, fused_add_norm=fused, residual_in_fp32=True)
    hidden, residual = torch.randn(2, 2, 5, 16)
    out, stream = layer(hidden, residual)
    first = hidden + residual
    second = first + layer.mixer(layer.norm(first))
    assert_near(stream, second, 5e-6)
    assert_near(out, layer.mlp(layer.norm2(second)), 5e-6)


def test_draws_follow_torchs_seed_and_filters():
    generation = importlib.import_module("mamba_ssm.utils.generation")
    logits = torch.randn(4, 50)
    assert torch.equal(generation.sample(logits), logits.argmax(-1))
    torch.manual_seed(1)
    first = generation.sample(logits, top_k=5, temperature=2.0)
    torch.manual_seed(1)
    assert torch.equal(generation.sample(logits, top_k=5, temperature=2.0), first)
    assert all(token in row for token, row in zip(first, logits.topk(5).indices, strict=True))
    nearly = generation.sample(logits, top_k=0, top_p=1e-6)
    assert torch.equal(nearly, logits.argmax(-1))


def test_what_is_not_there_says_so_by_its_official_name():
    mamba = importlib.import_module("mamba_ssm")
    models = importlib.import_module("mamba_ssm.models.mixer_seq_simple")
    with pytest.raises(NotImplementedError, match=r"mamba_ssm\.Mamba2 with a process_group"):
        mamba.Mamba2(16, headdim=8, process_group=object())
    with pytest.raises(TypeError, match="MHA: missing a required argument: 'num_heads'"):
        models.create_block(16, 0, attn_layer_idx=[1], layer_idx=1)
    with pytest.raises(ValueError, match="layer_idx must be given to use inference_params"):
        mamba.Mamba(16)(torch.randn(1, 2, 16), inference_params=params(2))
    with pytest.warns(UserWarning, match="Mamba3 has no option is_fancy: ignored"):
        mamba.Mamba3(16, 8, headdim=8, is_fancy=True)
    soft = mamba.Mamba3(16, 8, headdim=8, a_activation="softplus", n_layer=3, dropout=0.1)
    assert soft.config.a_activation == "softplus"
