import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anymamba import Mamba2, Mamba2Cache, Mamba2Config, SsdPath
from tests.scan.cases import ALGORITHMS
from tests.support import FLOOR, assert_near

SMALL = {"d_model": 16, "d_state": 8, "headdim": 8}
OPTIONS = {
    "plain": {},
    "no convolution history": {"d_conv": 1},
    "groups": {"ngroups": 2},
    "float expand": {"expand": 1.5},
    "half SSM": {"d_ssm": 16},
    "D per channel": {"D_has_hdim": True},
    "gate only": {"rmsnorm": False},
    "norm first": {"norm_before_gate": True, "ngroups": 2},
    "biases": {"bias": True, "conv_bias": False},
    "dt limited": {"dt_limit": (0.01, 0.05)},
    "learnable start": {"learnable_init_states": True},
    "chunks of five": {"chunk_size": 5},
}


def make_block(dtype=torch.float64, **options):
    block = Mamba2(**{**SMALL, **options}, dtype=dtype)
    if block.config.learnable_init_states:
        block.init_states.data.normal_()
    return block


def random_cache(block, rows):
    empty = block.init_cache(rows)
    return Mamba2Cache(*(torch.randn(x.shape, dtype=x.dtype).requires_grad_() for x in empty))


def unroll(block, x, cache):
    ys = []
    for t in range(x.shape[1]):
        y, cache = block.step(x[:, t], cache)
        ys.append(y)
    return torch.stack(ys, 1), cache


def results(block, x, cache, run):
    """Outputs, cache, and gradients of the input, all parameters and the incoming cache."""
    x = x.detach().clone().requires_grad_()
    y, new = run(block, x, cache)
    generator = torch.Generator().manual_seed(5)
    heads = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in (y, *new)]
    leaves = {"x": x, **dict(block.named_parameters())}
    if cache is not None:
        leaves.update({"cache.conv": cache.conv, "cache.ssm": cache.ssm})
    loss = sum((o * head).sum() for o, head in zip((y, *new), heads, strict=True))
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = {f"grad of {n}": g for n, g in zip(leaves, grads, strict=True) if g is not None}
    return {"y": y, "conv": new.conv, "ssm": new.ssm, **named}


def assert_same(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_near(actual[name], expected[name], tolerance, name)


@pytest.mark.parametrize("start", ["fresh", "random"])
@pytest.mark.parametrize("options", OPTIONS)
def test_prefill_equals_unrolled_steps(options, start):
    block = make_block(**OPTIONS[options])
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    cache = None if start == "fresh" else random_cache(block, 2)
    stepped = results(block, x, cache, unroll)
    for algorithm in ALGORITHMS:
        path = SsdPath(algorithm, None if block.config.chunk_size else 4)
        prefilled = results(block, x, cache, lambda b, x, c, path=path: b.prefill(x, c, path=path))
        assert_same(prefilled, stepped, FLOOR[torch.float64])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_split_equals_the_whole(data):
    block = make_block(ngroups=2)
    t = data.draw(st.integers(1, 14))
    cuts = data.draw(st.sets(st.integers(1, t - 1)) if t > 1 else st.just(set()))
    cache = random_cache(block, 2) if data.draw(st.booleans()) else None
    x = torch.randn(2, t, 16, dtype=torch.float64)

    def in_parts(block, x, cache):
        ys = []
        for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), t], strict=True):
            if data.draw(st.booleans()):
                y, cache = unroll(block, x[:, start:stop], cache)
            else:
                y, cache = block.prefill(x[:, start:stop], cache)
            ys.append(y)
        return torch.cat(ys, 1), cache

    whole = results(block, x, cache, lambda b, x, c: b.prefill(x, c))
    assert_same(results(block, x, cache, in_parts), whole, FLOOR[torch.float64])


def test_float32_prefill_equals_steps_to_the_floor():
    block = make_block(torch.float32)
    x = torch.randn(2, 50, 16)
    stepped = results(block, x, None, unroll)
    assert_same(results(block, x, None, lambda b, x, c: b.prefill(x, c)), stepped, 2 * FLOOR[torch.float32])


def test_forward_is_prefill_without_the_cache():
    block = make_block()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    assert torch.equal(block(x), block.prefill(x)[0])


def test_calls_change_neither_input_nor_cache():
    block = make_block()
    cache = random_cache(block, 2).detach()
    kept, x = cache.clone(), torch.randn(2, 6, 16, dtype=torch.float64)
    kept_x = x.clone()
    with torch.no_grad():
        block.prefill(x, cache)
        block.step(x[:, 0], cache)
    assert torch.equal(x, kept_x)
    assert all(torch.equal(a, b) for a, b in zip(cache, kept, strict=True))


def test_a_learnable_start_is_the_state_and_is_not_added_to_a_cache():
    block = make_block(learnable_init_states=True)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    fresh = block.init_cache(2)
    assert torch.equal(fresh.ssm[1], block.init_states)
    assert torch.equal(block.prefill(x)[0], block.prefill(x, fresh)[0])
    zeros = Mamba2Cache(fresh.conv, torch.zeros_like(fresh.ssm))
    block_without = make_block()
    block_without.load_state_dict({n: p for n, p in block.state_dict().items() if n != "init_states"})
    assert torch.equal(block.prefill(x, zeros)[0], block_without(x))
    assert torch.equal(block.step(x[:, 0], zeros)[0], block_without.step(x[:, 0])[0])


PADDINGS = {
    "right": [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0, 0]],
    "left": [[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1]],
    "holes and an empty row": [[1, 0, 1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 0, 1]],
}


@pytest.mark.parametrize("start", ["fresh", "random"])
@pytest.mark.parametrize("padding", PADDINGS)
def test_padded_rows_equal_rows_alone(padding, start):
    block = make_block(ngroups=2, bias=True)
    mask = torch.tensor(PADDINGS[padding]).bool()
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    x[~mask] = float("nan")  # what stands in the padding must not matter
    cache = random_cache(block, 3) if start == "random" else None
    head = torch.randn(3, 8, 16, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    y, new = block.prefill(leaf, cache, mask=mask)
    loss = (y * head).sum() + new.ssm.square().sum() + new.conv.square().sum()
    parameters = list(block.parameters())
    grads = torch.autograd.grad(loss, [leaf, *parameters])
    assert (y[~mask] == 0).all()
    expected_grads = [torch.zeros_like(p) for p in parameters]
    for row in range(3):
        row_cache = None if cache is None else cache.rows(row)
        tokens = x[row : row + 1, mask[row]].requires_grad_()
        if not tokens.shape[1]:
            before = block.init_cache(1) if row_cache is None else row_cache
            assert torch.equal(new.ssm[row : row + 1], before.ssm)
            assert torch.equal(new.conv[row : row + 1], before.conv)
            continue
        y_alone, alone = block.prefill(tokens, row_cache)
        assert_near(y[row, mask[row]], y_alone[0], FLOOR[torch.float64])
        assert_near(new.ssm[row : row + 1], alone.ssm, FLOOR[torch.float64])
        assert_near(new.conv[row : row + 1], alone.conv, FLOOR[torch.float64])
        loss = (y_alone * head[row : row + 1, mask[row]]).sum() + alone.ssm.square().sum() + alone.conv.square().sum()
        dx, *dparameters = torch.autograd.grad(loss, [tokens, *parameters])
        assert_near(grads[0][row, mask[row]], dx[0], FLOOR[torch.float64])
        expected_grads = [a + b for a, b in zip(expected_grads, dparameters, strict=True)]
    for actual, expected in zip(grads[1:], expected_grads, strict=True):
        assert_near(actual, expected, FLOOR[torch.float64])


def test_lengths_are_a_right_padded_mask():
    block = make_block()
    x, lengths = torch.randn(3, 6, 16, dtype=torch.float64), torch.tensor([6, 1, 3])
    mask = torch.arange(6) < lengths.unsqueeze(1)
    for a, b in zip(block.prefill(x, mask=lengths)[1], block.prefill(x, mask=mask)[1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_packed_sequences_equal_separate_ones(algorithm):
    block = make_block(ngroups=2)
    bounds = [0, 1, 3, 12, 20]
    x, cache = torch.randn(1, 20, 16, dtype=torch.float64), random_cache(block, 4)
    path = SsdPath(algorithm, 4)
    y, new = block.prefill(x, cache, path=path, cu_seqlens=torch.tensor(bounds))
    for row in range(4):
        part = slice(bounds[row], bounds[row + 1])
        y_alone, alone = block.prefill(x[:, part], cache.rows(row), path=path)
        assert_near(y[:, part], y_alone, FLOOR[torch.float64])
        assert_near(new.ssm[row : row + 1], alone.ssm, FLOOR[torch.float64])
        assert_near(new.conv[row : row + 1], alone.conv, FLOOR[torch.float64])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_packed_sequence_moves_no_bit_of_another(algorithm):
    block = make_block(torch.float32)
    bounds, others = torch.tensor([0, 4, 5, 13, 20]), [*range(5), *range(13, 20)]
    x = torch.randn(1, 20, 16)
    changed = x.clone()
    changed[:, 5:13] = 3.0
    outcomes = []
    for tokens in (x, changed):
        leaf = tokens.clone().requires_grad_()
        y, cache = block.prefill(leaf, path=SsdPath(algorithm, 4), cu_seqlens=bounds)
        y.square().sum().backward()
        outcomes.append((y[:, others], leaf.grad[:, others], cache.rows([0, 1, 3]).ssm, cache.rows([0, 1, 3]).conv))
    for before, after in zip(*outcomes, strict=True):
        assert torch.equal(before, after)


def test_a_row_alone_equals_the_row_in_a_batch():
    block = make_block()
    x = torch.randn(3, 10, 16, dtype=torch.float64)
    y = block(x)
    for row in range(3):
        assert_near(y[row : row + 1], block(x[row : row + 1]), FLOOR[torch.float64])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_keeps_its_state_in_float32(dtype):
    block = make_block(dtype)
    x = torch.randn(2, 20, 16).to(dtype)
    y, cache = block.prefill(x)
    y_stepped, stepped = unroll(block, x, None)
    assert y.dtype == cache.conv.dtype == dtype
    assert cache.ssm.dtype == stepped.ssm.dtype == torch.float32
    wide = Mamba2(**SMALL, dtype=torch.float64)
    wide.load_state_dict(block.state_dict())
    expected, expected_cache = wide.prefill(x.double())
    assert_near(y, expected, 2 * FLOOR[dtype])
    assert_near(y_stepped, expected, 2 * FLOOR[dtype])
    assert_near(cache.ssm, expected_cache.ssm, 2 * FLOOR[dtype])
    y.float().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in block.parameters())


def test_autocast_trains_and_streams():
    block = make_block(torch.float32)
    x = torch.randn(2, 20, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y, cache = block.prefill(x)
        y_next, cache = block.step(x[:, 0], cache)
    assert cache.ssm.dtype == torch.float32
    assert_near(y, block(x), 2 * FLOOR[torch.bfloat16])
    y.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in block.parameters())


def test_an_empty_batch_is_an_empty_result():
    block = make_block()
    y, cache = block.prefill(torch.zeros(0, 5, 16, dtype=torch.float64))
    assert y.shape == (0, 5, 16)
    assert cache.batch_size == 0
    assert block.step(torch.zeros(0, 16, dtype=torch.float64), cache)[0].shape == (0, 16)


def test_non_contiguous_input_is_welcome():
    block = make_block()
    x = torch.randn(16, 7, 2, dtype=torch.float64).permute(2, 1, 0)
    assert_near(block(x), block(x.contiguous()), FLOOR[torch.float64])


def test_the_block_keeps_for_backward_a_few_activations_and_no_square_of_the_chunk():
    block = Mamba2(d_model=32, d_state=16, headdim=16)
    saved = {}
    x = torch.randn(1, 400, 32, requires_grad=True)

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x)
    parameters = sum(p.numel() * 4 for p in block.parameters())
    per_token = (sum(saved.values()) - parameters) / (400 * 4)
    projected = block.in_proj.out_features
    assert per_token < 4.2 * projected


def test_projections_are_called_as_modules():
    """Adapters and quantised layers replace the projections; a block that read their weights would bypass them."""

    class Doubled(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 2 * self.inner(x)

    block = make_block(rmsnorm=False)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    y, stepped = block(x), block.step(x[:, 0])[0]
    block.out_proj = Doubled(block.out_proj)
    assert_near(block(x), 2 * y, FLOOR[torch.float64])
    assert_near(block.step(x[:, 0])[0], 2 * stepped, FLOOR[torch.float64])


def test_initialisation_is_the_official_one():
    block = Mamba2(d_model=512, conv_init=0.25, A_init_range=(2, 3), dt_min=0.01, dt_max=0.02)
    a = block.A_log.exp()
    assert 2 <= a.min() <= a.max() <= 3
    dt = torch.nn.functional.softplus(block.dt_bias)
    assert 0.0099 < dt.min() <= dt.max() < 0.0201
    assert 0.2 < block.conv1d.weight.abs().max() <= 0.25
    assert (block.D == 1).all()
    assert (block.norm.weight == 1).all()
    assert block.in_proj.weight.abs().max() <= 1 / math.sqrt(512)
    assert block.in_proj.bias is None
    assert all(p._no_weight_decay for p in (block.dt_bias, block.A_log, block.D))


def test_a_config_a_number_or_fields_build_the_same_block():
    shapes = [
        {name: p.shape for name, p in block.named_parameters()}
        for block in (Mamba2(Mamba2Config(**SMALL)), Mamba2(16, d_state=8, headdim=8), Mamba2(**SMALL))
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert Mamba2(Mamba2Config(**SMALL), device="meta").in_proj.weight.is_meta


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"headdim": 7}, "headdim must divide the SSM's 32 channels, got headdim = 7"),
        ({"ngroups": 3}, "ngroups must divide the 4 heads, got ngroups = 3"),
        ({"expand": 1.3}, "whole number of channels, got 1.3"),
        ({"d_ssm": 64}, "d_ssm must be between 1 and d_inner = 32, got 64"),
        ({"d_conv": 0}, "d_conv must be at least 1, got 0"),
        ({"chunk_size": 0}, "chunk_size must be None or at least 1, got 0"),
        ({"A_init_range": (0, 1)}, "A_init_range must satisfy"),
        ({"dt_min": 1, "dt_max": 0.1}, "dt_min <= dt_max must hold"),
        ({"dt_limit": (1, 0)}, "dt_limit must satisfy"),
    ],
)
def test_a_config_that_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"Mamba2Config: .*{message}"):
        Mamba2(**{**SMALL, **fields})


@pytest.mark.usefixtures("unchecked")
def test_a_config_and_fields_together_are_refused():
    with pytest.raises(TypeError, match=r"not both; got also \['headdim'\]"):
        Mamba2(Mamba2Config(**SMALL), headdim=4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'd_stat'"):
        Mamba2(16, d_stat=8)


@pytest.mark.usefixtures("unchecked")
def test_bad_input_says_what_was_expected_and_what_came():
    block = make_block(torch.float32)
    x, cache = torch.randn(2, 5, 16), make_block(torch.float32).init_cache(3)
    with pytest.raises(ValueError, match=r"x must have shape \(b, t, d=16\), got \(2, 5, 15\)"):
        block(x[..., :15])
    with pytest.raises(ValueError, match=r"x must have shape \(b, t, d=16\), got \(5, 16\)"):
        block(x[0])
    with pytest.raises(ValueError, match="at least one step, got t = 0"):
        block(x[:, :0])
    with pytest.raises(TypeError, match=r"x must be torch.float32, got torch.float64"):
        block(x.double())
    with pytest.raises(ValueError, match="x must be on cpu, got meta"):
        block(x.to("meta"))
    with pytest.raises(ValueError, match=r"cache.conv must have shape \(b=2, v=48, w=4\), got \(3, 48, 4\)"):
        block.prefill(x, cache)
    with pytest.raises(ValueError, match=r"Mamba2.step: cache.conv must have shape"):
        block.step(x[:, 0], cache)
    with pytest.raises(TypeError, match=r"cache.ssm must be torch.float32, got torch.float64"):
        block.step(x[:, 0], Mamba2Cache(cache.conv[:2], cache.ssm[:2].double()))
    with pytest.raises(ValueError, match="exclude each other"):
        block(x[:1], mask=torch.ones(1, 5).bool(), cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"boolean mask must have shape \(b=2, t=5\), got \(2, 4\)"):
        block(x, mask=torch.ones(2, 4).bool())
    with pytest.raises(ValueError, match="lengths must be between 0 and t = 5"):
        block(x, mask=torch.tensor([6, 1]))
    with pytest.raises(TypeError, match="mask must be boolean"):
        block(x, mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="strictly increasing"):
        block(x[:1], cu_seqlens=torch.tensor([0, 3, 3, 5]))
