"""transformers' own `generate` on accelerated models."""

import pytest
import torch

from anymamba.integrations.transformers import report
from tests.integrations.models import CONFIGS, ids, pair

ARCHITECTURES = list(CONFIGS)
NEW = 6
# Of these, transformers computes a token otherwise than the same token in a sequence: the limits of step sizes.
LIMITED = ("nemotron", "zamba2")


def generate(model, x, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    return model.generate(x, attention_mask=options.pop("mask", torch.ones_like(x)), **options)[:, x.shape[1] :]


def greedy_by_whole_sequences(model, x, mask=None):
    """Generate greedy tokens without a cache: every token from the whole sequence."""
    for _ in range(NEW):
        x = torch.cat([x, model(x, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return x[:, -NEW:]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy(name):
    original, fast = pair(name)
    x = ids(2, 9)
    tokens = generate(fast, x)
    with torch.no_grad():
        assert torch.equal(tokens, greedy_by_whole_sequences(original, x))
    assert all(layer.token == "one call" and not layer.last_fallback for layer in report(fast).layers)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in LIMITED])
def test_beams(name):
    original, fast = pair(name)
    x = ids(2, 9)
    assert torch.equal(generate(fast, x, num_beams=3), generate(original, x, num_beams=3))


@pytest.mark.parametrize("name", ["mamba", "mamba2", "bamba", "falcon_h1"])
def test_sampled(name):
    original, fast = pair(name)
    x, options = ids(2, 9), {"do_sample": True, "temperature": 0.8, "top_k": 9}
    torch.manual_seed(3)
    expected = generate(original, x, **options)
    torch.manual_seed(3)
    assert torch.equal(generate(fast, x, **options), expected)


@pytest.mark.parametrize("name", ["mamba2", "bamba", "jamba", "falcon_h1", "zamba2", "nemotron"])
def test_static_cache(name):
    _, fast = pair(name)
    x = ids(2, 9)
    options = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(generate(fast, x, **options), generate(fast, x))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_left_padded_rows_generate_as_alone(name):
    _, fast = pair(name)
    rows = [ids(1, n, seed=n) for n in (9, 4)]
    x, mask = torch.full((2, 9), 7), torch.zeros(2, 9, dtype=torch.long)
    for i, row in enumerate(rows):
        x[i, -row.shape[1] :], mask[i, -row.shape[1] :] = row[0], 1
    tokens = generate(fast, x, mask=mask)
    for i, row in enumerate(rows):
        assert torch.equal(tokens[i], generate(fast, row)[0]), i


@pytest.mark.parametrize("name", ["jamba", "bamba", "zamba2", "falcon_h1", "nemotron"])
def test_a_prompt_in_chunks(name):
    _, fast = pair(name)
    x = ids(2, 13)
    assert torch.equal(generate(fast, x, prefill_chunk_size=5), generate(fast, x))


@pytest.mark.parametrize("name", ["mamba2", "jamba", "falcon_h1"])
def test_without_a_cache(name):
    _, fast = pair(name)
    x = ids(2, 9)
    assert torch.equal(generate(fast, x, use_cache=False), generate(fast, x))
