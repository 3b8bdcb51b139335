"""A window of tokens gives the bits of one token at a time, whatever part of it counts afterwards."""

import random

import pytest
import torch

from anymamba import Mamba2, decoder
from anymamba.core.registry import kernels_off
from anymamba.kernels import step_description
from anymamba.kernels.compiled_step import CompiledStep, StepSource
from anymamba.kernels.cpu import bindings
from anymamba.kernels.step_description import OUTPUT
from anymamba.models.token_window import MAX_WINDOW
from anymamba.quantization import quantize_model
from tests.models.cases import FAMILIES, small_lm

compiled = pytest.mark.skipif(bindings.LIBRARY.handle is None, reason=bindings.LIBRARY.reason)
QUATERNION = {"layer": "Mamba3", "d_state": 16, "headdim": 8, "rotation": "quaternion"}
LARGE = {"d_model": 102, "d_intermediate": 70, "vocab_size": 301}  # awkward sizes, enough work for threads
MODELS = {
    **{family: {"family": family} for family in FAMILIES},
    "quaternion": {"ssm_cfg": QUATERNION},
    "large": {**LARGE, "ssm_cfg": {"layer": "Mamba2", "d_state": 21, "headdim": 17, "ngroups": 3}},
    "large MIMO": {
        **LARGE,
        "ssm_cfg": {"layer": "Mamba3", "d_state": 22, "headdim": 17, "is_mimo": True, "mimo_rank": 3},
    },
}
FORMATS = ["float64", "float32", "bfloat16 activations", "float16 activations", "bfloat16", "int8", "int4"]
DTYPES = {"float64": torch.float64, "bfloat16 activations": torch.bfloat16, "float16 activations": torch.float16}


def make_model(name, format="float32"):
    model = small_lm(dtype=DTYPES.get(format, torch.float32), **MODELS[name])
    return quantize_model(model, format) if format in ("bfloat16", "int8", "int4") else model


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def unrolled(decode, ids_bt):
    """Return the logits (b, t, v) of single steps, and the caches after 0 to t tokens."""
    caches, logits = [decode.model.init_cache(len(ids_bt))], []
    for ids in ids_bt.unbind(1):
        logits_bv, cache = decode.step(ids, caches[-1])
        logits.append(logits_bv)
        caches.append(cache)
    return torch.stack(logits, dim=1), caches


def assert_same_cache(actual, expected):
    for name, x in expected.tensors().items():
        assert torch.equal(actual.tensors()[name], x), name


def join(caches, counts):
    """Return a cache whose rows are after `counts` tokens."""
    return type(caches[0]).cat([caches[count].rows([row]) for row, count in enumerate(counts)])


def read_in_windows(decode, ids_bt, seed, limit=9):
    """Read a text in random windows of which random parts count; yield positions before, window, ids' logits, cache."""
    rng, (b, t) = random.Random(seed), ids_bt.shape
    cache, at = decode.model.init_cache(b), [0] * b
    while (k := min(rng.randint(1, limit), t - max(at))) > 0:
        window = decode.step_window(torch.stack([ids_bt[row, n : n + k] for row, n in enumerate(at)]), cache)
        yield at, window.logits, cache
        counts = [rng.randint(0, k) for _ in range(b)]
        cache = window.cache_after(counts, in_place=rng.random() < 0.5)
        at = [n + count for n, count in zip(at, counts, strict=True)]
    yield at, None, cache


@compiled
@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "format"),
    [(name, format) for name in MODELS for format in FORMATS if "large" not in name or format in ("float32", "int4")],
)
def test_windows_of_any_cut_have_the_bits_of_single_steps(name, format, threads):
    model = make_model(name, format)
    decode, ids_bt = decoder(model), torch.randint(61, (3, 24))
    assert decode.window_reason == ""
    expected, caches = unrolled(decode, ids_bt)
    for seed in range(3):
        threads(1 + seed)
        for at, logits, cache in read_in_windows(decode, ids_bt, seed):
            assert_same_cache(cache, join(caches, at))
            for row, n in enumerate(at if logits is not None else []):
                assert torch.equal(logits[row], expected[row, n : n + logits.shape[1]])


@compiled
@torch.no_grad()
@pytest.mark.parametrize(("b", "k"), [(1, MAX_WINDOW), (9, 8), (40, 5), (2, MAX_WINDOW), (MAX_WINDOW + 1, 1)])
def test_more_rows_than_one_call_takes_have_the_same_bits(b, k):
    decode, ids_bk = decoder(make_model("Mamba3")), torch.randint(61, (b, k))
    expected, caches = unrolled(decode, ids_bk)
    counts = [row * 7 % (k + 1) for row in range(b)]
    window = decode.step_window(ids_bk)
    assert torch.equal(window.logits, expected)
    assert_same_cache(window.cache_after(counts), join(caches, counts))
    assert_same_cache(window.cache_after(k, in_place=True), caches[k])


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_window_of_which_nothing_counts_leaves_the_cache_as_it_was(name):
    decode, ids_bk = decoder(make_model(name)), torch.randint(61, (2, 6))
    _, cache = decode.step(ids_bk[:, 0])
    before = cache.clone()
    window = decode.step_window(ids_bk, cache)
    assert_same_cache(cache, before)
    assert_same_cache(window.cache_after(0), before)
    window.cache_after([3, 0])
    window.cache_after(6)
    assert_same_cache(cache, before)
    assert_same_cache(window.cache_after([0, 0], in_place=True), before)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_without_kernels_a_window_is_single_steps(name):
    with kernels_off():
        model = make_model(name)
        decode, ids_bk = decoder(model), torch.randint(61, (3, 5))
        expected, caches = unrolled(decode, ids_bk)
        for window in (decode.step_window(ids_bk), model.step_window(ids_bk)):
            assert torch.equal(window.logits, expected)
            for counts in ([0, 5, 2], [4, 4, 4]):
                assert_same_cache(window.cache_after(counts), join(caches, counts))


@compiled
@torch.no_grad()
def test_a_phase_that_does_not_know_windows_takes_one_token_at_a_time(monkeypatch):
    monkeypatch.setattr(step_description, "ROW_KINDS", step_description.ROW_KINDS - {"norm"})
    decode, ids_bk = decoder(make_model("Mamba2")), torch.randint(61, (2, 5))
    assert decode.reason == ""
    assert decode.window_reason == "norm takes one token at a time"
    expected, caches = unrolled(decode, ids_bk)
    window = decode.step_window(ids_bk)
    assert torch.equal(window.logits, expected)
    assert_same_cache(window.cache_after([1, 5]), join(caches, [1, 5]))


@compiled
@torch.no_grad()
def test_a_step_takes_a_window_that_counts_as_a_whole():
    block = Mamba2(d_model=32, d_state=16, headdim=8).requires_grad_(False)
    describe = lambda builder: block.describe_step(builder, 0, to=OUTPUT)  # noqa: E731
    step = CompiledStep(block, StepSource(describe, 32, torch.float32, torch.float32))
    x, cache = torch.randn(3, 30, 32), list(block.init_cache(3))
    outputs = []
    for x_bd in x.unbind(1):
        y, cache = step.run(x_bd, cache)
        outputs.append(y)
    y, after = step.run(x.flatten(0, 1), list(block.init_cache(3)), window=30)
    assert torch.equal(y.unflatten(0, (3, 30)), torch.stack(outputs, dim=1))
    assert all(map(torch.equal, after, cache))
    assert step.run(x.flatten(0, 1), list(block.init_cache(3)), window=29) is None
    assert step.look_ahead(x.flatten(0, 1), list(block.init_cache(3)), 30) is None  # its slots are not kept


@torch.no_grad()
def test_errors_name_what_was_expected(unchecked):
    decode = decoder(make_model("Mamba2"))
    ids_bk = torch.zeros(2, 3, dtype=torch.int64)
    for step_window in (decode.step_window, decode.model.step_window):
        with pytest.raises(ValueError, match=r"a window of tokens per row, got \(3,\)"):
            step_window(ids_bk[0])
        for k in (0, MAX_WINDOW + 1):
            with pytest.raises(ValueError, match=f"1 to {MAX_WINDOW} tokens, got {k}"):
                step_window(torch.zeros(1, k, dtype=torch.int64))
        window = step_window(ids_bk)
        for counts in ([1], 4, [0, -1], [0, 1, 2]):
            with pytest.raises(ValueError, match="counts must be 2 numbers of tokens, from 0 to 3"):
                window.cache_after(counts)
        with pytest.raises(TypeError):
            window.cache_after(1.5)
        window.cache_after(1, in_place=True)
        with pytest.raises(RuntimeError, match="overwritten"):
            window.cache_after(1)
