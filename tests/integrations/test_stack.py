"""A token through a whole model of mixers in one call, and what it leaves to transformers' own forward."""

import copy
import gc
import weakref

import pytest
import torch
import transformers

from anymamba.integrations.transformers import accelerate, linear_layers, report, restore
from anymamba.integrations.transformers.mixer import AcceleratedMixer
from tests.integrations.models import ids, pair, plain, run, run_split
from tests.integrations.test_exactness import assert_as_near, reference_of
from tests.support import assert_near, relative_error

MODELS = ["mamba", "falcon_mamba", "mamba2"]
TOLERANCE = 1e-5
ONE_CALL = "one call for all layers"


def fail(*_, **__):
    raise AssertionError("a mixer was called")


def token_of(model):
    """Return how the model runs a token."""
    (model_report,) = report(model).models
    assert (model_report.reason == "") == (model_report.token == ONE_CALL)
    return model_report.token


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("name", MODELS)
def test_a_token_calls_no_mixer_and_is_the_sequence_s(name, rows, monkeypatch):
    (original, fast), x = pair(name), ids(rows, 12)
    expected, exact = fast(x).logits[:, 9:], reference_of(name)(x).logits[:, 9:]
    _, cache = run(fast, x[:, :9])
    monkeypatch.setattr(AcceleratedMixer, "forward", fail)
    logits = torch.cat([run(fast, x[:, at : at + 1], cache)[0] for at in (9, 10, 11)], 1)
    assert_as_near(logits, expected, exact)
    assert_near(logits, original(x).logits[:, 9:], TOLERANCE)


def row_of(cache, row):
    """Return a cache with a copy of one row."""
    alone = copy.deepcopy(cache)
    for layer in alone.layers:
        layer.conv_states = {i: x[row : row + 1].clone() for i, x in layer.conv_states.items()}
        layer.recurrent_states = {i: x[row : row + 1].clone() for i, x in layer.recurrent_states.items()}
    return alone


@torch.no_grad()
@pytest.mark.parametrize("rows", [65, 130])
@pytest.mark.parametrize("name", MODELS)
def test_a_token_is_the_same_in_a_batch_of_any_size(name, rows, monkeypatch):
    monkeypatch.setattr(linear_layers, "MIN_WEIGHT_NUMEL", 0)
    (_, fast), x = pair(name), ids(rows, 5)
    _, cache = run(fast, x[:, :4])
    alone = {row: row_of(cache, row) for row in (0, 63, 64, rows - 1)}
    logits, cache = run(fast, x[:, 4:], cache)
    for row, cache_alone in alone.items():
        logits_alone, cache_alone = run(fast, x[row : row + 1, 4:], cache_alone)
        assert torch.equal(logits_alone[0], logits[row])
        for layer, together in zip(cache_alone.layers, cache.layers, strict=True):
            assert torch.equal(layer.recurrent_states[0][0], together.recurrent_states[0][row])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_other_dtypes(name, dtype):
    (original, fast), x = pair(name, dtype), ids(2, 9)
    logits, expected = run_split(fast, x, (5, 1, 3)), run_split(original, x, (5, 1, 1, 1, 1))
    assert logits.dtype == expected.dtype
    exact = reference_of(name)(x).logits
    if dtype == torch.float64:
        assert relative_error(logits, exact) < 3e-7  # logits are rounded to float32 there
    else:
        assert relative_error(logits, exact) < 2 * relative_error(fast(x).logits, exact) + torch.finfo(dtype).eps
    hidden = [model.backbone(x[:, :1], cache_params=run(model, x)[1]).last_hidden_state for model in (original, fast)]
    assert hidden[0].dtype == hidden[1].dtype
    assert token_of(fast) == ONE_CALL


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_ask_for_a_token(name, monkeypatch):
    """Embeddings in place of ids, a mask of ones, tuples, no cache in return, the trunk alone."""
    (original, fast), x = pair(name), ids(2, 9)
    monkeypatch.setattr(AcceleratedMixer, "forward", fail)
    embedded, ones = original.get_input_embeddings()(x[:, 8:]), torch.ones(2, 9, dtype=torch.long)
    for options in (
        {"input_ids": x[:, 8:]},
        {"inputs_embeds": embedded},
        {"input_ids": x[:, 8:], "attention_mask": ones},
        {"input_ids": x[:, 8:], "return_dict": False},
        {"input_ids": x[:, 8:], "use_cache": False},
        {"input_ids": x[:, 8:], "labels": x[:, 8:], "logits_to_keep": 1},
    ):
        outputs = []
        for model in (original, fast):
            _, cache = run(original, x[:, :8])
            outputs.append(model(**options, cache_params=cache))
        assert type(outputs[0]) is type(outputs[1])
        assert len(outputs[0]) == len(outputs[1])
        values = outputs if isinstance(outputs[0], tuple) else [output.to_tuple() for output in outputs]
        logits = [next(v for v in value if isinstance(v, torch.Tensor) and v.ndim == 3) for value in values]
        assert_near(logits[1], logits[0], TOLERANCE)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        fast(x[:, 8:], inputs_embeds=embedded, cache_params=cache)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_masks_and_large_batches_are_left_to_transformers(name):
    (original, fast), x = pair(name), ids(3, 9)
    for options in ({"output_hidden_states": True}, {"attention_mask": torch.tensor([[1], [0], [1]])}):
        outputs = [model(x[:, 8:], cache_params=run(original, x[:, :8])[1], **options) for model in (original, fast)]
        real = options.get("attention_mask", torch.ones(3, 1))[:, 0].bool()
        assert_near(outputs[1].logits[real], outputs[0].logits[real], TOLERANCE)
        assert len(outputs[0].hidden_states or ()) == len(outputs[1].hidden_states or ())
    x = ids(65, 5)
    assert_near(run_split(fast, x, (4, 1)), original(x).logits, TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize(
    "where", ["", "layers.1", "layers.0.norm", "layers.1.mixer", "layers.0.mixer.in_proj", "norm_f"]
)
def test_hooks_are_called_and_may_go_again(where):
    (original, fast), x, seen = pair("mamba2"), ids(2, 7), []
    hook = fast.backbone.get_submodule(where).register_forward_hook(lambda *_: seen.append(1))
    assert_near(run_split(fast, x, (5, 1, 1)), original(x).logits, TOLERANCE)
    assert len(seen) == 3
    assert (token_of(fast) == ONE_CALL) == (where == "")
    hook.remove()
    assert token_of(fast) == ONE_CALL
    run_split(fast, x, (5, 1, 1))
    assert len(seen) == 3


@torch.no_grad()
def test_hooks_of_the_embedding_and_the_head_do_not_hinder():
    (_, fast), x, seen = pair("mamba2"), ids(2, 7), []
    for module in (fast.backbone.embeddings, fast.lm_head):
        module.register_forward_hook(lambda module, *_: seen.append(module))
    run_split(fast, x, (5, 1, 1))
    assert seen == [fast.backbone.embeddings, fast.lm_head] * 3
    assert token_of(fast) == ONE_CALL


@torch.no_grad()
def test_what_is_exchanged_in_a_model_counts_for_the_next_token():
    def exchange_layer(model):
        model.layers[0] = copy.deepcopy(model.layers[0])
        model.layers[0].mixer.out_proj.weight.mul_(2)

    def drop_layer(model):
        model.layers = model.layers[:1]

    def change_norm(model):
        model.norm_f.variance_epsilon = 0.3

    def move_norm(model):
        model.layers[1].norm.weight.data = model.layers[1].norm.weight.data * 2

    def widen_embedding(model):
        model.embeddings.weight.mul_(1.5)

    def patch_layer(model):
        model.layers[1].forward = lambda hidden, **_: 2 * hidden

    def change_limits(model):
        model.layers[0].mixer.time_step_limit = (0.2, 0.4)

    x = ids(2, 9)
    changes = (exchange_layer, drop_layer, change_norm, move_norm, widen_embedding, patch_layer, change_limits)
    for change in changes:
        _, fast = pair("mamba2")
        before = run_split(fast, x, (7, 1, 1))
        change(fast.backbone)
        logits = run_split(fast, x, (7, 1, 1))
        assert relative_error(logits, before) > 1e-3, change.__name__
        assert_near(logits, fast(x).logits, TOLERANCE, change.__name__)


@torch.no_grad()
def test_adapters_run_mixer_by_mixer_until_they_are_merged():
    peft = pytest.importorskip("peft")
    _, fast = pair("mamba2")
    torch.manual_seed(2)
    config = peft.LoraConfig(r=3, target_modules=["in_proj"], init_lora_weights=False)
    model = peft.get_peft_model(fast, config).eval()
    x = ids(2, 9)
    logits = model(x).logits
    assert_near(run_split(model.base_model.model, x, (7, 1, 1)), logits, TOLERANCE)
    assert token_of(model) == "mixer by mixer"
    merged = model.merge_and_unload()
    assert token_of(merged) == ONE_CALL
    assert_near(run_split(merged, x, (7, 1, 1)), logits, TOLERANCE)


def test_a_token_with_gradients_and_one_in_training():
    (original, fast), x = pair("mamba2"), ids(2, 9)
    with torch.no_grad():
        expected, cache = original(x).logits[:, 8:], run(fast, x[:, :8])[1]
    logits = fast(x[:, 8:], cache_params=copy.deepcopy(cache)).logits
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in fast.backbone.layers.parameters())
    assert_near(logits, expected, TOLERANCE)
    with torch.no_grad():
        assert_near(fast.train()(x[:, 8:], cache_params=cache).logits, expected, TOLERANCE)


@torch.no_grad()
def test_autocast_and_inference_mode():
    (original, fast), x = pair("mamba2"), ids(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(run_split(fast, x, (7, 1, 1)), original(x).logits) < 0.05
    with torch.inference_mode():
        assert_near(run_split(fast, x, (7, 1, 1)), original(x).logits, TOLERANCE)


def test_the_report_says_how_a_token_runs():
    _, fast = pair("mamba2")
    assert f"  backbone (Mamba2Model): a token: {ONE_CALL}" in str(report(fast)).splitlines()
    assert report(restore(fast)).models[0].reason == "it was not accelerated"
    assert type(fast.backbone) is transformers.Mamba2Model
    _, narrow = pair("mamba2", torch.bfloat16, residual_in_fp32=False)
    assert report(narrow).models[0].reason == "the residual stream is narrower than float32"
    assert not report(pair("bamba")[1]).models


@torch.no_grad()
def test_a_model_that_computes_something_else_is_left_to_transformers(monkeypatch):
    model = plain("mamba2")
    norm = type(model.backbone.norm_f)
    before = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, x: 2 * before(self, x))
    with pytest.warns(UserWarning, match="a token of Mamba2Model runs mixer by mixer: its outputs differ"):
        accelerate(model)
    assert type(model.backbone) is transformers.Mamba2Model
    assert "its outputs differ" in report(model).models[0].reason
    x = ids(2, 9)
    assert_near(run_split(model, x, (7, 1, 1)), model(x).logits, TOLERANCE)
    accelerate(model, check=False)
    assert token_of(model) == ONE_CALL


@torch.no_grad()
def test_a_model_that_ran_can_be_freed():
    _, fast = pair("mamba2")
    run_split(fast, ids(2, 7), (5, 1, 1))
    alive = [weakref.ref(fast.backbone), weakref.ref(fast.backbone.layers[0].mixer)]
    del fast
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
