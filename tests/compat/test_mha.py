"""The official attention layer against its formula in float64, and language models that have one."""

import importlib
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anymamba.compat import install, uninstall
from tests.support import FLOOR, MODEL_FLOOR, assert_all_near, assert_near

D, HEADS, KV_HEADS, WIDTH = 12, 4, 2, 6
FORMS = {
    "plain": {"causal": True},
    "reads_all": {},
    "grouped": {"causal": True, "num_heads_kv": KV_HEADS, "head_dim": WIDTH, "softmax_scale": 0.3},
    "reads_all_with_parts": {"num_heads_kv": KV_HEADS, "head_dim": WIDTH, "d_conv": 3, "rotary_emb_dim": 4},
    "hybrid": {
        "causal": True,
        "num_heads_kv": KV_HEADS,
        "head_dim": WIDTH,
        "mlp_dim": 200,
        "d_conv": 4,
        "rotary_emb_dim": 4,
        "rotary_emb_base": 100.0,
        "rotary_emb_interleaved": True,
        "qkv_proj_bias": False,
        "out_proj_bias": False,
    },
}


@pytest.fixture(autouse=True)
def stand_in():
    install()
    yield
    uninstall()


def official(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"mamba_ssm.{module}"), name)


def draw(form, **options):
    layer = official("modules.mha.MHA")(D, HEADS, **FORMS[form], layer_idx=0, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def rotate(x, options):
    """Rotate the first channels of each head of x (b, t, h, e) by its position."""
    width, base = options["rotary_emb_dim"], options.get("rotary_emb_base", 10000.0)
    x, interleaved = x.clone(), options.get("rotary_emb_interleaved", False)
    for i in range(width // 2):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, width // 2 + i)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] / base ** (2 * i / width)
        u, w = x[..., first].clone(), x[..., second].clone()
        x[..., first], x[..., second] = u * angle.cos() - w * angle.sin(), w * angle.cos() + u * angle.sin()
    return x


def define(x, parameters, options):
    """Return attention over x (b, t, d) by the formula, and its keys and values (b, t, 2, g, e)."""
    kv_heads, width = options.get("num_heads_kv", HEADS), options.get("head_dim", D // HEADS)
    sizes = [HEADS * width, kv_heads * width, kv_heads * width]
    projected = F.linear(x, parameters["in_proj.weight"], parameters.get("in_proj.bias"))
    qkv, mlp = projected.split([sum(sizes), projected.shape[-1] - sum(sizes)], -1)
    if taps := options.get("d_conv", 0):
        padded = F.pad(qkv, (0, 0, taps - 1, 0))
        weight = parameters["conv1d.weight"].squeeze(1)
        qkv = sum(padded[:, i : i + x.shape[1]] * weight[:, i] for i in range(taps)) + parameters["conv1d.bias"]
    q, k, v = (part.unflatten(-1, (-1, width)) for part in qkv.split(sizes, -1))
    if options.get("rotary_emb_dim"):
        q, k = rotate(q, options), rotate(k, options)
    repeats = HEADS // kv_heads
    scores = torch.einsum("bihe,bjhe->bhij", q, k.repeat_interleave(repeats, 2))
    scores = scores * options.get("softmax_scale", 1 / math.sqrt(width))
    if options.get("causal", False):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    y = torch.einsum("bhij,bjhe->bihe", scores.softmax(-1), v.repeat_interleave(repeats, 2)).flatten(2)
    if mlp.shape[-1]:
        up, gate = mlp.chunk(2, -1)
        y = torch.cat([y, up * F.silu(gate)], -1)
    return F.linear(y, parameters["out_proj.weight"], parameters.get("out_proj.bias")), torch.stack([k, v], 2)


@pytest.mark.parametrize("form", FORMS)
def test_attention_is_its_formula(form):
    layer = draw(form, dtype=torch.float64)
    named = dict(layer.named_parameters())
    x = torch.randn(2, 7, D, dtype=torch.float64, requires_grad=True)
    y, (expected, _) = layer(x), define(x, named, FORMS[form])
    assert_near(y, expected, FLOOR[torch.float64])
    head, leaves = torch.randn_like(expected), {**named, "x": x}
    grads = [torch.autograd.grad((result * head).sum(), list(leaves.values())) for result in (y, expected)]
    assert_all_near(*(dict(zip(leaves, grad, strict=True)) for grad in grads), FLOOR[torch.float64])
    single = draw(form)
    single.load_state_dict({name: parameter.float() for name, parameter in named.items()})
    assert_near(single(x.float()), expected, FLOOR[torch.float32])


@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith("reads_all")])
def test_states_continue_a_sequence_token_by_token_or_in_parts(form):
    layer, x = draw(form, dtype=torch.float64), torch.randn(2, 9, D, dtype=torch.float64)
    whole, kv = define(x, dict(layer.named_parameters()), FORMS[form])
    for lengths in ([2, *[1] * 7], [4, 5]):
        params = official("utils.generation.InferenceParams")(max_seqlen=11, max_batch_size=3, batch_size_offset=1)
        for length in lengths:
            begin = params.seqlen_offset
            y = layer(x[:, begin : begin + length], inference_params=params)
            assert_near(y, whole[:, begin : begin + length], FLOOR[torch.float64])
            params.seqlen_offset += length
        kv_state, conv_state = params.key_value_memory_dict[0]
        assert kv_state.shape == (3, 11, *kv.shape[2:])
        assert_near(kv_state[1:, :9], kv, FLOOR[torch.float64])
        assert not kv_state[0].any()
        assert (conv_state is None) == ("d_conv" not in FORMS[form])
        with pytest.raises(ValueError, match=r"hold 3 rows of 11 tokens, got rows up to 3 and tokens up to 12"):
            layer(x[:, :3], inference_params=params)


def test_states_may_have_another_dtype_and_need_a_layer_index():
    layer, x = draw("hybrid"), torch.randn(1, 5, D)
    params = official("utils.generation.InferenceParams")(max_seqlen=5, max_batch_size=1)
    params.key_value_memory_dict[0] = layer.allocate_inference_cache(1, 5, dtype=torch.bfloat16)
    layer(x[:, :4], inference_params=params)
    params.seqlen_offset = 4
    assert_near(layer(x[:, 4:], inference_params=params), layer(x)[:, 4:], FLOOR[torch.bfloat16])
    with pytest.raises(ValueError, match="layer_idx must be given"):
        official("modules.mha.MHA")(D, HEADS)(x, inference_params=params)


def test_a_hybrid_language_model_generates_and_is_saved(tmp_path):
    config = official("models.config_mamba.MambaConfig")(
        d_model=32,
        n_layer=3,
        vocab_size=40,
        ssm_cfg={"layer": "Mamba2", "headdim": 8, "d_state": 8},
        attn_layer_idx=[1],
        attn_cfg={"causal": True, "num_heads": 4, "rotary_emb_dim": 4, "d_conv": 4, "qkv_proj_bias": False},
    )
    model_class = official("models.mixer_seq_simple.MambaLMHeadModel")
    model = model_class(config).double()
    assert type(model.backbone.layers[1].mixer).__name__ == "MHA"
    ids = torch.randint(40, (2, 5))
    sequences = model.generate(ids, 12)
    for length in range(5, 12):  # by the compiled step, against the whole sequence each time
        assert torch.equal(model(sequences[:, :length]).logits[:, -1].argmax(-1), sequences[:, length])
    hook = model.register_forward_hook(lambda *_: None)  # so that it is generated with states, layer by layer
    assert torch.equal(model.generate(ids, 12), sequences)
    hook.remove()
    model.float().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_layer_idx"] == [1]
    again = model_class.from_pretrained(str(tmp_path))
    assert_near(again(ids).logits, model(ids).logits, MODEL_FLOOR)
