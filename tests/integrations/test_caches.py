"""transformers' caches: exchanged with plain models, advanced in position, reset, and those that are left to it."""

import copy

import pytest
import torch

from anymamba.integrations.transformers import report
from tests.integrations.models import ids, pair, run
from tests.support import assert_near

TOLERANCE = 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba", "mamba2", "bamba", "granite", "falcon_h1"])
def test_caches_are_exchanged_with_plain_models(name):
    original, fast = pair(name)
    x = ids(2, 12)
    expected = original(x).logits
    for first, second in ((original, fast), (fast, original)):
        _, cache = run(first, x[:, :10])
        for at in (10, 11):
            logits, cache = run(second, x[:, at : at + 1], cache, at)
            assert_near(logits, expected[:, at : at + 1], TOLERANCE)


@torch.no_grad()
def test_a_token_advances_the_cache_s_own_tensors():
    _, fast = pair("mamba2")
    _, cache = run(fast, ids(2, 9))
    tensors = [(layer.conv_states[0], layer.recurrent_states[0]) for layer in cache.layers]
    before = [[t.clone() for t in pair] for pair in tensors]
    addresses = [[t.data_ptr() for t in pair] for pair in tensors]
    run(fast, ids(2, 1), cache)
    for layer, old, address in zip(cache.layers, before, addresses, strict=True):
        for new, was, position in zip((layer.conv_states[0], layer.recurrent_states[0]), old, address, strict=True):
            assert new.data_ptr() == position
            assert not torch.equal(new, was)


@torch.no_grad()
def test_a_cache_in_any_layout_of_memory():
    _, fast = pair("mamba2")
    x = ids(2, 11)
    _, cache = run(fast, x[:, :9])
    for layer in cache.layers:
        layer.recurrent_states[0] = layer.recurrent_states[0].transpose(0, -1).contiguous().transpose(0, -1)
        layer.conv_states[0] = layer.conv_states[0].transpose(0, 1).contiguous().transpose(0, 1)
    logits = [run(fast, x[:, at : at + 1], cache)[0] for at in (9, 10)]
    assert_near(torch.cat(logits, 1), fast(x).logits[:, 9:], TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_reset_cache_is_an_empty_one(name):
    _, fast = pair(name)
    x = ids(2, 9)
    _, cache = run(fast, ids(2, 5, seed=4))
    cache.reset()
    assert torch.equal(run(fast, x, cache)[0], fast(x).logits)


@torch.no_grad()
def test_a_copied_cache_branches():
    _, fast = pair("mamba2")
    x = ids(1, 9)
    _, cache = run(fast, x[:, :7])
    branch = copy.deepcopy(cache)
    run(fast, ids(1, 2, seed=5), cache)
    assert_near(run(fast, x[:, 7:], branch)[0], fast(x).logits[:, 7:], TOLERANCE)


@torch.no_grad()
def test_a_cache_that_records_the_past_is_left_to_transformers():
    original, fast = pair("mamba2")
    x = ids(1, 12)
    caches = []
    for model in (original, fast):
        _, cache = run(model, x[:, :8])
        for layer in cache.layers:
            layer.activate_past_recording()
        caches.append((run(model, x[:, 8:], cache)[0], cache))
    assert_near(caches[1][0], caches[0][0], TOLERANCE)
    assert "records the past" in report(fast).layers[0].last_fallback


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_batches_of_any_size(rows):
    _, fast = pair("mamba2")
    x = ids(rows, 6)
    _, cache = run(fast, x[:, :5])
    assert_near(run(fast, x[:, 5:], cache)[0], fast(x).logits[:, 5:], TOLERANCE)
