"""Padded and packed rows equal rows alone, in every architecture; transformers' own are not."""

import copy

import pytest
import torch

from anymamba.integrations.transformers import accelerate
from tests.integrations.models import CONFIGS, cache_of, ids, pair, plain, positions, run
from tests.support import assert_near, relative_error

ARCHITECTURES = list(CONFIGS)
LENGTHS = (11, 4, 7)
TOLERANCE = 1e-5


def make_padded(side):
    """Make rows of different lengths, the mask over them, and the positions of each row's tokens."""
    t, rows = max(LENGTHS), [ids(1, n, seed=n)[0] for n in LENGTHS]
    x, mask = torch.full((len(rows), t), 5), torch.zeros(len(rows), t, dtype=torch.long)
    positions = [slice(t - n, t) if side == "left" else slice(0, n) for n in LENGTHS]
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        x[i, position], mask[i, position] = row, 1
    return rows, x, mask, positions


def position_ids(model, mask):
    """Return positions as `generate` counts them: only real tokens."""
    known = positions(model, 0, mask.shape[1])
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if known else {}


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padded_rows_equal_rows_alone(name, side, each_implementation):
    _, fast = pair(name)
    rows, x, mask, positions = make_padded(side)
    logits = fast(x, attention_mask=mask, **position_ids(fast, mask)).logits
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        assert_near(logits[i, position], fast(row[None]).logits[0], TOLERANCE, f"row {i}")


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba2", "mamba", "falcon_mamba"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_token_after_padding(name, side):
    """The cache holds what a row alone would leave; attention's own cache keeps the padding, so mixers only."""
    _, fast = pair(name)
    rows, x, mask, _ = make_padded(side)
    _, cache = run(fast, x, attention_mask=mask)
    token = ids(len(rows), 1, seed=9)
    logits, _ = run(fast, token, cache)
    for i, row in enumerate(rows):
        alone = fast(torch.cat([row, token[i]])[None]).logits[0, -1:]
        assert_near(logits[i], alone, TOLERANCE, f"row {i}")


@torch.no_grad()
def test_a_token_that_is_padding_leaves_its_row_as_it_is():
    _, fast = pair("mamba")
    x = ids(2, 9)
    _, cache = run(fast, x[:, :7])
    _, cache = run(fast, x[:, 7:8], cache, attention_mask=torch.tensor([[1], [0]]))
    logits, _ = run(fast, x[:, 8:], cache)
    assert_near(logits[0], fast(x[:1]).logits[0, -1:], TOLERANCE)
    assert_near(logits[1], fast(x[1:, [0, 1, 2, 3, 4, 5, 6, 8]]).logits[0, -1:], TOLERANCE)


@torch.no_grad()
def test_a_mask_of_ones_moves_no_bit():
    for name in ("mamba", "mamba2"):
        _, fast = pair(name)
        x = ids(2, 9)
        assert torch.equal(fast(x, attention_mask=torch.ones(2, 9, dtype=torch.long)).logits, fast(x).logits)


def make_packed():
    """Pack sequences into one row, as DataCollatorWithFlattening does."""
    rows = [ids(1, n, seed=n)[0] for n in LENGTHS]
    lengths = torch.tensor(LENGTHS)
    seq_idx = torch.repeat_interleave(torch.arange(len(rows)), lengths)[None].to(torch.int32)
    restarting = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return rows, torch.cat(rows)[None], seq_idx, restarting


def assert_packed(logits, model, rows):
    for i, (row, row_logits) in enumerate(zip(rows, logits.split([len(row) for row in rows]), strict=True)):
        assert_near(row_logits, model(row[None], use_cache=False).logits[0], TOLERANCE, f"sequence {i}")


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "granite"])
def test_packed_sequences_equal_sequences_alone(name, each_implementation):
    _, fast = pair(name)
    rows, x, seq_idx, restarting = make_packed()
    assert_packed(fast(x, seq_idx=seq_idx, position_ids=restarting, use_cache=False).logits[0], fast, rows)
    assert_packed(fast(x, position_ids=restarting, use_cache=False).logits[0], fast, rows)
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    flash = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 11, "max_length_k": 11}
    assert_packed(fast(x, position_ids=restarting, use_cache=False, **flash).logits[0], fast, rows)


@torch.no_grad()
def test_granite_s_own_attention_leaks_and_its_mixers_do_not():
    """Its attention is not told of positions: that is transformers' to repair. Without attention, nothing leaks."""
    rows, x, seq_idx, restarting = make_packed()
    _, fast = pair("granite")
    logits = fast(x, seq_idx=seq_idx, position_ids=restarting, use_cache=False).logits[0]
    assert relative_error(logits[LENGTHS[0] :][: LENGTHS[1]], fast(rows[1][None]).logits[0]) > 1e-2
    _, fast = pair("granite", layer_types=["mamba", "mamba", "mamba"])
    assert_packed(fast(x, seq_idx=seq_idx, position_ids=restarting, use_cache=False).logits[0], fast, rows)


def packed_gradients(model, calls):
    model.train().zero_grad()
    for options in calls:
        logits = model(use_cache=False, **options).logits
        (logits * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("name", ["mamba2", "mamba", "falcon_mamba", "bamba", "jamba"])
def test_packed_gradients_with_and_without_checkpointing(name, reentrant):
    _, fast = pair(name, torch.float64)
    rows, x, seq_idx, restarting = make_packed()
    expected = packed_gradients(copy.deepcopy(fast), [{"input_ids": row[None]} for row in rows])
    if reentrant is not None:
        fast.gradient_checkpointing_enable({"use_reentrant": reentrant})
        fast.enable_input_require_grads()
    options = {"input_ids": x, "seq_idx": seq_idx} | ({"position_ids": restarting} if name != "mamba" else {})
    grads = packed_gradients(fast, [options])
    for parameter, reference in expected.items():
        # Attention and experts of transformers compute some parts in float32.
        assert_near(grads[parameter], reference, 1e-8 if name in ("mamba", "mamba2") else 2e-5, parameter, least=1e-3)


def test_two_packed_calls_before_one_backward_are_checkpointed_apart():
    _, fast = pair("mamba2", torch.float64)
    rows, x, seq_idx, _ = make_packed()
    other = (torch.arange(x.shape[1]) >= 5).long()[None]
    calls = [{"input_ids": x, "seq_idx": seq_idx}, {"input_ids": x, "seq_idx": other}]
    expected = packed_gradients(copy.deepcopy(fast), calls)
    fast.gradient_checkpointing_enable({"use_reentrant": False})
    fast.train().zero_grad()
    both = [fast(use_cache=False, **options).logits for options in calls]
    sum((logits * torch.linspace(-1, 1, logits.shape[-1])).sum() for logits in both).backward()
    for name, p in fast.named_parameters():
        assert_near(p.grad, expected[name], 1e-8, name, least=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba2", "mamba"])
def test_rows_of_packed_sequences_with_padding_and_a_cache(name):
    """Each row's first sequence continues its cache, and its last one is what the cache then holds."""
    _, fast = pair(name)
    x, before, after = ids(2, 12), ids(2, 5, seed=3), ids(2, 2, seed=4)
    seq_idx = torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [1] * 6 + [2] * 4])
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    _, cache = run(fast, before)
    logits, cache = run(fast, x, cache, seq_idx=seq_idx, attention_mask=mask)
    last, _ = run(fast, after, cache)
    first_0, first_1 = torch.cat([before[0], x[0, :5]]), torch.cat([before[1], x[1, :2]])
    assert_near(logits[0, :5], fast(first_0[None]).logits[0, 5:], TOLERANCE)
    assert_near(logits[1, :2], fast(first_1[None]).logits[0, 5:], TOLERANCE)
    assert_near(logits[0, 5:], fast(x[:1, 5:]).logits[0], TOLERANCE)
    assert_near(logits[1, 2:8], fast(x[1:, 2:8]).logits[0], TOLERANCE)
    assert_near(last[0], fast(torch.cat([x[0, 5:], after[0]])[None]).logits[0, -2:], TOLERANCE)
    assert_near(last[1], fast(torch.cat([x[1, 2:8], after[1]])[None]).logits[0, -2:], TOLERANCE)


@torch.no_grad()
def test_packing_can_be_left_out():
    original = plain("mamba")
    fast = accelerate(copy.deepcopy(original), packing=False)
    _, x, seq_idx, _ = make_packed()
    assert_near(fast(x, seq_idx=seq_idx).logits, original(x).logits, TOLERANCE)


@torch.no_grad()
def test_a_failed_call_leaves_no_packing():
    _, fast = pair("mamba2")
    rows, x, seq_idx, _ = make_packed()
    expected = fast(x).logits
    fast.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fast(x, seq_idx=seq_idx)
    fast.lm_head._forward_pre_hooks.clear()
    assert torch.equal(fast(x).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_idx": torch.zeros(3, dtype=torch.long)}, r"seq_idx must have shape \(b, t\), got \(3,\)"),
        ({"seq_idx": torch.zeros(1, 3, dtype=torch.long)}, r"the tokens' shape, \(1, 22\), got \(1, 3\)"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, r"cu_seq_lens_q must run from 0 to t = 22, got \[0, 3\]"),
    ],
)
def test_packing_that_does_not_fit_raises(options, message):
    _, fast = pair("mamba2")
    with pytest.raises(ValueError, match=message):
        fast(make_packed()[1], **options)
    assert cache_of(fast, fast(make_packed()[1])) is not None
