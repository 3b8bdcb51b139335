"""Language models with attention layers: official checkpoints, and the promises of every language model."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

import anymamba
from anymamba import LMCache, MambaLM, MambaLMConfig
from anymamba.cli.main import main
from anymamba.kernels.cpu import bindings
from tests.blocks.families import without_padding
from tests.models.cases import small_lm
from tests.support import FLOOR, MODEL_FLOOR, assert_near

needs_kernels = pytest.mark.skipif(bindings.LIBRARY.handle is None, reason=bindings.LIBRARY.reason)
ATTENTION = {
    "attn_layer_idx": [1, 2],
    "attn_cfg": {"num_heads": 4, "num_heads_kv": 2, "d_conv": 3, "rotary_emb_dim": 4, "mlp_dim": 40},
}


def hybrid_lm(dtype=torch.float64, **fields):
    """Make a small hybrid in which every parameter plays a part."""
    model = small_lm("Mamba2", dtype, n_layer=4, **{**ATTENTION, **fields})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def test_any_split_padding_and_packing_equal_the_whole():
    model, ids = hybrid_lm(d_intermediate=40), torch.randint(61, (2, 12))
    whole = model(ids)
    logits, (early, late) = model.states_at(ids, [3, 8])
    assert_near(logits, whole.logits, FLOOR[torch.float64])
    for begin, cache in ((3, early), (8, late)):
        assert_near(model(ids[:, begin:], cache).logits, whole.logits[:, begin:], FLOOR[torch.float64])
    padded = model(
        torch.cat([torch.zeros(2, 2, dtype=torch.int64), ids], 1), mask=torch.arange(14) >= torch.tensor([[2], [5]])
    )
    assert_near(padded.logits[0, 2:], whole.logits[0], FLOOR[torch.float64])
    assert_near(padded.logits[1, 5:], model(ids[1:, 3:]).logits[0], FLOOR[torch.float64])
    packed = model(ids.view(1, -1), cu_seqlens=torch.tensor([0, 12, 24]))
    assert_near(packed.logits.view_as(whole.logits), whole.logits, FLOOR[torch.float64])
    assert packed.cache.layers[1].lengths.tolist() == [12, 12]


def test_generated_tokens_are_the_likeliest_of_the_whole_sequence():
    model, ids = hybrid_lm(), torch.randint(61, (2, 5))
    tokens = model.generate(ids, 20, temperature=0).tokens
    whole = model(torch.cat([ids, tokens], 1)).logits
    assert torch.equal(whole[:, 4:-1, :61].argmax(-1), tokens)


def test_a_state_is_saved_branched_and_joined(tmp_path):
    model, ids = hybrid_lm(), torch.randint(61, (3, 9))
    state = model.generate(ids, 4, temperature=0, mask=torch.tensor([9, 2, 5]), return_state=True).state
    state.save(tmp_path / "state", model)
    loaded = type(state).load(tmp_path / "state", model)
    branches = loaded.rows([1, 1, 0])
    expected = model.generate(None, 6, temperature=0, cache=state).tokens
    assert torch.equal(model.generate(None, 6, temperature=0, cache=branches).tokens, expected[[1, 1, 0]])
    joined = LMCache.cat([state.rows(1).cache, state.rows(0).cache])
    assert joined.layers[1].lengths.tolist() == [6, 13]
    other = hybrid_lm(attn_cfg={**ATTENTION["attn_cfg"], "rotary_emb_base": 99.0})
    other.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="belongs to another model"):
        type(state).load(tmp_path / "state", other)


def test_an_official_checkpoint_loads_with_its_names_and_is_written_back(tmp_path, capsys):
    """The names and shapes of mamba2attn: d_conv, rotary positions, no biases but the convolution's."""
    torch.manual_seed(0)
    attn_cfg = {
        "causal": True,
        "d_conv": 4,
        "head_dim": 16,
        "num_heads": 3,
        "out_proj_bias": False,
        "qkv_proj_bias": False,
        "rotary_emb_dim": 8,
    }
    config = {
        "d_model": 32,
        "d_intermediate": 0,
        "n_layer": 3,
        "vocab_size": 61,
        "ssm_cfg": {"layer": "Mamba2", "d_state": 16, "headdim": 8},
        "attn_layer_idx": [1],
        "attn_cfg": attn_cfg,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
    }
    tensors = {f"backbone.layers.{i}.norm.weight": torch.rand(32) for i in range(3)}
    tensors |= {"backbone.embedding.weight": torch.randn(64, 32), "backbone.norm_f.weight": torch.rand(32)}
    shapes = {
        "in_proj.weight": (144, 32),
        "conv1d.weight": (144, 1, 4),
        "conv1d.bias": (144,),
        "out_proj.weight": (32, 48),
    }
    tensors |= {f"backbone.layers.1.mixer.{name}": 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    block = anymamba.Mamba2(32, d_state=16, headdim=8)
    for layer in (0, 2):
        tensors |= {f"backbone.layers.{layer}.mixer.{name}": x.clone() for name, x in block.state_dict().items()}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    model = MambaLM.from_pretrained(tmp_path / "in")
    strict = MambaLM(MambaLMConfig.from_dict(config))
    strict.load_state_dict({**tensors, "lm_head.weight": tensors["backbone.embedding.weight"]}, strict=True)
    ids = torch.randint(61, (1, 9))
    assert torch.equal(model(ids).logits, strict(ids).logits)
    model.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    saved = MambaLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(saved[name], x) for name, x in tensors.items())
    assert main(["info", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out
    assert "layer 1" in lines
    assert "and 384 B more per token" in lines
    with pytest.raises(ValueError, match=r"transformers.* cannot hold this model: it has no attention layers"):
        model.save_pretrained(tmp_path / "no", format="transformers")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_layer_idx": [4]}, r"attn_layer_idx must be a list of layers, 0 to 3, got \[4\]"),
        ({"attn_layer_idx": ["1"]}, "attn_layer_idx must be a list of layers"),
        ({"attn_cfg": {}}, "attn_cfg must have num_heads for Attention"),
        ({"attn_cfg": {"heads": 3}}, r"attn_cfg has entries that Attention does not know: \['heads'\]"),
        ({"stack": {"layer_cfgs": [{"layer": "Mamba2"}] * 4}}, "cannot be combined with the stack's layer_cfgs"),
    ],
)
def test_invalid_attention_layers_raise_by_name(fields, message, unchecked):
    with pytest.raises(ValueError, match=message):
        MambaLMConfig(d_model=32, n_layer=4, ssm_cfg={"layer": "Mamba2", "headdim": 8}, **{**ATTENTION, **fields})


def test_quantized_projections_include_those_of_attention():
    model, ids = hybrid_lm(torch.float32), torch.randint(61, (1, 9))
    expected = model(ids).logits
    anymamba.quantization.quantize_model(model, "int8")
    assert type(model.backbone.layers[1].mixer.in_proj).__name__ == "QuantizedLinear"
    assert_near(model(ids).logits, expected, 0.1)
    assert model.generate(ids, 3).tokens.shape == (1, 3)


@needs_kernels
class TestCompiledStep:
    """One call per token for a whole hybrid; attention with a convolution runs module by module."""

    @staticmethod
    def make(dtype=torch.float32, **fields):
        options = {"attn_cfg": {"num_heads": 4, "num_heads_kv": 2, "rotary_emb_dim": 4, "mlp_dim": 40}}
        multipliers = {"input_multiplier": 3.0, "residual_multiplier": 0.4, "output_multiplier": 0.5}
        biases = {"qkv_proj_bias": True, "out_proj_bias": False}
        options["attn_cfg"] |= biases
        stack = {**multipliers, "mlp_cfg": {"gate_first": True}, "norm_eps": 1e-3}
        return hybrid_lm(dtype, d_intermediate=40, stack=stack, **options, **fields)

    @torch.no_grad()
    def test_tokens_are_those_of_the_modules(self):
        model, ids = self.make(), torch.randint(61, (3, 90))
        decoder = anymamba.decoder(model)
        assert decoder.reason == ""
        exact = copy.deepcopy(model).double()
        cache = model(ids[:, :9], mask=torch.tensor([9, 2, 5])).cache
        expected = exact(ids[:, :9], mask=torch.tensor([9, 2, 5])).cache
        for t in range(9, 90):
            logits, cache = decoder.step(ids[:, t], cache)
            reference, expected = exact.step(ids[:, t], expected)
            assert_near(logits, reference, MODEL_FLOOR)
        assert cache.layers[1].lengths.tolist() == [90, 83, 86]
        assert_near(without_padding(cache.layers[1]).kv, without_padding(expected.layers[1]).kv, MODEL_FLOOR)

    @torch.no_grad()
    def test_a_row_has_its_bits_in_any_batch_and_after_any_branch(self):
        model, ids = self.make(), torch.randint(61, (4, 30))
        decoder = anymamba.decoder(model)
        start = model(ids[:, :8], mask=torch.tensor([8, 1, 5, 3])).cache
        rows = [start.rows(row) for row in range(4)]
        kept = start.clone()
        cache = start
        for t in range(8, 30):
            logits, cache = decoder.step(ids[:, t], cache, in_place=True)
            for row in range(4):
                alone, rows[row] = decoder.step(ids[row : row + 1, t], rows[row])
                assert torch.equal(alone, logits[row : row + 1])
        for layer, before in zip(start.layers, kept.layers, strict=True):
            if layer.GROWING_FIELDS:
                assert torch.equal(without_padding(layer).kv, without_padding(before).kv)
        again, _ = decoder.step(ids[:, 8], kept)
        first, _ = decoder.step(ids[:, 8], LMCache.cat([kept.rows([row]) for row in range(4)]))
        assert torch.equal(again, first)

    @torch.no_grad()
    def test_more_rows_than_a_call_takes_run_module_by_module(self):
        model, ids = self.make(), torch.randint(61, (70, 3))
        cache = model(ids[:, :2]).cache
        logits, new = anymamba.decoder(model).step(ids[:, 2], cache)
        assert_near(logits, model(ids).logits[:, -1], MODEL_FLOOR)
        assert new.layers[1].lengths.tolist() == [3] * 70

    @torch.no_grad()
    def test_a_window_is_read_token_by_token(self):
        model, ids = self.make(), torch.randint(61, (2, 9))
        decoder, cache = anymamba.decoder(model), model(ids[:, :5]).cache
        assert "attention" in decoder.window_reason
        window = decoder.step_window(ids[:, 5:], cache)
        assert_near(window.logits, model(ids).logits[:, 5:], MODEL_FLOOR)
        assert window.cache_after([1, 3]).layers[1].lengths.tolist() == [6, 8]

    def test_what_is_not_covered_says_so(self):
        assert "attention with a convolution has no compiled step" in anymamba.decoder(hybrid_lm()).reason
        biased = self.make()
        biased.backbone.layers[0].mixer.out_proj.bias = torch.nn.Parameter(torch.zeros(32))
        assert "out_proj has a bias, and its result is multiplied by 0.4" in anymamba.decoder(biased).reason
