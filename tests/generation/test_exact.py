"""Exact reading gives one set of bits, however a text is cut."""

import random

import pytest
import torch

from anymamba import GenerationState, decoder, generate
from anymamba.core.registry import kernels_off
from anymamba.generation.prefill import Prefill, prefill
from anymamba.kernels.cpu import bindings
from anymamba.quantization import quantize_model
from tests.models.cases import FAMILIES, small_lm

compiled = pytest.mark.skipif(bindings.LIBRARY.handle is None, reason=bindings.LIBRARY.reason)
T = 150  # more than two windows


def assert_same(actual, expected):
    for name, x in expected.tensors().items():
        assert torch.equal(actual.tensors()[name], x), name


def unrolled(model, ids_bt):
    """Return the logits (b, t, v) of single steps, and the caches after 1 to t tokens."""
    decode, cache, logits, caches = decoder(model), None, [], []
    for ids_b in ids_bt.unbind(1):
        logits_bv, cache = decode.step(ids_b, cache)
        logits.append(logits_bv)
        caches.append(cache)
    return torch.stack(logits, dim=1), caches


def read_on(model, state, ids_1t, seed, path):
    """Read a text after a state in random parts, each in one of several ways."""
    rng, decode, at = random.Random(seed), decoder(model), 0
    while at < ids_1t.shape[1]:
        part = ids_1t[:, at : at + rng.randint(1, 90)]
        way = rng.choice(["prefill", "window", "step", "save", "branch"])
        if way == "window":
            window = decode.step_window(part[:, :64], state.cache)
            part = part[:, : rng.randint(1, window.logits.shape[1])]
            cache = window.cache_after(part.shape[1])
            state = GenerationState(cache, window.logits[:, part.shape[1] - 1], *state[2:])
        elif way == "step":
            part = part[:, :1]
            logits, cache = decode.step(part[:, 0], state.cache)
            state = GenerationState(cache, logits, *state[2:])
        else:
            if way == "save":
                state.save(path, model)
                state = GenerationState.load(path, model)
            elif way == "branch":
                state = state.rows([0, 0]).rows([1])
            state = prefill(model, part, state, segment_len=rng.randint(1, 200), exact=True)
        at += part.shape[1]
    return state


@compiled
@torch.no_grad()
@pytest.mark.parametrize("format", ["float32", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_cut_of_a_text_gives_the_same_bits(family, format, tmp_path):
    model = small_lm(family)
    model = model if format == "float32" else quantize_model(model, format)
    ids_1t = torch.randint(61, (1, T))
    logits, caches = unrolled(model, ids_1t)
    threads = torch.get_num_threads()
    try:
        for seed in range(4):
            torch.set_num_threads(1 + seed % 3)
            first = 1 + seed * 23
            state = prefill(model, ids_1t[:, :first], exact=True)
            assert torch.equal(state.logits, logits[:, first - 1])
            assert_same(state.cache, caches[first - 1])
            state = read_on(model, state, ids_1t[:, first:], seed, tmp_path / "state")
            assert torch.equal(state.logits, logits[:, -1])
            assert_same(state.cache, caches[-1])
    finally:
        torch.set_num_threads(threads)


@compiled
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_from_a_kept_state_equals_the_whole_text_read_afresh(family):
    model, ids = small_lm(family), torch.randint(61, (2, 70))
    options = {"exact": True, "return_state": True}
    first = generate(model, ids, 20, **options)
    question = torch.randint(61, (2, 5))
    continued = generate(model, question, 20, cache=first.state, **options)
    text = torch.cat([ids, first.tokens, question], dim=1)
    afresh = generate(model, text, 20, **options)
    assert torch.equal(continued.tokens, afresh.tokens)
    assert torch.equal(continued.state.logits, afresh.state.logits)
    assert_same(continued.state.cache, afresh.state.cache)
    # A row alone, and rows of different lengths.
    alone = generate(model, text[1:, :40], 20, **options)
    padded = generate(model, text, 20, mask=torch.tensor([9, 40]), **options)
    assert torch.equal(alone.tokens[0], padded.tokens[1])
    assert_same(padded.state.cache.rows([1]), alone.state.cache)


@compiled
def test_scores_of_a_prompt_change_no_bit():
    model, ids = small_lm(), torch.randint(61, (1, T))
    logits, caches = unrolled(model, ids)
    reader = Prefill(model, list(ids), exact=True, logprobs=2, segment_len=70)
    while not reader.is_done:
        state = reader.read_segment()
    assert torch.equal(state.logits, logits[:, -1])
    assert_same(state.cache, caches[-1])
    assert len(reader.prompt_scores) == T
    expected = logits[0, 79, :61].log_softmax(-1)[ids[0, 80]].item()
    assert reader.prompt_scores[80][0].logprob == pytest.approx(expected, abs=1e-6)


def test_without_the_compiled_step_it_is_rejected():
    model, ids = small_lm(), torch.randint(61, (1, 9))
    with kernels_off(), pytest.raises(ValueError, match="exact reading needs the compiled step"):
        generate(model, ids, 4, exact=True)
