"""Projections outside of mixers, for few rows: of attention, of MLPs and the head."""

import copy
import pickle

import pytest
import torch
from torch import nn

from anymamba.integrations.transformers import accelerate, linear_layers, report, restore
from anymamba.integrations.transformers.linear_layers import Linear
from tests.integrations.models import CONFIGS, ids, pair, plain, run_split
from tests.support import assert_near, relative_error

TOLERANCE = 1e-5


@pytest.fixture
def all_sizes(monkeypatch):
    """Let projections of any size be exchanged."""
    monkeypatch.setattr(linear_layers, "MIN_WEIGHT_NUMEL", 0)


def runs_of(monkeypatch):
    """Return a list that grows whenever the kernels run a projection."""
    runs, run_few_rows = [], Linear._run_few_rows

    def count_call(self, x):
        y = run_few_rows(self, x)
        runs.append(y is not None)
        return y

    monkeypatch.setattr(Linear, "_run_few_rows", count_call)
    return runs


@torch.no_grad()
@pytest.mark.parametrize("name", list(CONFIGS))
def test_tokens_of_every_architecture(name, all_sizes, monkeypatch):
    (original, fast), x = pair(name), ids(2, 7)
    count = report(fast).projections
    assert count == sum(type(module) is Linear for module in fast.modules())
    assert "other projections for few rows" in str(report(fast))
    assert all(type(part) is not Linear for part in fast.modules() if hasattr(part, "A_log") for part in part.modules())
    runs = runs_of(monkeypatch)
    tokens = run_split(fast, x, (5, 1, 1))
    assert len(runs) >= count
    assert all(runs)
    assert_near(tokens, fast(x).logits, TOLERANCE)
    restored = restore(fast)
    assert not any(type(module) is Linear for module in restored.modules())
    assert torch.equal(restored(x).logits, original(x).logits)


@torch.no_grad()
def test_small_projections_are_torch_s_own():
    assert report(pair("bamba")[1]).projections == 0
    layer = accelerate(plain("bamba", hidden_size=512, mamba_n_heads=64)).lm_head
    assert type(layer) is nn.Linear  # 61 x 512


def linear(rows, columns, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(columns, rows, bias=bias).to(dtype)
    layer.__class__ = Linear
    return layer


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 37), (2, 1, 37), (37,), (3, 2, 37), (70, 37), (0, 37)])
def test_values_of_any_shape(shape, dtype):
    layer, x = linear(29, 37, dtype), torch.randn(shape).to(dtype)
    exact = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    y = layer(x)
    assert y.dtype == dtype
    assert y.shape == exact.shape
    if x.numel():
        assert relative_error(y, exact) < 4 * torch.finfo(dtype).eps


@torch.no_grad()
def test_rows_that_are_not_contiguous():
    layer = linear(29, 37)
    x = torch.randn(37, 6).T[::2]
    assert_near(layer(x), nn.functional.linear(x, layer.weight, layer.bias), 1e-6)


def test_gradients_are_torch_s_own():
    layer, x = linear(29, 37), torch.randn(2, 37, requires_grad=True)
    layer(x).sum().backward()
    assert_near(x.grad, layer.weight.sum(0).expand(2, -1), 1e-6)
    assert layer.weight.grad is not None


@torch.no_grad()
def test_what_is_exchanged_counts_for_the_next_row():
    layer, x = linear(29, 37), torch.randn(2, 37)
    layer(x)
    for change in (
        lambda: layer.weight.mul_(2),
        lambda: setattr(layer, "weight", nn.Parameter(layer.weight + 1)),
        lambda: setattr(layer.weight, "data", layer.weight.data * 3),
        lambda: setattr(layer, "bias", None),
    ):
        change()
        assert_near(layer(x), nn.functional.linear(x, layer.weight, layer.bias), 1e-6)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(2, 36))
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(x.double())


@torch.no_grad()
def test_hooks_autocast_copies_pickles_and_functional_calls():
    layer, x, seen = linear(29, 37), torch.randn(2, 37), []
    expected = layer(x)
    handle = layer.register_forward_hook(lambda *_: seen.append(1))
    layer(x)
    handle.remove()
    assert seen == [1]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is Linear
        assert torch.equal(other(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    doubled = {name: 2 * p for name, p in layer.named_parameters()}
    assert_near(torch.func.functional_call(layer, doubled, (x,)), 2 * expected, 1e-6)
    assert_near(torch.func.vmap(layer)(x), expected, 1e-6)
    assert repr(layer) == "Linear(in_features=37, out_features=29, bias=True)"


@torch.no_grad()
def test_adapters_on_attention_and_mlps(all_sizes):
    peft = pytest.importorskip("peft")
    (original, fast), x = pair("bamba"), ids(2, 9)
    models = []
    for model in (original, fast):
        torch.manual_seed(2)
        config = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
        models.append(peft.get_peft_model(model, config).eval())
    expected = models[0](x).logits
    assert relative_error(expected, plain("bamba")(x).logits) > 1e-2
    assert_near(run_split(models[1].base_model.model, x, (7, 1, 1)), expected, TOLERANCE)
    assert_near(run_split(models[1].merge_and_unload(), x, (7, 1, 1)), expected, TOLERANCE)
