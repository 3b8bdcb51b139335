"""Bamba and Granite 4 H without experts: what transformers computes, and what it opens of ours."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

import anymamba
from anymamba import LMCache, MambaLM
from anymamba.checkpoints.open import open_checkpoint
from anymamba.cli.main import main
from tests.support import assert_near

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # that transformers has no compiled functions
SHARED = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "pad_token_id": 0,
}
BAMBA = {"attn_layer_indices": [1, 3], "intermediate_size": 40}
GRANITE = {
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 40,
    "embedding_multiplier": 12,
    "logits_scaling": 6,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "rms_norm_eps": 1e-3,
}
MODELS = {
    "bamba": BAMBA,
    "bamba with biases": {**BAMBA, "mlp_bias": True, "attention_bias": True, "mamba_proj_bias": True},
    "bamba without attention biases": {**BAMBA, "tie_word_embeddings": True, "mamba_conv_bias": False},
    "granite": GRANITE,
    "granite tied": {**GRANITE, "tie_word_embeddings": True, "num_key_value_heads": 1, "mamba_d_conv": 3},
    "granite rotary": {**GRANITE, "position_embedding_type": "rope", "attention_bias": True},
}


class InFloat64(TorchFunctionMode):
    """A mode in which what is cast to float32 is cast to float64: transformers has such casts in every model."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widen(x):
            return torch.float64 if x is torch.float32 else x

        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(widen, args), **{name: widen(x) for name, x in (kwargs or {}).items()})


def format_name(name):
    return "bamba" if "bamba" in name else "granitemoehybrid"


def make_theirs(name):
    kinds = {"bamba": transformers.BambaConfig, "granitemoehybrid": transformers.GraniteMoeHybridConfig}
    config = kinds[format_name(name)](**{**SHARED, **MODELS[name]})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    with InFloat64():
        model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """Return the name, transformers' model and ours, in float64, and the directory of the former."""
    transformers.utils.logging.disable_progress_bar()
    theirs = make_theirs(request.param)
    directory = tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(directory)
    return request.param, theirs, MambaLM.from_pretrained(directory), directory


IDS = torch.randint(1, 61, (2, 12), generator=torch.Generator().manual_seed(3))


def logits_of(theirs, ids):
    with InFloat64():
        return theirs(ids, use_cache=False).logits


def test_logits_and_gradients_are_those_of_transformers(pair, tmp_path):
    name, theirs, ours, directory = pair
    logits, expected = ours(IDS).logits, logits_of(theirs, IDS)
    assert_near(logits, expected, 1e-12)
    head = torch.randn(logits.shape, dtype=torch.float64)
    (expected * head).sum().backward()
    ours.zero_grad()
    (logits * head).sum().backward()
    # The gradients, written as if they were weights, have transformers' names.
    grads = MambaLM.from_pretrained(directory)
    grads.load_state_dict({key: p.grad for key, p in ours.named_parameters()}, strict=False)
    grads.save_pretrained(tmp_path, format=format_name(name))
    by_name = load_file(tmp_path / "model.safetensors")
    for key, parameter in theirs.named_parameters():
        assert_near(by_name[key], parameter.grad, 1e-11, key)


def test_float32_is_as_near_as_one_rounding_each(pair):
    _, theirs, _, directory = pair
    ours = MambaLM.from_pretrained(directory, dtype=torch.float32)
    assert_near(ours(IDS).logits, logits_of(theirs, IDS), 1e-5)


def test_greedy_tokens_are_the_likeliest_of_transformers_logits(pair):
    _, theirs, ours, _ = pair
    tokens = ours.generate(IDS, 12, temperature=0).tokens
    whole = logits_of(theirs, torch.cat([IDS, tokens], 1))
    assert torch.equal(whole[:, IDS.shape[1] - 1 : -1].argmax(-1), tokens)


def test_padded_packed_continued_and_branched_rows_equal_the_whole(pair):
    _, theirs, ours, _ = pair
    whole, short = logits_of(theirs, IDS), logits_of(theirs, IDS[1:, 4:])
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, :4] = False
    padded = ours(IDS.masked_fill(~mask, 0), mask=mask)
    assert_near(padded.logits[0], whole[0], 1e-11)
    assert_near(padded.logits[1, 4:], short[0], 1e-11)
    packed = ours(torch.cat([IDS[:1], IDS[1:, 4:]], 1), cu_seqlens=torch.tensor([0, 12, 20]))
    assert_near(packed.logits[0], torch.cat([whole[0], short[0]]), 1e-11)
    start = ours(IDS[:, :5]).cache
    branches = LMCache.cat([start.rows([1, 0]), start.rows(1)])
    assert_near(ours(IDS[[1, 0, 1], 5:], branches).logits, whole[[1, 0, 1], 5:], 1e-11)


def test_what_we_write_is_what_was_read_to_the_bit(pair, tmp_path):
    name, theirs, ours, directory = pair
    format = format_name(name)
    assert open_checkpoint(directory).format.name == format
    ours.save_pretrained(tmp_path / format, format=format)
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / format / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], x) for key, x in before.items())
    with InFloat64():
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / format, attn_implementation="eager").eval()
    assert torch.equal(logits_of(again, IDS), logits_of(theirs, IDS))
    ours.save_pretrained(tmp_path / "anymamba")
    assert torch.equal(MambaLM.from_pretrained(tmp_path / "anymamba")(IDS).logits, ours(IDS).logits)
    assert MambaLM.from_pretrained(tmp_path / format).config == ours.config
    assert again.config.to_diff_dict().keys() - {"transformers_version"} <= theirs.config.to_dict().keys()


@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
def test_weights_in_fewer_bits_are_read_from_parts(tmp_path, weights):
    theirs = make_theirs("bamba").float()
    theirs.save_pretrained(tmp_path)
    plain = MambaLM.from_pretrained(tmp_path)
    quantized = anymamba.quantization.quantize_model(plain, weights) or plain
    loaded = MambaLM.from_pretrained(tmp_path, weights=weights)
    assert torch.equal(loaded(IDS).logits, quantized(IDS).logits)


def test_the_commands_open_a_hybrid(tmp_path, capsys):
    make_theirs("granite").float().save_pretrained(tmp_path / "in")
    assert main(["info", str(tmp_path / "in")]) == 0
    assert "granitemoehybrid format" in capsys.readouterr().out
    convert = ["convert", str(tmp_path / "in"), str(tmp_path / "out")]
    assert main([*convert, "--format", "official"]) == 2
    assert "the official format cannot hold this model: it has no norm_eps, mlp_cfg" in capsys.readouterr().err
    assert main([*convert, "--format", "anymamba"]) == 0
    assert torch.equal(
        MambaLM.from_pretrained(tmp_path / "out")(IDS).logits, MambaLM.from_pretrained(tmp_path / "in")(IDS).logits
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "granite",
            {"num_local_experts": 4},
            "models with experts are not supported: num_local_experts must be 0, got 4",
        ),
        ("granite", {"layer_types": ["mamba", "moe", "mamba", "attention"]}, "layer_types must be among .*got 'moe'"),
        ("granite", {"layer_types": ["mamba"]}, "layer_types must have 4 entries, got 1"),
        ("granite", {"position_embedding_type": "alibi"}, "position_embedding_type must be .* got 'alibi'"),
        ("granite", {"hidden_act": "gelu"}, "must have hidden_act = 'silu', got 'gelu'"),
        ("granite", {"mamba_d_head": 3}, "mamba_n_heads · mamba_d_head must be .* = 64, got 8 · 3"),
        (
            "bamba",
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_type must be default or linear to be read, got 'yarn'",
        ),
        ("bamba", {"attn_layer_indices": [9]}, r"attn_layer_idx must be a list of layers, 0 to 3, got \[9\]"),
    ],
)
def test_configs_that_we_cannot_compute_are_rejected_in_one_line(name, change, message, tmp_path):
    raw = {**SHARED, **MODELS[name], "mamba_d_head": 8, "mamba_expand": 2, "model_type": format_name(name), **change}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message) as error:
        MambaLM.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("format", "fields", "message"),
    [
        ("bamba", {}, "bamba format .* needs Mamba2 and attention layers, got Mamba2"),
        ("bamba", {"attn_layer_idx": [1], "attn_cfg": {"num_heads": 4}}, "needs mlp_cfg = .*'multiple_of': 1"),
        (
            "granitemoehybrid",
            {
                "attn_layer_idx": [1],
                "attn_cfg": {"num_heads": 4, "window": 5},
                "stack": {"mlp_cfg": {"multiple_of": 1, "gate_first": True}},
            },
            "needs window = None of its AttentionConfig, got 5",
        ),
    ],
)
def test_models_that_a_format_cannot_hold_are_rejected(format, fields, message, tmp_path):
    model = MambaLM(d_model=32, n_layer=2, vocab_size=61, ssm_cfg={"layer": "Mamba2", "headdim": 8}, **fields)
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path, format=format)
