"""Class tokens: splits, steps and whole sequences agree on their positions, at every level."""

import itertools

import pytest
import torch

from anymamba import BidirectionalStack, LatentModel, Stack, StackCache
from anymamba.models.stack.class_tokens import find_output_indices, insertion_order
from tests.models.test_stack import BLOCKS, MIXED, WIDTH, results
from tests.support import assert_all_near, assert_near

PLACES = ["start", "middle", "end", 0, 1, 3]
ORDER = {"start": 0, "middle": 1, "end": 2}
LEVELS = {
    "class_tokens": ["end", 2, "start", "middle", 9, "start"],
    "layer_class_tokens": [[], ["middle", "start"], [1, "end"]],
}


def by_hand(positions, length):
    """Return the names of the elements of a whole sequence, from the definition."""
    before = [[] for _ in range(length + 1)]
    ranked = sorted(range(len(positions)), key=lambda i: ORDER.get(positions[i], 3))
    for i in ranked:
        position = {"start": 0, "middle": length // 2, "end": length}.get(positions[i], positions[i])
        if position < length or positions[i] == "end":
            before[position].append(i)
    m = len(positions)
    return [
        item
        for position in range(length + 1)
        for item in [*before[position], *([m + position] if position < length else [])]
    ]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_every_split_and_priming_places_them_as_the_definition_says(length):
    """Brute force: all pairs of positions, all splits into calls, with and without priming before each call."""
    for positions in itertools.product(PLACES, repeat=2):
        m, expected = len(positions), by_hand(positions, length)
        assert insertion_order(positions, 0, False, length, length) == expected
        for cuts in itertools.product([False, True], repeat=length - 1):
            ends = [t for t, cut in enumerate(cuts, 1) if cut] + [length]
            for primes in itertools.product([False, True], repeat=len(ends)):
                order, seen = [], 0
                for end, prime in zip(ends, primes, strict=True):
                    if prime:
                        order += insertion_order(positions, seen, False, 0, length, True)
                        assert insertion_order(positions, seen, True, 0, length, True) == []
                    part = insertion_order(positions, seen, prime, end - seen, length)
                    order += [i if i < m else i + seen for i in part]
                    seen = end
                assert order == expected, (positions, ends, primes)


def test_output_indices_follow_all_levels():
    for length in (1, 2, 5, 8):
        indices = find_output_indices(length, ["end", "start"], [["middle"], [1, 99]], ["start", 3])
        stream = [("token", j) for j in range(length)]
        for name, positions in ((("inputs"), ["start", 3]), ("stack", ["end", "start"]), (0, ["middle"]), (1, [1, 99])):
            m = len(positions)
            stream = [(name, i) if i < m else stream[i - m] for i in by_hand(positions, len(stream))]
        index = {item: i for i, item in enumerate(stream)}
        assert indices.tokens == [index["token", j] for j in range(length)]
        assert indices.inputs == [index.get(("inputs", i)) for i in range(2)]
        assert indices.stack == [index["stack", i] for i in range(2)]
        assert indices.layers == [[index[0, 0]], [index[1, 0], index.get((1, 1))]]


def make(**fields):
    stack = Stack(**{"d_model": WIDTH, **MIXED, **LEVELS, **fields}, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in stack.named_parameters():
            if "class_tokens" in name:
                parameter += torch.randn_like(parameter)
    return stack


def in_parts(stack, x, sizes, primes=()):
    """Return outputs and the cache of a sequence in parts, some of them after priming."""
    ys, cache, t = [], None, x.shape[1]
    for i, part in enumerate(x.split(sizes, dim=1)):
        if i in primes:
            stack_out, cache = stack.prime(len(x), cache, length=t)
            again, same = stack.prime(len(x), cache, length=t)
            assert again is None
            assert_all_near(same.tensors(), cache.tensors(), 0)
            ys += expected_of_priming(stack, x, sizes, i, stack_out)
        y, cache = stack.prefill(part, cache, length=t)
        ys.append(y)
    return torch.cat(ys, 1), cache


def expected_of_priming(stack, x, sizes, i, last):
    """Return what priming before part i adds: only its last output is known, the others are taken from the whole."""
    whole = stack(x)
    begin = sum(sizes[:i])
    indices = stack.output_indices(x.shape[1]).tokens
    first = indices[begin - 1] + 1 if begin else 0
    new = whole[:, first : indices[begin]]
    assert (last is None) == (new.shape[1] == 0)
    if last is not None:
        assert_near(last, new[:, -1], 1e-10)
    return [new]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n_virtual": 5, "d_intermediate": 9, "ignore_first_residual": True},
        {"n_virtual": 4, "streams": 2, "gate_bias": -0.5},
        {"n_virtual": 4, "grad_horizon": 2, "checkpointing": True},
        {"layer_class_tokens": []},
        {"class_tokens": []},
    ],
)
def test_splits_and_steps_equal_whole_sequences(fields):
    stack, t = make(**fields), 5
    x = torch.randn(2, t, WIDTH, dtype=torch.float64)
    expected = results(stack, x, lambda x: (stack(x), stack.prefill(x, length=t)[1]))
    indices = stack.output_indices(t)
    positions = sorted(i for part in (indices.tokens, indices.stack, *indices.layers) for i in part if i is not None)
    assert positions == list(range(expected["y"].shape[1]))
    assert_all_near(results(stack, x, lambda x: stack.prefill(x, length=t)), expected, 1e-10)
    if stack.config.grad_horizon is None:  # of every call its own
        for sizes in ([2, 3], [1, 3, 1], [4, 1]):
            split = results(stack, x, lambda x, sizes=sizes: in_parts(stack, x, sizes))
            assert_all_near(split, expected, 1e-10)
    y, _ = in_parts(stack, x, [2, 3], primes=(0, 1))
    assert_near(y, expected["y"], 1e-10)
    cache = None
    for j, index in enumerate([*stack.output_indices(t).tokens[:-1], -1]):
        y, cache = stack.step(x[:, j], cache, length=t)
        assert_near(y, expected["y"][:, index], 1e-10)


def test_a_class_token_is_a_token_by_hand():
    stack = make(class_tokens=["start", 2], layer_class_tokens=[[], ["end"], []], final_norm=False)
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    rows, last = stack.class_tokens.weight, stack.layer_class_tokens["1"].weight
    a, b, c = stack.layers
    h = torch.cat([rows[:1].expand(2, 1, -1), x[:, :2], rows[1:].expand(2, 1, -1), x[:, 2:]], 1)
    h = h + a.mixer(a.norm(h))
    h = torch.cat([h, last.expand(2, 1, -1)], 1)
    h = h + b.mixer(b.norm(h))
    h = h + c.mixer(c.norm(h))
    assert_near(stack(x), h, 1e-12)
    first, after = stack.hidden_states(x, [0, 2])
    assert (first.shape[1], after.shape[1]) == (6, 7)
    assert_near(after, h, 1e-12)


def test_a_horizon_keeps_the_gradient_of_class_tokens():
    """Those of the prefix get the gradient that reaches the cut, as inputs do; those after it get theirs."""
    lists = [["start"], [], ["end"]]
    stack = make(class_tokens=["start"], layer_class_tokens=lists, grad_horizon=1, final_norm=False)
    x = torch.randn(1, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = [level.weight for level in (stack.class_tokens, *stack.layer_class_tokens.values())]
    grads = torch.autograd.grad(stack(x).square().sum(), [x, *weights])
    with torch.no_grad():
        h = stack.hidden_states(x, [1])[0]
    h.requires_grad_()
    last = stack.layers[2]
    joined = torch.cat([h, weights[2].expand(1, 1, -1)], 1)
    y = joined + last.mixer(last.norm(joined))
    reached, of_last = torch.autograd.grad(y.square().sum(), [h, weights[2]])
    expected = [reached[:, 2:], reached[0, 1:2], reached[0, :1], of_last]
    for a, b in zip(grads, expected, strict=True):
        assert_near(a, b, 1e-10)


@pytest.mark.parametrize("both_ways", [False, True])
def test_padded_and_packed_rows_equal_rows_alone(both_ways):
    torch.manual_seed(1)
    if both_ways:
        fields = {"class_tokens": LEVELS["class_tokens"], "layer_class_tokens": [["end"], ["middle", "start"]]}
        stack = BidirectionalStack(d_model=WIDTH, n_layer=4, ssm_cfg=BLOCKS["Mamba2"], **fields, dtype=torch.float64)
    else:
        stack = make()
    sizes = (5, 2, 7)
    rows = [torch.randn(1, t, WIDTH, dtype=torch.float64) for t in sizes]
    alone = [stack(row) for row in rows]
    packed = stack(torch.cat(rows, 1), cu_seqlens=torch.tensor([0, 5, 7, 14]))
    assert_near(packed, torch.cat(alone, 1), 1e-10)
    batch, mask = torch.full((3, 8, WIDTH), torch.nan, dtype=torch.float64), torch.zeros(3, 8, dtype=torch.bool)
    for i, (row, begin) in enumerate(zip(rows, (0, 4, 1), strict=True)):
        mask[i, begin : begin + row.shape[1]] = True
        batch[i, mask[i]] = row[0]
    y = stack(batch, mask=mask)
    for row, expected in zip(y, alone, strict=True):
        n = expected.shape[1]
        assert_near(row[:n], expected[0], 1e-10)
        assert not row[n:].any()
    if not both_ways:  # rows at different positions of sequences of different lengths continue together
        parts = [stack.prefill(row[:, :n], length=t) for row, n, t in zip(rows, (3, 1, 2), sizes, strict=True)]
        cache, lengths = StackCache.cat([cache for _, cache in parts]), torch.tensor(sizes)
        following = torch.cat([row[:, n] for row, n in zip(rows, (3, 1, 2), strict=True)])
        step, cache = stack.step(following, cache, length=lengths)
        for i, (row, n, t) in enumerate(zip(rows, (4, 2, 3), sizes, strict=True)):
            y, row_cache = stack.prefill(row[:, :n], length=t)
            assert_near(step[i], y[0, -1], 1e-10)
            assert_all_near(cache.rows(i).tensors(), row_cache.tensors(), 1e-10)


def test_three_levels_of_a_latent_model(tmp_path):
    stack = {"d_model": WIDTH, **MIXED, **LEVELS}
    model = LatentModel(input_size=3, output_size=2, stack=stack, class_tokens=["start", 1, "end"], dtype=torch.float64)
    x, t = torch.randn(2, 4, 3, dtype=torch.float64), 4
    whole, indices = model(x), model.output_indices(4)
    y, cache = model.prefill(x, length=t)
    assert_near(y, whole, 1e-10)
    assert [tuple(cursor.shape) for cursor in cache.cursors] == [(2, 2)] * 4
    waiting, cache = model.prime(2, length=t)
    assert_near(waiting, whole[:, indices.tokens[0] - 1], 1e-10)
    for j, index in enumerate([*indices.tokens[:-1], -1]):
        y, cache = model.step(x[:, j], cache, length=t)
        assert_near(y, whole[:, index], 1e-10)
    cache.save(tmp_path / "state", model)
    again = StackCache.load(tmp_path / "state", model)
    assert all(torch.equal(a, b) for a, b in zip(again.cursors, cache.cursors, strict=True))
    with pytest.raises(ValueError, match=r"LatentModel.prefill: the cache must have 4 cursors of class tokens, got 3"):
        model.prefill(x, model.backbone.init_cache(2), length=t)
    model.save_pretrained(tmp_path)
    assert_near(LatentModel.from_pretrained(tmp_path)(x), whole, 1e-12)
    both = LatentModel(
        input_size=3,
        bidirectional=True,
        class_tokens=["middle"],
        stack={"d_model": WIDTH, "n_layer": 2, "ssm_cfg": BLOCKS["Mamba2"], "class_tokens": ["end"]},
        dtype=torch.float64,
    )
    assert_near(both(x, mask=torch.tensor([4, 2]))[1, :4], both(x[1:, :2])[0], 1e-10)


def test_cursors_are_saved_with_the_cache(tmp_path):
    stack = make()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    _, cache = stack.prefill(x[:, :3], length=5)
    cache.save(tmp_path / "state", stack)
    again = StackCache.load(tmp_path / "state", stack)
    assert again.to(dtype=torch.float32).cursors[0].dtype == torch.int64
    assert_near(stack.prefill(x[:, 3:], again, length=5)[0], stack.prefill(x[:, 3:], cache, length=5)[0], 0)


def test_priming_where_nothing_waits_changes_nothing():
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    for fields in ({"class_tokens": [], "layer_class_tokens": []}, {"class_tokens": [3], "layer_class_tokens": []}):
        stack = make(**fields)
        out, fresh = stack.prime(2)
        assert out is None
        assert_near(stack.prefill(x, fresh)[0], stack.prefill(x)[0], 0)
        _, cache = stack.prefill(x[:, :1])
        out, same = stack.prime(2, cache)
        assert out is None
        assert_near(stack.prefill(x[:, 1:], same)[0], stack.prefill(x[:, 1:], cache)[0], 0)


@pytest.mark.usefixtures("unchecked")
def test_invalid_configs_raise():
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    for position in ("middle", "end"):
        stack = make(class_tokens=[position], layer_class_tokens=[])
        for call in (lambda s: s.prefill(x), lambda s: s.step(x[:, 0]), lambda s: s.prime(2)):
            with pytest.raises(ValueError, match=f"length.* must be given.* class token at '{position}', got None"):
                call(stack)
    stack = make()
    with pytest.raises(ValueError, match="length is 3, but 4 tokens have come"):
        stack.prefill(x, length=3)
    for wrong in (0, 2.5, torch.tensor([4, 4, 4])):
        with pytest.raises(ValueError, match="length must be the number of tokens of the whole sequences"):
            stack.prefill(x, length=wrong)
    with pytest.raises(ValueError, match="the cache must have 3 cursors of class tokens, got 0"):
        stack.prefill(x, Stack(d_model=WIDTH, **MIXED, dtype=torch.float64).prefill(x)[1], length=8)
    _, cache = stack.prefill(x[:1, :2], length=4)
    with pytest.raises(ValueError, match=r"cursors of the cache must have shape \(2, 2\), got \(1, 2\)"):
        stack.prefill(x[:, 2:], cache, length=4)
    for wrong in (-1, 2.0):
        with pytest.raises(ValueError, match=f"batch_size must be an integer, 0 or more, got {wrong}"):
            stack.prime(wrong, length=4)
    with pytest.raises(ValueError, match="pack the sequences into one row with cu_seqlens"):
        stack(x, seq_idx=torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="length must be an integer number of tokens, at least 1, got 0"):
        stack.output_indices(0)
    for fields, message in [
        ({"class_tokens": ["begin"]}, "class_tokens must be a list of 'start', 'middle', 'end' and numbers"),
        ({"class_tokens": [-1]}, "0 or more, got \\[-1\\]"),
        ({"layer_class_tokens": [["start"]]}, "layer_class_tokens must have 3 lists, one per layer, got 1"),
        ({"layer_class_tokens": [[], [], ["x"]]}, "layer_class_tokens\\[2\\] must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(**fields)
