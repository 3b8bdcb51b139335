import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from anymamba import LMCache
from tests.core.test_cache_io import write_forged
from tests.models.cases import FAMILIES, small_lm

families = pytest.mark.parametrize("family", FAMILIES)


def equal(a, b):
    return a.tensors().keys() == b.tensors().keys() and all(
        torch.equal(x, b.tensors()[name]) for name, x in a.tensors().items()
    )


@pytest.fixture
def x():
    return torch.randint(61, (3, 7))


@families
def test_a_saved_cache_is_the_same_to_the_bit(family, tmp_path, x):
    model = small_lm(family, torch.bfloat16)
    cache = model(x).cache
    cache.save(tmp_path / "state", model)
    assert equal(LMCache.load(tmp_path / "state", model), cache)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@families
def test_rows_branch_and_cat_joins(family, x):
    model = small_lm(family)
    cache = model(x).cache
    assert equal(LMCache.cat([cache.rows([2, 0]), cache.rows(1)]).rows([1, 2, 0]), cache)
    branched = cache.rows([1, 1])
    assert branched.batch_size == 2
    out = model(x[[1, 2]], branched)
    assert torch.isfinite(out.logits).all()


def rows_cases():
    """Return ways to select rows, and the rows of three that they select."""
    return [
        (1, [1]),
        (-1, [2]),
        (np.int64(1), [1]),
        (torch.tensor(1), [1]),
        ((0, 1), [0, 1]),
        ([2, np.int64(0), torch.tensor(2)], [2, 0, 2]),
        (range(2), [0, 1]),
        (torch.tensor([2, 1], dtype=torch.int32), [2, 1]),
        (torch.tensor([], dtype=torch.int64), []),
        (slice(1, None), [1, 2]),
    ]


def bad_rows_cases():
    return [
        (3, IndexError, "there are 3 rows, 0 to 2, got 3"),
        ([0, -4], IndexError, "got -4"),
        (torch.tensor([0, 7]), IndexError, "got 7"),
        (torch.tensor([[0, 1]]), TypeError, "expected a row's number, .*got tensor"),
        (1.0, TypeError, "got 1.0"),
        ([True, False, True], TypeError, "got .True, False, True"),
        (torch.tensor([True, False, True]), TypeError, "expected a row's number"),
        ("01", TypeError, "got '01'"),
        (None, TypeError, "got None"),
        (([0], [1]), TypeError, "expected a row's number"),
    ]


@pytest.mark.parametrize(("index", "meant"), rows_cases(), ids=repr)
def test_rows_keep_the_batch_dimension_however_they_are_named(index, meant, x, unchecked):
    cache = small_lm()(x).cache
    chosen = cache.rows(index)
    assert chosen.batch_size == len(meant)
    assert all(torch.equal(t, cache.tensors()[name][meant]) for name, t in chosen.tensors().items())


@pytest.mark.parametrize(("index", "error", "message"), bad_rows_cases(), ids=repr)
def test_what_names_no_rows_raises(index, error, message, x, unchecked):
    with pytest.raises(error, match=message):
        small_lm()(x).cache.rows(index)


@families
def test_going_on_changes_no_cache(family, x):
    model = small_lm(family)
    cache = model(x).cache
    before = cache.clone()
    model(x, cache)
    model.step(x[:, 0], cache)
    assert equal(cache, before)


def test_detach_and_to_apply_to_every_layer(x):
    cache = small_lm()(x).cache
    assert not any(t.requires_grad for t in cache.detach().tensors().values())
    wide = cache.to(dtype=torch.float64)
    assert all(t.dtype == torch.float64 for t in wide.tensors().values())
    assert wide.nbytes == 2 * cache.nbytes
    rounded = cache.to(torch.bfloat16).tensors()
    assert equal(cache.to(torch.bfloat16), cache.to(dtype=torch.bfloat16))
    assert {t.dtype for t in rounded.values()} == {torch.bfloat16, torch.float32}


def test_a_cache_of_another_model_raises(tmp_path, x):
    model = small_lm()
    model(x).cache.save(tmp_path / "state", model)
    for other in (small_lm(seed=1), small_lm(dtype=torch.float64)):
        with pytest.raises(ValueError, match="another model, dtype or format of weights: expected fingerprint"):
            LMCache.load(tmp_path / "state", other)


def test_a_damaged_or_foreign_file_raises(tmp_path, x):
    model, file = small_lm(), tmp_path / "state"
    model(x).cache.save(file, model)
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-1], b"\xff" * 100):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="not a readable safetensors file"):
            LMCache.load(file, model)
    save_file({"a": torch.ones(1)}, file)
    with pytest.raises(ValueError, match="expected a saved LMCache, got a file that names no kind"):
        LMCache.load(file, model)
    with pytest.raises(ValueError, match="no such file"):
        LMCache.load(tmp_path / "nothing", model)


def test_a_state_with_other_tensors_raises(tmp_path, x):
    model, file = small_lm(), tmp_path / "state"
    model(x).cache.save(file, model)
    tensors = load_file(file)
    metadata = {"kind": "LMCache", "fingerprint": model.fingerprint(), "version": "1"}
    write_forged(file, {k: v for k, v in tensors.items() if k != "layers.1.ssm"}, **metadata)
    with pytest.raises(ValueError, match=r"lacks layers\.1\.ssm"):
        LMCache.load(file, model)
    write_forged(file, {**tensors, "layers.1.ssm": torch.ones(3, 2)}, **metadata)
    with pytest.raises(ValueError, match=r"layers.1.ssm must be torch.float32 of shape .*got .* \(3, 2\)"):
        LMCache.load(file, model)


def test_the_state_goes_on_in_another_process(tmp_path):
    """Prompt here, save; continue there: the same tokens as without interruption."""
    model = small_lm()
    model.save_pretrained(tmp_path / "model")
    prompt = torch.arange(20).unsqueeze(0)
    uninterrupted = model.generate(prompt, 30, temperature=1.0, seed=5).tokens
    first = model.generate(prompt, 10, temperature=1.0, seed=5, return_state=True)
    first.state.save(tmp_path / "state", model)
    script = """
import sys
from anymamba import GenerationState, MambaLM
model = MambaLM.from_pretrained(sys.argv[1])
state = GenerationState.load(sys.argv[2], model)
print(*model.generate(None, 20, temperature=1.0, seed=5, cache=state).rows()[0])
"""
    run = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "model", tmp_path / "state"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert first.rows()[0] + [int(token) for token in run.stdout.split()] == uninterrupted[0].tolist()
