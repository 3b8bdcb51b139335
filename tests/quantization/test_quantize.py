"""Models with weights in fewer bits: loaded, saved, generated from, rejected."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from anymamba import GenerationState, MambaLM, decoder, generate
from anymamba.core.weight_formats import FORMAT_SPECS
from anymamba.kernels.cpu import bindings
from anymamba.quantization.ops import dequantize_tensor
from anymamba.quantization.quantize import QuantizedEmbedding, QuantizedLinear, quantize_model, weight_format
from tests.models.cases import FAMILIES, small_lm
from tests.support import FLOOR, assert_near

# The logits of a model against float64; products with integer weights round activations to 16 bits. Measured over these
# cases: at most 1.1e-4.
FORMATS = tuple(FORMAT_SPECS)
GROUPS = [name for name, spec in FORMAT_SPECS.items() if spec.group_size]
LOGITS_FLOOR = dict.fromkeys(FORMATS, 20 * FLOOR[torch.float32]) | dict.fromkeys(GROUPS, 5e-4)
IDS = torch.arange(18).view(2, 9) * 7 % 61


def dequantize_lm(model):
    """Return the same model with plain float32 weights of the same values."""
    plain = MambaLM(model.config)
    quantized_layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear | QuantizedEmbedding)
    }
    state = {name: x for name, x in model.state_dict().items() if not name.endswith(".scales")}
    plain.load_state_dict(
        {**state, **{f"{name}.weight": dequantize_tensor(module.stored) for name, module in quantized_layers.items()}}
    )
    return plain


@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_model_computes_what_the_widened_one_does(family, format):
    model = quantize_model(small_lm(family, tie_embeddings=format == "int8"), format)
    plain = dequantize_lm(model)
    with torch.no_grad():
        output, expected = model(IDS, labels=IDS, logits="all"), plain.double()(IDS, labels=IDS, logits="all")
        assert_near(output.logits, expected.logits, LOGITS_FLOOR[format])
        assert_near(model(IDS, labels=IDS, logits="none").loss, expected.loss, LOGITS_FLOOR[format])


@pytest.mark.skipif(bindings.LIBRARY.handle is None, reason=bindings.LIBRARY.reason)
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("format", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_token_is_to_the_bit_that_of_the_widened_model(family, format, rows):
    """The sums are taken in the same order."""
    model = quantize_model(small_lm(family), format)
    quantized, plain = decoder(model), decoder(dequantize_lm(model))
    cache = other = None
    for ids in (IDS.flatten()[:rows], IDS.flatten()[rows : 2 * rows]):
        logits, cache = quantized.step(ids, cache)
        expected, other = plain.step(ids, other)
        assert torch.equal(logits, expected)
    assert quantized.reason == ""
    assert all(torch.equal(a, b) for a, b in zip(cache.leaves(), other.leaves(), strict=True))


@pytest.mark.skipif(bindings.LIBRARY.handle is None, reason=bindings.LIBRARY.reason)
@pytest.mark.parametrize("format", GROUPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_token_of_integer_weights_is_near_that_of_the_widened_model(family, format):
    """Activations are rounded to 16 bits in every product."""
    model = quantize_model(small_lm(family), format)
    quantized, exact = decoder(model), dequantize_lm(model).double()
    cache = other = None
    for ids in IDS.T:
        logits, cache = quantized.step(ids, cache)
        with torch.no_grad():
            expected, other = exact.step(ids, other)
        assert_near(logits, expected, LOGITS_FLOOR[format])
    assert quantized.reason == ""


@pytest.mark.skipif(bindings.LIBRARY.handle is None, reason=bindings.LIBRARY.reason)
@pytest.mark.parametrize("format", FORMATS)
def test_a_compiled_token_does_not_depend_on_other_rows_nor_on_the_threads(format):
    decode = decoder(quantize_model(small_lm(), format))
    ids = IDS.flatten()
    together, _ = decode.step(ids)
    before = torch.get_num_threads()
    try:
        for threads, some in ((1, [4]), (2, [0, 7, 8]), (3, list(range(3, 18)))):
            torch.set_num_threads(threads)
            assert torch.equal(decode.step(ids[some])[0], together[some])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_a_saved_quantized_model_is_the_same_to_the_bit(tmp_path, format, tied):
    small_lm(tie_embeddings=tied).save_pretrained(tmp_path / "plain")
    model = MambaLM.from_pretrained(tmp_path / "plain", weights=format)
    assert weight_format(model) == format
    assert model.dtype == torch.float32
    assert model.is_tied == tied
    model.save_pretrained(tmp_path / "quantized")
    again = MambaLM.from_pretrained(tmp_path / "quantized")
    assert weight_format(again) == format
    assert model.state_dict().keys() == again.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, again(IDS).logits)
    assert again.fingerprint() == model.fingerprint() != MambaLM.from_pretrained(tmp_path / "plain").fingerprint()
    assert torch.equal(generate(model, IDS, 5).tokens, generate(again, IDS, 5).tokens)


def test_quantizing_while_loading_and_in_memory_give_the_same(tmp_path):
    plain = small_lm("Mamba3")
    plain.save_pretrained(tmp_path)
    loaded, quantized = MambaLM.from_pretrained(tmp_path, weights="int4"), quantize_model(copy.deepcopy(plain), "int4")
    for name, x in loaded.state_dict().items():
        assert torch.equal(x, quantized.state_dict()[name]), name


@pytest.mark.parametrize("format", FORMATS)
def test_quantizing_weights_of_float64_is_no_loss_to_warn_of(tmp_path, format, recwarn):
    """A warning would advise another dtype, which keeps no more digits of what is quantized."""
    small_lm(dtype=torch.float64).save_pretrained(tmp_path)
    MambaLM.from_pretrained(tmp_path, weights=format)
    assert [str(warning.message) for warning in recwarn] == []


def test_activations_may_be_narrower_than_float32(tmp_path):
    small_lm().save_pretrained(tmp_path)
    model = MambaLM.from_pretrained(tmp_path, dtype=torch.bfloat16, weights="int8")
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        assert model(IDS).logits.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "quantized")
    assert MambaLM.from_pretrained(tmp_path / "quantized").dtype == torch.bfloat16


def test_an_adapter_of_a_quantized_weight_is_called_and_trained():
    model = quantize_model(small_lm("Mamba2"), "int8")

    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    for layer in model.backbone.layers:
        layer.mixer.in_proj = Adapted(layer.mixer.in_proj)
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    adapters = [p for name, p in model.named_parameters() if "up" in name]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in adapters)
    assert decoder(model).reason
    logits, _ = decoder(model).step(IDS[:, 0])
    with torch.no_grad():
        assert_near(logits, model(IDS[:, :1]).logits[:, 0].double(), FLOOR[torch.float32])


@pytest.mark.parametrize("format", FORMATS)
def test_a_wrapped_head_need_not_say_its_width(format):
    """As an adapter that somebody wrote by hand."""

    class Wrapped(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return self.base(x)

    model = quantize_model(small_lm("Mamba2", tie_embeddings=False), format)
    tokens, loss = generate(model, IDS, 3).tokens, model(IDS, labels=IDS).loss
    model.lm_head = Wrapped(model.lm_head)
    assert "Wrapped" in decoder(model).reason
    assert torch.equal(generate(model, IDS, 3).tokens, tokens)
    assert torch.equal(model(IDS, labels=IDS).loss, loss)
    assert_near(model(IDS, labels=IDS, logits="none").loss, loss.double(), FLOOR[torch.float32])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("of", ["float32", *FORMATS])
def test_a_state_dict_of_another_format_is_rejected_and_one_of_the_same_taken(of, to, assign, strict):
    source = small_lm(seed=1) if of == "float32" else quantize_model(small_lm(seed=1), of)
    model = quantize_model(small_lm(seed=2), to)
    if of == to:
        model.load_state_dict(source.state_dict(), assign=assign, strict=strict)
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, source(IDS).logits)
        assert model.is_tied
        return
    before = {name: x.clone() for name, x in model.state_dict().items() if ".scales" in name or x.ndim == 2}
    with pytest.raises(RuntimeError, match=f"of a weight in {to} must be torch"):
        model.load_state_dict(source.state_dict(), assign=assign, strict=strict)
    assert all(torch.equal(model.state_dict()[name], x) for name, x in before.items())


@pytest.mark.parametrize("changed", ["weight", "scales"])
def test_a_tied_head_that_differs_is_rejected(tmp_path, changed):
    """Its scales count as much as its codes."""
    model = quantize_model(small_lm(), "int8")
    untied = copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    assert MambaLM.from_pretrained(tmp_path).is_tied  # stored twice, with the same values
    state[f"lm_head.{changed}"] = state[f"lm_head.{changed}"].clone().zero_()
    with pytest.raises(RuntimeError, match=r"are one \(tied\)"):
        model.load_state_dict(state)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"are one \(tied\)"):
        MambaLM.from_pretrained(tmp_path)
    setattr(untied.lm_head, changed, nn.Parameter(state[f"lm_head.{changed}"], requires_grad=False))
    with pytest.raises(ValueError, match=r"are one \(tied\)"):
        untied.save_pretrained(tmp_path / "other")


@pytest.mark.parametrize(
    ("format", "name", "stored"),
    [
        ("int8", "scales", torch.float32),
        ("int4", "scales", torch.float16),
        ("int8", "weight", torch.uint8),
        ("int8", "weight", torch.float32),
        ("bfloat16", "weight", torch.float32),
        ("bfloat16", "weight", torch.float16),
        ("float16", "weight", torch.bfloat16),
    ],
)
def test_codes_and_scales_of_another_dtype_are_rejected(tmp_path, format, name, stored):
    quantize_model(small_lm(), format).save_pretrained(tmp_path)
    state, key = load_file(tmp_path / "model.safetensors"), f"backbone.layers.1.mixer.out_proj.{name}"
    state[key] = state[key].to(stored)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{key} \(expected torch\..*, got {stored}\)"):
        MambaLM.from_pretrained(tmp_path)


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    model = quantize_model(small_lm(), "int8").double()
    with pytest.raises(ValueError, match=r"up to float32, got torch.float64; model.float\(\)"):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    model.float().save_pretrained(tmp_path / "model")
    assert MambaLM.from_pretrained(tmp_path / "model").dtype == torch.float32


def test_states_of_other_weights_are_rejected(tmp_path):
    plain = small_lm()
    quantized = quantize_model(copy.deepcopy(plain), "int8")
    generate(plain, IDS, 2, return_state=True).state.save(tmp_path / "state", plain)
    with pytest.raises(ValueError, match="expected fingerprint"):
        GenerationState.load(tmp_path / "state", quantized)
    generate(quantized, IDS, 2, return_state=True).state.save(tmp_path / "state", quantized)
    with pytest.raises(ValueError, match="another model, dtype or format of weights"):
        GenerationState.load(tmp_path / "state", plain)


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_is_named(tmp_path):
    plain = small_lm()
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="weights must be one of bfloat16, float16, int8, int4, got 'int3'"):
        MambaLM.from_pretrained(tmp_path / "plain", weights="int3")
    with pytest.raises(TypeError, match="quantize_model: expected a MambaLM, got Backbone"):
        quantize_model(plain.backbone, "int8")
    with pytest.raises(ValueError, match="for activations up to float32"):
        MambaLM.from_pretrained(tmp_path / "plain", weights="int8", dtype=torch.float64)
    quantized = MambaLM.from_pretrained(tmp_path / "plain", weights="int8")
    with pytest.raises(ValueError, match="got one in int8"):
        quantize_model(quantized, "int4")
    with pytest.raises(ValueError, match="the transformers format cannot hold weights in int8"):
        quantized.save_pretrained(tmp_path / "other", format="transformers")
    assert not (tmp_path / "other").exists()
    quantized.save_pretrained(tmp_path / "quantized")
    with pytest.raises(ValueError, match="stored in int8, and cannot be loaded in int4"):
        MambaLM.from_pretrained(tmp_path / "quantized", weights="int4")
    with torch.no_grad():
        plain.backbone.layers[0].mixer.in_proj.weight[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"backbone.layers.0.mixer.in_proj.weight: .* not finite"):
        quantize_model(plain, "int8")
    assert weight_format(plain) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantized with 'bitsandbytes'"),
        ({"weights": "int3"}, "must name weights in one of"),
        ({"weights": "int4"}, "do not fit the config"),
        ({"dtype": "complex64"}, "must name weights in one of"),
        ({"quant_method": None}, "a table that names its quant_method"),
        (
            {"group_size": 128, "act_order": True},
            "unknown fields, so .* read: act_order, group_size",
        ),
        (None, "do not fit the config"),
    ],
)
def test_a_foreign_or_changed_config_is_rejected(tmp_path, change, message):
    quantize_model(small_lm(), "int8").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if change is None:
        del config["quantization_config"]
    else:
        config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        MambaLM.from_pretrained(tmp_path)
