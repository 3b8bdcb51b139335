"""The promises of every block of every family."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anymamba import Attention, Mamba1, Mamba2, Mamba3, SsdPath
from tests.blocks.families import (
    ALGORITHMS,
    FEW,
    FEW_BY_ALGORITHM,
    FEW_WITH_SCAN,
    OPTIONS,
    PATHWAYS,
    WITH_SCAN,
    make_block,
    random_cache,
    results,
    tensors_of,
    unroll,
    without_padding,
)
from tests.support import FLOOR, assert_all_near, assert_near


@pytest.mark.parametrize("start", ["fresh", "random"])
@pytest.mark.parametrize("options", OPTIONS)
def test_prefill_equals_unrolled_steps(options, start):
    block = make_block(options)
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    cache = random_cache(block, 2) if start == "random" else None
    stepped = results(block, x, cache, unroll)
    chunk_len = None if getattr(block.config, "chunk_size", None) else 4
    for algorithm, pathway in itertools.product(ALGORITHMS[type(block)], PATHWAYS[type(block)]):
        path = SsdPath(algorithm, chunk_len, pathway)
        prefilled = results(block, x, cache, lambda b, x, c, path=path: b.prefill(x, c, path=path))
        assert_all_near(prefilled, stepped, FLOOR[torch.float64])


@settings(max_examples=40)
@given(data=st.data())
def test_any_split_equals_the_whole(data):
    """Pieces by prefill or by steps, on either pathway, changing it at any cut."""
    block = make_block(data.draw(st.sampled_from(list(FEW)), label="block"))
    t = data.draw(st.integers(1, 12), label="t")
    cuts = sorted(data.draw(st.sets(st.integers(1, t - 1)) if t > 1 else st.just(set()), label="cuts"))
    cache = random_cache(block, 2)
    x = torch.randn(2, t, 16, dtype=torch.float64)
    segments = [
        (start, stop, data.draw(st.booleans()), data.draw(st.sampled_from(["single", "double"])))
        for start, stop in zip([0, *cuts], [*cuts, t], strict=True)
    ]

    def in_pieces(block, x, cache):
        ys = []
        for start, stop, by_step, pathway in segments:
            segment, path = x[:, start:stop], SsdPath(pathway=pathway)
            y, cache = unroll(block, segment, cache) if by_step else block.prefill(segment, cache, path=path)
            ys.append(y)
        return torch.cat(ys, 1), cache

    whole = results(block, x, cache, lambda b, x, c: b.prefill(x, c))
    assert_all_near(results(block, x, cache, in_pieces), whole, FLOOR[torch.float64])


@pytest.mark.parametrize("options", FEW)
def test_float32_prefill_equals_steps_to_the_floor(options):
    block = make_block(options, torch.float32)
    x = torch.randn(2, 50, 16)
    oracle = results(make_like(block), x.double(), None, unroll)
    for run in (unroll, lambda b, x, c: b.prefill(x, c)):
        assert_all_near(results(block, x, None, run), oracle, 4 * FLOOR[torch.float32])


def make_like(block):
    """Make the same block in float64."""
    wide = type(block)(block.config, dtype=torch.float64)
    wide.load_state_dict(block.state_dict())
    return wide


@pytest.mark.parametrize("options", FEW)
def test_forward_is_prefill_without_the_cache(options):
    block = make_block(options)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    assert torch.equal(block(x), block.prefill(x)[0])


@pytest.mark.parametrize("options", FEW)
def test_calls_change_neither_input_nor_cache(options):
    block = make_block(options)
    cache, x = random_cache(block, 2).detach(), torch.randn(2, 6, 16, dtype=torch.float64)
    kept, kept_x = cache.clone(), x.clone()
    with torch.no_grad():
        block.prefill(x, cache)
        block.step(x[:, 0], cache)
    assert torch.equal(x, kept_x)
    for name, tensor in tensors_of(kept).items():
        assert torch.equal(getattr(cache, name), tensor), name


PADDINGS = {
    "right": [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0, 0]],
    "left": [[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1]],
    "holes and an empty row": [[1, 0, 1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 0, 1]],
}


@pytest.mark.parametrize("start", ["fresh", "random"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("options", FEW)
def test_padded_rows_equal_rows_alone(options, padding, start):
    block = make_block(options)
    mask = torch.tensor(PADDINGS[padding]).bool()
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    x[~mask] = float("nan")  # what stands in the padding must not matter
    head = torch.randn(3, 8, 16, dtype=torch.float64)
    parameters = list(block.parameters())
    for pathway in PATHWAYS[type(block)]:
        path = SsdPath(pathway=pathway)
        cache = random_cache(block, 3) if start == "random" else block.init_cache(3)
        leaf = x.clone().requires_grad_()
        y, new = block.prefill(leaf, cache, mask=mask, path=path)
        loss = (y * head).sum() + sum(f.square().sum() for f in tensors_of(without_padding(new)).values())
        grads = torch.autograd.grad(loss, [leaf, *parameters])
        assert (y[~mask] == 0).all()
        expected_grads = [torch.zeros_like(p) for p in parameters]
        for row in range(3):
            tokens = x[row : row + 1, mask[row]].requires_grad_()
            if not tokens.shape[1]:
                for name, field in tensors_of(cache.rows(row)).items():
                    assert torch.equal(getattr(new.rows(row), name), field), name
                alone = cache.rows(row)
                y_alone = tokens
            else:
                y_alone, alone = block.prefill(tokens, cache.rows(row), path=path)
            assert_near(y[row, mask[row]], y_alone[0], FLOOR[torch.float64])
            for name, field in tensors_of(alone).items():
                assert_near(getattr(new.rows(row), name), field, FLOOR[torch.float64], name)
            if not tokens.shape[1]:
                continue
            fields = sum(f.square().sum() for f in tensors_of(alone).values())
            loss = (y_alone * head[row : row + 1, mask[row]]).sum() + fields
            dx, *dparameters = torch.autograd.grad(loss, [tokens, *parameters])
            assert_near(grads[0][row, mask[row]], dx[0], FLOOR[torch.float64])
            expected_grads = [a + b for a, b in zip(expected_grads, dparameters, strict=True)]
        for actual, expected in zip(grads[1:], expected_grads, strict=True):
            assert_near(actual, expected, FLOOR[torch.float64])


@pytest.mark.parametrize("options", FEW)
def test_lengths_are_a_right_padded_mask(options):
    block = make_block(options)
    x, lengths = torch.randn(3, 6, 16, dtype=torch.float64), torch.tensor([6, 1, 3])
    mask = torch.arange(6) < lengths.unsqueeze(1)
    by_lengths, by_mask = block.prefill(x, mask=lengths)[1], block.prefill(x, mask=mask)[1]
    for name, field in tensors_of(by_lengths).items():
        assert torch.equal(field, getattr(by_mask, name)), name


@pytest.mark.parametrize(("options", "algorithm"), FEW_BY_ALGORITHM)
def test_packed_sequences_equal_separate_ones(options, algorithm):
    block = make_block(options)
    bounds = [0, 1, 3, 12, 20]
    x, cache = torch.randn(1, 20, 16, dtype=torch.float64), random_cache(block, 4)
    for pathway in PATHWAYS[type(block)]:
        path = SsdPath(algorithm, 4, pathway)
        y, new = block.prefill(x, cache, path=path, cu_seqlens=torch.tensor(bounds))
        for row in range(4):
            part = slice(bounds[row], bounds[row + 1])
            y_alone, alone = block.prefill(x[:, part], cache.rows(row), path=path)
            assert_near(y[:, part], y_alone, FLOOR[torch.float64])
            for name, field in tensors_of(alone).items():
                assert_near(getattr(new.rows(row), name), field, FLOOR[torch.float64], name)


@pytest.mark.parametrize(("options", "algorithm"), FEW_BY_ALGORITHM)
def test_a_packed_sequence_moves_no_bit_of_another(options, algorithm):
    block = make_block(options, torch.float32)
    bounds, others = torch.tensor([0, 4, 5, 13, 20]), [*range(5), *range(13, 20)]
    x = torch.randn(1, 20, 16)
    changed = x.clone()
    changed[:, 5:13] = 3.0
    outcomes = []
    for tokens in (x, changed):
        leaf = tokens.clone().requires_grad_()
        y, cache = block.prefill(leaf, path=SsdPath(algorithm, 4), cu_seqlens=bounds)
        y.square().sum().backward()
        rows = tensors_of(cache.rows([0, 1, 3]))
        outcomes.append({"y": y[:, others], "grad": leaf.grad[:, others], **rows})
    for name in outcomes[0]:
        assert torch.equal(outcomes[0][name], outcomes[1][name]), name


@pytest.mark.parametrize("options", FEW)
def test_a_row_alone_equals_the_row_in_a_batch(options):
    block = make_block(options)
    x = torch.randn(3, 10, 16, dtype=torch.float64)
    y = block(x)
    for row in range(3):
        assert_near(y[row : row + 1], block(x[row : row + 1]), FLOOR[torch.float64])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", FEW)
def test_half_precision_keeps_its_state_in_float32(options, dtype):
    block = make_block(options, dtype)
    x = torch.randn(2, 20, 16).to(dtype)
    y, cache = block.prefill(x)
    y_stepped, stepped = unroll(block, x, None)
    assert y.dtype == y_stepped.dtype == dtype
    for name in cache.FP32_FIELDS:
        assert getattr(cache, name).dtype == getattr(stepped, name).dtype == torch.float32
    expected, _ = make_like(block).prefill(x.double())
    assert_near(y, expected, 4 * FLOOR[dtype])
    assert_near(y_stepped, expected, 4 * FLOOR[dtype])
    y.float().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in block.parameters())


@pytest.mark.parametrize("options", FEW)
def test_autocast_trains_and_streams(options):
    block = make_block(options, torch.float32)
    x = torch.randn(2, 20, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y, cache = block.prefill(x)
        y_next, cache = block.step(x[:, 0], cache)
    assert all(getattr(cache, name).dtype == torch.float32 for name in cache.FP32_FIELDS)
    assert torch.isfinite(y_next).all()
    assert_near(y, block(x), 4 * FLOOR[torch.bfloat16])
    y.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in block.parameters())


@pytest.mark.parametrize("options", WITH_SCAN)
def test_the_state_does_not_follow_autocast(options):
    block = make_block(options, torch.float32)
    cache, x = random_cache(block, 2), torch.randn(2, 16)
    projected = {}  # what autocast may narrow: all projections give what they gave the first time
    for name in ("in_proj", "x_proj", "dt_proj"):
        if projection := getattr(block, name, None):
            projection.register_forward_hook(lambda _, __, y, name=name: projected.setdefault(name, y))
    _, expected = block.step(x, cache)
    with torch.autocast("cpu", torch.bfloat16):
        _, stepped = block.step(x, cache)
    assert_near(stepped.ssm, expected.ssm, FLOOR[torch.float32])


@pytest.mark.parametrize("options", FEW)
def test_an_empty_batch_on_another_device(options):
    block = make_block(options, torch.float32).to("meta")
    with torch.no_grad():
        assert block(torch.empty(0, 5, 16, device="meta")).shape == (0, 5, 16)


@pytest.mark.parametrize("options", OPTIONS)
def test_an_empty_batch_is_an_empty_result(options):
    block = make_block(options)
    y, cache = block.prefill(torch.zeros(0, 5, 16, dtype=torch.float64))
    assert y.shape == (0, 5, 16)
    assert cache.batch_size == 0
    assert block.step(torch.zeros(0, 16, dtype=torch.float64), cache)[0].shape == (0, 16)


@pytest.mark.parametrize("options", FEW)
def test_non_contiguous_input_is_welcome(options):
    block = make_block(options)
    x = torch.randn(16, 7, 2, dtype=torch.float64).permute(2, 1, 0)
    assert_near(block(x), block(x.contiguous()), FLOOR[torch.float64])


@pytest.mark.parametrize("options", FEW)
def test_extreme_inputs_give_finite_outputs_and_gradients(options):
    block = make_block(options, torch.float32)
    for scale in (0.0, 1e-20, 1e4):
        x = (scale * torch.randn(1, 40, 16)).requires_grad_()
        block.zero_grad()
        y, cache = block.prefill(x)
        (y.sum() + sum(x.float().sum() for x in cache)).backward()
        assert torch.isfinite(y).all()
        assert torch.isfinite(x.grad).all()
        assert all(torch.isfinite(p.grad).all() for p in block.parameters())


@pytest.mark.parametrize(
    ("options", "widths"), [("mamba1", 4.2), ("mamba2", 4.2), ("mamba3", 6.5), ("mamba3 quaternion", 7.5)]
)
def test_the_block_keeps_for_backward_a_few_activations_and_no_square_of_the_chunk(options, widths):
    """Bytes that autograd keeps per token, in widths of the in-projection."""
    block = make_block(options, torch.float32)
    saved = {}
    x = torch.randn(1, 400, 16, requires_grad=True)

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x)
    parameters = sum(p.numel() * 4 for p in block.parameters())
    per_token = (sum(saved.values()) - parameters) / (400 * 4)
    assert per_token < widths * block.in_proj.out_features


@pytest.mark.parametrize("options", ["mamba1", "mamba2 gate only", "mamba3", "mamba3 mimo 2"])
def test_projections_are_called_as_modules(options):
    """Adapters and quantized layers replace the projections; a block that read their weights would bypass them."""

    class Doubled(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 2 * self.inner(x)

    block = make_block(options)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    y, stepped = block(x), block.step(x[:, 0])[0]
    block.out_proj = Doubled(block.out_proj)
    assert_near(block(x), 2 * y, FLOOR[torch.float64])
    assert_near(block.step(x[:, 0])[0], 2 * stepped, FLOOR[torch.float64])
    block.in_proj = Doubled(block.in_proj)
    assert not torch.allclose(block(x), 2 * y)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_projections_parts_are_where_it_is_cut(options):
    block = make_block(options)
    if isinstance(block, Mamba1):
        rows = {name: [part.rows for part in parts] for name, parts in block.projection_parts().items()}
        assert rows == {"in_proj": [block.config.d_inner] * 2, "x_proj": [block.config.dt_width, *[block.d_state] * 2]}
        return
    (parts,) = block.projection_parts().values()
    assert sum(part.rows for part in parts) == block.in_proj.out_features
    rows = {part.name: part.rows for part in parts}
    if isinstance(block, Attention):
        assert (rows["q"], rows["k"]) == (block.num_heads * block.head_dim, block.num_heads_kv * block.head_dim)
        assert list(rows) == ["q", "k", "v", *(["mlp_value", "mlp_gate"] if block.mlp_dim else [])]
        return
    assert rows["z"] == rows["x"] == block.config.nheads * block.headdim
    assert rows["B"] == rows["C"] == block.config.ngroups * block.rank * block.d_state
    assert {part.name for part in parts if not part.is_matrix} == rows.keys() & {"dt", "A", "trap"}
    assert [name for name in rows if name not in ("z0", "x0")][:5] == ["z", "x", "B", "C", "dt"]


@pytest.mark.parametrize("options", FEW_WITH_SCAN)
def test_functional_gradients_are_rejected_by_name(options):
    block = make_block(options, torch.float32)
    with pytest.raises(NotImplementedError, match=r"has no torch.func.grad; use torch.autograd.grad"):
        torch.func.grad(lambda x: block(x).sum())(torch.randn(1, 4, block.config.d_model))


def test_a_block_has_the_official_sizes_as_attributes():
    mamba1, mamba2 = Mamba1(32), Mamba2(32, headdim=16, d_state=8, ngroups=2)
    mamba3, mimo = Mamba3(32, headdim=16, d_state=8), Mamba3(32, headdim=16, d_state=8, is_mimo=True)
    assert (mamba1.d_inner, mamba1.d_state, mamba1.d_conv, mamba1.dt_rank) == (64, 16, 4, 2)
    assert (mamba2.d_inner, mamba2.d_ssm, mamba2.nheads, mamba2.ngroups, mamba2.conv_dim) == (64, 64, 4, 2, 96)
    assert (mamba3.nheads, mamba3.num_bc_heads, mamba3.num_rope_angles, mamba3.mimo_rank) == (4, 1, 2, 1)
    assert (mimo.rank, mimo.mimo_rank) == (4, 4)
