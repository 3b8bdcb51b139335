"""A decoder gives the logits of the model's own step, whatever becomes of the model."""

import copy
import gc
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from anymamba import GenerationState, MambaLM, decoder, generate
from anymamba.core.registry import kernels_off
from anymamba.generation.prefill import prefill
from anymamba.kernels.cpu import bindings
from anymamba.kernels.cpu.step_compiler import MAX_ROWS
from tests.models.cases import FAMILIES, small_lm
from tests.support import assert_near

compiled = pytest.mark.skipif(bindings.LIBRARY.handle is None, reason=bindings.LIBRARY.reason)
families = pytest.mark.parametrize("family", FAMILIES)
# The blocks of `small_lm` have twenty times larger outputs than usual, which makes every rounding count.
LIVELY_FLOOR = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 0.1, torch.float16: 2e-2}


def steps(module, tokens, cache=None):
    """Return the logits of a few steps, and the last cache."""
    outputs = []
    for ids in tokens:
        y, cache = module.step(ids, cache)
        outputs.append(y)
    return torch.stack(outputs), cache


@compiled
@torch.no_grad()
@pytest.mark.parametrize("dtype", LIVELY_FLOOR, ids=str)
@families
@pytest.mark.parametrize("fields", [{}, {"d_intermediate": 40, "tie_embeddings": False}], ids=["plain", "mlp"])
def test_it_steps_as_the_model_does(fields, family, dtype):
    model = small_lm(family, dtype, **fields)
    tokens, decode = torch.randint(61, (5, 3)), decoder(model)
    assert decode.reason == ""
    logits, cache = steps(decode, tokens)
    with kernels_off():
        expected, expected_cache = steps(model, tokens)
    assert_near(logits, expected, LIVELY_FLOOR[dtype])
    for layer, reference in zip(cache.layers, expected_cache.layers, strict=True):
        assert_near(layer.ssm, reference.ssm, LIVELY_FLOOR[dtype])


@compiled
@torch.no_grad()
def test_it_gives_the_same_bits_from_any_thread_and_batch():
    model, ids = small_lm(d_model=96, vocab_size=700), torch.randint(700, (6,))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        logits, cache = decoder(model).step(ids)
        shared = decoder(model)
        with ThreadPoolExecutor(4) as pool:
            for other, _ in pool.map(lambda _: shared.step(ids, cache), range(8)):
                assert torch.equal(other, shared.step(ids, cache)[0])
        torch.set_num_threads(1)
        for row in range(6):
            assert torch.equal(decoder(model).step(ids[row : row + 1])[0][0], logits[row])
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
@families
def test_a_cache_is_a_value_unless_it_is_given_away(family):
    model, ids = small_lm(family), torch.randint(61, (2,))
    decode = decoder(model)
    _, cache = decode.step(ids)
    before = cache.clone()
    logits, _ = decode.step(ids, cache)
    for name, x in cache.tensors().items():
        assert torch.equal(x, before.tensors()[name]), name
    logits_in_place, advanced = decode.step(ids, cache, in_place=True)
    assert torch.equal(logits_in_place, logits)
    again, _ = decode.step(ids, advanced)
    expected, _ = decode.step(ids, decode.step(ids, before)[1])
    assert torch.equal(again, expected)


@torch.no_grad()
def test_no_rows_are_the_models():
    model, ids = small_lm(), torch.randint(61, (0,))
    assert torch.equal(decoder(model).step(ids)[0], model.step(ids)[0])


@compiled
@torch.no_grad()
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("batch", [MAX_ROWS + 1, 2 * MAX_ROWS + 2])
def test_more_rows_than_one_call_takes_are_the_same_rows(batch, in_place):
    model, ids = small_lm(), torch.randint(61, (2, batch))
    decode = decoder(model)
    _, cache = decode.step(ids[0])
    copy = cache.with_tensors(x.clone() for x in cache.leaves())
    logits, after = decode.step(ids[1], copy, in_place=in_place)
    assert all(torch.equal(x, y) for x, y in zip(cache.leaves(), copy.leaves(), strict=True)) != in_place
    assert (after.leaves()[0].data_ptr() == copy.leaves()[0].data_ptr()) == in_place
    for row in (0, MAX_ROWS - 1, MAX_ROWS, batch - 1):
        alone, cache_alone = decode.step(ids[1, row : row + 1], cache.rows([row]))
        assert torch.equal(alone, logits[row : row + 1])
        for x, y in zip(cache_alone.leaves(), after.leaves(), strict=True):
            assert torch.equal(x, y[row : row + 1])


@compiled
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("batch", [MAX_ROWS + 1, 2 * MAX_ROWS + 2])
def test_a_row_generates_the_same_in_a_batch_of_any_size(batch, weights, tmp_path):
    small_lm(d_model=64).save_pretrained(tmp_path)
    model = MambaLM.from_pretrained(tmp_path, weights=weights)
    states = [prefill(model, torch.randint(61, (1, 3))) for _ in range(batch)]
    options = {"temperature": 1.0, "seed": 5, "return_state": True}
    together = generate(model, None, 8, cache=GenerationState.cat(states), **options)
    for row in (0, MAX_ROWS - 1, MAX_ROWS, batch - 1):
        alone = generate(model, None, 8, cache=states[row], **options)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        for x, y in zip(alone.state.cache.leaves(), together.state.cache.leaves(), strict=True):
            assert torch.equal(x[0], y[row])


class Doubled(nn.Linear):
    """A layer that has something to add, as an adapter has."""

    def forward(self, x):
        return 2 * super().forward(x)


def replace_parameter(model):
    old = model.backbone.layers[0].mixer.D
    model.backbone.layers[0].mixer.D = nn.Parameter(old + 1)


def give_other_data(model):
    weight = model.backbone.layers[1].mixer.in_proj.weight
    weight.data = weight.data.flip(0).clone()


def change_in_place(model):
    model.backbone.layers[1].mixer.in_proj.weight.mul_(1.5)


def exchange_module(model):
    model.backbone.layers[0].mixer.out_proj.__class__ = Doubled


def hook(model):
    model.backbone.layers[0].mixer.in_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


def hook_before(model):
    model.backbone.norm_f.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))


def patch_forward(model):
    linear = model.backbone.layers[1].mixer.out_proj
    linear.forward = lambda x: 3 * nn.functional.linear(x, linear.weight)


def parametrize(model):
    class Half(nn.Module):
        def forward(self, x):
            return x / 2

    torch.nn.utils.parametrize.register_parametrization(model.backbone.layers[0].mixer.in_proj, "weight", Half())


def change_epsilon(model):
    model.backbone.layers[0].norm.eps = 0.5


def drop_layer(model):
    del model.backbone.layers[1]


def swap_layers(model):
    model.backbone.layers[0], model.backbone.layers[1] = model.backbone.layers[1], model.backbone.layers[0]


def add_bias(model):
    projection = model.backbone.layers[0].mixer.in_proj
    projection.bias = nn.Parameter(torch.randn(projection.out_features))


CHANGES = [replace_parameter, give_other_data, change_in_place, exchange_module, hook, hook_before, patch_forward]
CHANGES += [parametrize, change_epsilon, drop_layer, swap_layers, add_bias]


@torch.no_grad()
@families
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_became_of_the_modules_counts_in_the_next_sequence(change, family):
    model, ids = small_lm(family), torch.arange(3)
    decode = decoder(model)
    before, _ = decode.step(ids)
    change(model)
    after, _ = decode.step(ids)
    assert_near(after, model.step(ids)[0], 2e-5)
    assert not torch.allclose(after, before)


@torch.no_grad()
@pytest.mark.parametrize("change", [c for c in CHANGES if c is not drop_layer], ids=lambda change: change.__name__)
def test_within_a_sequence_it_counts_at_once(change):
    model, ids = small_lm(), torch.arange(3)
    decode = decoder(model)
    _, cache = decode.step(ids)
    before, _ = decode.step(ids, cache)
    change(model)
    after, _ = decode.step(ids, cache)
    with kernels_off():
        assert_near(after, model.step(ids, cache)[0], 2e-5)
    assert not torch.allclose(after, before)


@compiled
@torch.no_grad()
def test_nothing_is_read_after_it_was_freed():
    model, ids = small_lm(), torch.arange(3)
    decode = decoder(model)
    logits, cache = decode.step(ids)
    held = weakref.ref(model.backbone.layers[0].mixer.in_proj.weight.untyped_storage())
    for layer in model.backbone.layers:
        layer.mixer.in_proj.weight.data = torch.zeros_like(layer.mixer.in_proj.weight)
    gc.collect()
    assert held() is not None  # nothing else may be allocated at its address
    with kernels_off():
        expected, _ = model.step(ids, cache)
    assert_near(decode.step(ids, cache)[0], expected, 2e-5)
    model.backbone.layers[0].mixer.D.untyped_storage().resize_(0)
    with pytest.raises((ValueError, RuntimeError)):
        decode.step(ids, cache)


@torch.no_grad()
@families
def test_a_model_that_changes_its_dtype(family):
    model, ids = small_lm(family), torch.arange(3)
    decode = decoder(model)
    for dtype in (torch.bfloat16, torch.float64, torch.float16, torch.float32):
        model.to(dtype)
        logits, cache = decode.step(ids)
        assert logits.dtype == dtype
        assert_near(logits, model.step(ids)[0], {torch.bfloat16: 0.1, torch.float16: 2e-2}.get(dtype, 2e-5))
        decode.step(ids, cache)


@torch.no_grad()
@families
def test_autocast_is_obeyed(family):
    model, ids = small_lm(family), torch.arange(3)
    with torch.autocast("cpu", torch.bfloat16):
        logits, cache = decoder(model).step(ids)
        assert torch.equal(logits, model.step(ids)[0])
        model.step(ids, cache)
    assert logits.dtype == torch.bfloat16


@torch.no_grad()
def test_what_the_kernels_do_not_cover_runs_its_own_code_and_says_why():
    cases = (
        ({"rms_norm": False}, torch.float32, "norm is a LayerNorm, not a RMSNorm"),
        ({"residual_in_fp32": False}, torch.bfloat16, "the residual stream is narrower than float32"),
        ({"ssm_cfg": {**FAMILIES["Mamba3"], "rotation": "fixed"}}, torch.float32, "a fixed rotation"),
    )
    for fields, dtype, reason in cases:
        model, ids = small_lm(dtype=dtype, **fields), torch.arange(3)
        decode = decoder(model)
        assert torch.equal(decode.step(ids)[0], model.step(ids)[0])
        if bindings.LIBRARY.handle is not None:
            assert reason in decode.reason


@torch.no_grad()
def test_a_model_that_is_gone_is_freed():
    model = MambaLM(d_model=16, n_layer=1, vocab_size=9, ssm_cfg={"layer": "Mamba2", "d_state": 8, "headdim": 8})
    decode = decoder(model)
    decode.step(torch.zeros(1, dtype=torch.long))
    gone = weakref.ref(model.backbone.layers[0].mixer.in_proj.weight)
    gc.collect()
    gc.disable()
    try:
        del model, decode
        assert gone() is None  # at once: two models may not fit into memory
    finally:
        gc.enable()


@torch.no_grad()
@pytest.mark.parametrize("family", ["Mamba2", "Mamba3"])
def test_a_learnable_initial_state_is_not_written_over(family):
    model = small_lm(ssm_cfg={**FAMILIES[family], "learnable_init_states": True})
    before = copy.deepcopy(model.state_dict())
    decoder(model).step(torch.tensor([1]), in_place=True)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("grad", [True, False])
def test_a_token_is_embedded_once_and_has_no_gradient(grad):
    model, seen = small_lm(), []
    model.backbone.embedding.register_forward_hook(lambda *_: seen.append(1))
    with torch.set_grad_enabled(grad):
        logits, _ = decoder(model).step(torch.tensor([1, 2]))
    assert len(seen) == 1
    assert not logits.requires_grad


def test_bad_input_is_rejected_as_the_model_does(unchecked):
    decode = decoder(small_lm())
    for step in (decode.step, decode.model.step):
        with pytest.raises(ValueError, match=r"input_ids must be a tensor \(b,\), one token per row, got \(2, 3\)"):
            step(torch.zeros(2, 3, dtype=torch.long))
        with pytest.raises(ValueError, match="token ids must be between 0 and"):
            step(torch.tensor([1000]))
        with pytest.raises(ValueError, match="input_ids must be on cpu, got meta"):
            step(torch.zeros(2, dtype=torch.long, device="meta"))
        with pytest.raises(TypeError, match="cache must be an LMCache, got tuple"):
            step(torch.tensor([1]), (1, 2))


@compiled
def test_a_busy_machine_changes_no_bit():
    """Where other programs take its cores, a token may do with fewer threads."""
    model = MambaLM(d_model=256, n_layer=2, vocab_size=2048, ssm_cfg={"layer": "Mamba2"})

    def tokens(threads):
        torch.set_num_threads(threads)
        decode, cache, outputs = decoder(model), None, []
        for token in range(80):
            logits, cache = decode.step(torch.tensor([token]), cache)
            outputs.append(logits)
        return torch.cat(outputs)

    before = torch.get_num_threads()
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        busy = tokens(2)
    finally:
        for process in spinning:
            process.kill()
            process.wait()
        alone = tokens(1)
        torch.set_num_threads(before)
    assert torch.equal(busy, alone)
