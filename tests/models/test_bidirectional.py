"""Bidirectional stacks: both directions, each sequence by itself."""

import pytest
import torch

from anymamba import BidirectionalConfig, BidirectionalStack
from anymamba.models.stack.stack_config import PAIR_SCHEDULES
from tests.models.test_stack import BLOCKS, WIDTH
from tests.support import assert_near

MIXED = {"n_layer": 4, "layer_cfgs": [BLOCKS[name] for name in ("Mamba1", "Mamba2", "Mamba3", "Mamba2")]}
KINDS = {
    **{name: {"ssm_cfg": cfg} for name, cfg in BLOCKS.items()},
    "mixed, linear": {**MIXED, "merge": "linear"},
    "streams": {**MIXED, "merge": "linear", "n_virtual": 6, "streams": 2, "gate_bias": -0.5, "checkpointing": True},
    "ignoring": {**MIXED, "ignore_first_residual": True, "ignore_last_residual": True, "final_norm": False},
}


def make(kind="mixed, linear", **fields):
    stack = BidirectionalStack(**{"d_model": WIDTH, "n_layer": 2, **KINDS[kind], **fields}, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in stack.named_parameters():
            if "gates" in name or "norm" in name or "merges" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return stack


def test_a_pair_is_two_blocks_and_flips_by_hand():
    stack = make()
    x = h = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    for j, merge in enumerate(stack.merges):
        there, back = stack.layers[2 * j], stack.layers[2 * j + 1]
        f = there.mixer(there.norm(h))
        g = back.mixer(back.norm(h).flip(1)).flip(1)
        h = h + torch.cat([f, g], -1) @ merge.weight.T + merge.bias
    assert_near(stack(x), stack.norm_f(h), 1e-12)
    assert_near(stack.hidden_states(x, [-1])[0], h, 1e-12)


def test_a_learned_merge_begins_as_the_mean():
    mean, linear = (
        BidirectionalStack(d_model=WIDTH, **MIXED, merge=m, dtype=torch.float64) for m in ("mean", "linear")
    )
    linear.load_state_dict(mean.state_dict(), strict=False)
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    assert_near(linear(x), mean(x), 1e-12)


@pytest.mark.parametrize("kind", BLOCKS)  # layers of one family can change places
@pytest.mark.parametrize(
    "fields",
    [{}, {"ignore_first_residual": True}, {"merge": "linear", "n_virtual": 6, "streams": 2, "gate_bias": -0.5}],
)
def test_reversing_the_input_and_swapping_the_directions_reverses_the_output(kind, fields):
    stack, swapped = (make(kind, n_layer=4, **fields) for _ in range(2))
    swapped.load_state_dict(dict(_swap_directions(name, value) for name, value in stack.state_dict().items()))
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    assert_near(swapped(x.flip(1)), stack(x).flip(1), 1e-12)


def _swap_directions(name, value):
    """Return the name and value of a parameter with the directions swapped: of a layer, or the halves of a merge."""
    first, *rest = name.split(".", 2)
    if first == "layers":
        return ".".join([first, str(int(rest[0]) ^ 1), rest[1]]), value
    return name, value.roll(WIDTH, dims=1) if first == "merges" and value.ndim == 2 else value


@pytest.mark.parametrize("kind", KINDS)
def test_padded_and_packed_rows_equal_rows_alone(kind):
    """Values and gradients; the padding holds NaN, so that a leak from it would be seen."""
    stack = make(kind)
    rows = [torch.randn(1, t, WIDTH, dtype=torch.float64) for t in (5, 1, 7)]
    weights = [torch.randn_like(row) for row in rows]
    alone = [stack(row) for row in rows]
    loss = sum((y * w).sum() for y, w in zip(alone, weights, strict=True))
    expected = torch.autograd.grad(loss, list(stack.parameters()), allow_unused=True)
    packed = stack(torch.cat(rows, 1), cu_seqlens=torch.tensor([0, 5, 6, 13]))
    assert_near(packed, torch.cat(alone, 1), 1e-10)
    packed_grads = torch.autograd.grad(
        (packed * torch.cat(weights, 1)).sum(), list(stack.parameters()), allow_unused=True
    )
    batch, mask = torch.full((3, 8, WIDTH), torch.nan, dtype=torch.float64), torch.zeros(3, 8, dtype=torch.bool)
    for i, (row, begin) in enumerate(zip(rows, (2, 4, 1), strict=True)):
        mask[i, begin : begin + row.shape[1]] = True
        batch[i, mask[i]] = row[0]
    y = stack(batch, mask=mask)
    assert_near(y[mask], torch.cat([y[0] for y in alone]), 1e-10)
    assert not y[~mask].any()
    loss = (y[mask] * torch.cat([w[0] for w in weights])).sum()
    for name, *grads in zip(
        dict(stack.named_parameters()),
        expected,
        packed_grads,
        torch.autograd.grad(loss, list(stack.parameters()), allow_unused=True),
        strict=True,
    ):
        if grads[0] is not None:
            assert_near(grads[1], grads[0], 1e-10, name, least=1e-3)
            assert_near(grads[2], grads[0], 1e-10, name, least=1e-3)


@pytest.mark.parametrize("schedule", [*PAIR_SCHEDULES, [2, 1, 0, 3, 2, 3]])
def test_virtual_pairs_are_the_passes_of_their_schedule(schedule):
    stack = make(n_virtual=6, schedule=schedule)
    x = h = torch.randn(1, 5, WIDTH, dtype=torch.float64)
    layers = stack.config.layer_order()
    for u in range(3):
        there, back, merge = (
            stack.layers[layers[2 * u]],
            stack.layers[layers[2 * u + 1]],
            stack.merges[layers[2 * u] // 2],
        )
        f, g = there.mixer(there.norm(h)), back.mixer(back.norm(h).flip(1)).flip(1)
        h = h + merge(torch.cat([f, g], -1))
    assert_near(stack(x), stack.norm_f(h), 1e-12)


def test_a_horizon_counts_pairs():
    stack, whole = make(grad_horizon=1), make(grad_horizon=2)
    x = torch.randn(1, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    stack(x).sum().backward()
    assert x.grad.any()
    assert all(
        (p.grad is None) == name.startswith(("layers.0", "layers.1", "merges.0"))
        for name, p in stack.named_parameters()
    )
    whole(x).sum().backward()
    assert all(p.grad is not None for p in whole.parameters())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layer": 3}, "n_layer must be even, one layer per direction of a pair, got 3"),
        ({"n_layer": 2, "n_virtual": 3}, "the number of passes must be even, for pairs, got 3"),
        ({"n_layer": 2, "schedule": "cyclic"}, "schedule must be one of strided_cyclic"),
        ({"n_layer": 2, "merge": "sum"}, 'merge must be "mean" or "linear"'),
        ({"n_layer": 2, "d_intermediate": 8}, "no MLP, so d_intermediate must be 0, got 8"),
        ({"n_layer": 4, "grad_horizon": 3}, "grad_horizon must be 1 to 2"),
    ],
)
def test_invalid_configs_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        BidirectionalConfig(d_model=WIDTH, **fields)
