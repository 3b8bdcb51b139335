import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anymamba.scan import SsdPath, scan
from anymamba.scan.chunking import causal_decay, cumulative_decay
from tests.scan.cases import ALGORITHMS, BY_HAND, CHUNKED, make_inputs, run
from tests.support import FLOOR, assert_all_near, assert_near, relative_error

SHAPES = {
    "one step": {"t": 1},
    "shorter than a chunk": {"t": 5},
    "awkward": {"t": 29},
    "many chunks": {"t": 67},
}
BOUNDS = {1: [0, 1], 5: [0, 1, 5], 29: [0, 1, 2, 10, 28, 29], 67: [0, 3, 19, 20, 52, 67]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("r", [1, 4])
@pytest.mark.parametrize("g", [1, 2, 4])
def test_every_algorithm_equals_the_recurrence(g, r, shape, packed, dtype):
    t = SHAPES[shape]["t"]
    bounds = BOUNDS[t] if packed else None
    inputs = make_inputs(t=t, r=r, g=g, bounds=bounds, dtype=dtype)
    oracle_inputs = {name: x.double() for name, x in inputs.items()}
    oracle = run(oracle_inputs, SsdPath.recurrent(), bounds)
    for algorithm in ALGORITHMS:
        assert_all_near(run(inputs, SsdPath(algorithm, 8), bounds), oracle, FLOOR[dtype])


@pytest.mark.parametrize("algorithm", CHUNKED)
@pytest.mark.parametrize("chunk_len", [1, 2, 7, 12, 13, 14, 1000, None])
def test_any_chunk_length_gives_the_same(algorithm, chunk_len):
    inputs = make_inputs(t=13)
    oracle = run(inputs, SsdPath.recurrent())
    assert_all_near(run(inputs, SsdPath(algorithm, chunk_len)), oracle, FLOOR[torch.float64])


@settings(max_examples=60)
@given(data=st.data())
def test_any_shape_any_cut_any_boundary(data):
    t = data.draw(st.integers(1, 24), label="t")
    g = data.draw(st.integers(1, 3), label="g")
    size = st.integers(1, 4)
    packed = data.draw(st.booleans(), label="packed")
    inner = data.draw(st.sets(st.integers(1, t - 1)) if t > 1 else st.just(set()), label="inner")
    bounds = [0, *sorted(inner), t] if packed else None
    inputs = make_inputs(
        b=data.draw(st.integers(1, 3)),
        t=t,
        r=data.draw(st.integers(1, 3)),
        h=g * data.draw(st.integers(1, 3)),
        p=data.draw(size),
        g=g,
        n=data.draw(size),
        bounds=bounds,
        decay=data.draw(st.sampled_from([0.0, 0.1, 3.0, 300.0])),
        seed=data.draw(st.integers(0, 10)),
    )
    path = SsdPath(data.draw(st.sampled_from(CHUNKED)), data.draw(st.integers(1, 26)))
    # Autograd forms the gradient of a log-decay as a difference of sums of order 1; the hand-derived one does not.
    least = 0.0 if path.algorithm in BY_HAND else 1.0
    oracle = run(inputs, SsdPath.recurrent(), bounds)
    assert_all_near(run(inputs, path, bounds), oracle, FLOOR[torch.float64], least)


@settings(max_examples=30)
@given(algorithm=st.sampled_from(ALGORITHMS), t=st.integers(2, 20), data=st.data())
def test_a_cut_sequence_continues_from_its_state(algorithm, t, data):
    cut = data.draw(st.integers(1, t - 1))
    inputs = make_inputs(t=t, r=2)
    state = inputs.pop("initial_state")
    path = SsdPath(algorithm, 4)
    y, final_state = scan(**inputs, initial_state=state, path=path)
    y_head, state = scan(**{n: x[:, :cut] for n, x in inputs.items()}, initial_state=state, path=path)
    y_tail, state = scan(**{n: x[:, cut:] for n, x in inputs.items()}, initial_state=state, path=path)
    assert_near(torch.cat([y_head, y_tail], 1), y, FLOOR[torch.float64])
    assert_near(state, final_state, FLOOR[torch.float64])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_packed_sequences_equal_separate_ones(algorithm):
    bounds = [0, 1, 8, 20, 33]
    inputs = make_inputs(t=33, r=2, bounds=bounds)
    states = inputs.pop("initial_state")
    path = SsdPath(algorithm, 6)
    y, finals = scan(**inputs, initial_state=states, path=path, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    for row, (start, stop) in enumerate(itertools.pairwise(bounds)):
        alone = {name: x[:, start:stop] for name, x in inputs.items()}
        y_alone, final = scan(**alone, initial_state=states[row : row + 1], path=path)
        assert_near(y[:, start:stop], y_alone, FLOOR[torch.float64])
        assert_near(finals[row : row + 1], final, FLOOR[torch.float64])


@pytest.mark.parametrize("value", [7.0, float("nan"), float("inf")])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_packed_sequence_moves_no_bit_of_another(algorithm, value):
    bounds = [0, 3, 4, 17, 29]
    inputs = make_inputs(t=29, r=2, bounds=bounds, dtype=torch.float32)
    changed = {name: x.clone() for name, x in inputs.items()}
    for name in ("v", "k", "q"):
        changed[name][:, 4:17] = value
    changed["initial_state"][2] = value
    path = SsdPath(algorithm, 8)
    before, after = run(inputs, path, bounds), run(changed, path, bounds)
    others = [t for t in range(29) if not 4 <= t < 17]
    for name in before:
        by_row = name in ("final_state", "grad_initial_state")
        pick = (lambda x: x[[0, 1, 3]]) if by_row else (lambda x: x[:, others])
        assert torch.equal(pick(before[name]), pick(after[name])), name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_row_alone_equals_the_row_in_a_batch(algorithm):
    inputs = make_inputs(b=3, t=21, r=2)
    path = SsdPath(algorithm, 8)
    together = run(inputs, path)
    for row in range(3):
        alone = {name: x[row : row + 1] for name, x in inputs.items()}
        y, final_state = scan(
            **{n: x for n, x in alone.items() if n != "initial_state"}, initial_state=alone["initial_state"], path=path
        )
        assert_near(y, together["y"][row : row + 1], FLOOR[torch.float64])
        assert_near(final_state, together["final_state"][row : row + 1], FLOOR[torch.float64])


@pytest.mark.parametrize("algorithm", BY_HAND)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("r", [1, 2])
def test_the_hand_derived_backward_passes_gradcheck(r, packed, algorithm):
    bounds = [0, 2, 3, 7] if packed else None
    inputs = make_inputs(b=2, t=7, r=r, h=2, p=2, g=1, n=3, bounds=bounds)
    cu_seqlens = torch.tensor(bounds) if packed else None

    def run_scan(v, k, q, log_decay, initial_state):
        path = SsdPath(algorithm, 3)
        return scan(v, k, q, log_decay, initial_state=initial_state, path=path, cu_seqlens=cu_seqlens)

    # A positive log-decay is rejected, so the finite differences must stay below zero.
    inputs["log_decay"] = inputs["log_decay"] - 0.1
    assert torch.autograd.gradcheck(run_scan, tuple(x.requires_grad_() for x in inputs.values()))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_initial_state_is_a_state_of_zeros(algorithm):
    inputs = make_inputs(t=9)
    zeros = torch.zeros_like(inputs.pop("initial_state"))
    y, final_state = scan(**inputs, path=SsdPath(algorithm, 4))
    y_zeros, final_zeros = scan(**inputs, initial_state=zeros, path=SsdPath(algorithm, 4))
    assert torch.equal(y, y_zeros)
    assert torch.equal(final_state, final_zeros)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_non_contiguous_inputs_and_gradients_are_welcome(algorithm):
    inputs = make_inputs(t=11, r=2)
    strided = {name: torch.stack([x, x], -1)[..., 0] for name, x in inputs.items()}
    assert not strided["v"].is_contiguous()
    path = SsdPath(algorithm, 4)
    expected, actual = run(inputs, path), run(strided, path)
    assert_all_near(actual, expected, FLOOR[torch.float64])
    v = inputs["v"].requires_grad_()
    y, _ = scan(v, inputs["k"], inputs["q"], inputs["log_decay"], path=path)
    y.sum().backward()
    assert torch.isfinite(v.grad).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_empty_batch_is_an_empty_result(algorithm):
    inputs = make_inputs(b=0, t=9)
    results = run(inputs, SsdPath(algorithm, 4))
    assert results["y"].shape == (0, 9, 1, 4, 3)
    assert results["grad_k"].shape == inputs["k"].shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_half_precision_rounds_once(algorithm, dtype):
    inputs = make_inputs(t=40, r=2, dtype=dtype)
    oracle = run({name: x.double() for name, x in inputs.items()}, SsdPath.recurrent())
    results = run(inputs, SsdPath(algorithm, 8))
    assert results["y"].dtype == dtype
    assert results["final_state"].dtype == torch.float32
    assert_near(results["final_state"], oracle["final_state"], FLOOR[torch.float32])
    assert_all_near(results, oracle, FLOOR[dtype])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_autocast_does_not_reach_into_the_scan(algorithm):
    inputs = make_inputs(t=17, dtype=torch.float32)
    outside = run(inputs, SsdPath(algorithm, 8))
    with torch.autocast("cpu", torch.bfloat16):
        leaves = [x.clone().requires_grad_() for x in inputs.values()]
        y, final_state = scan(*leaves[:4], initial_state=leaves[4], path=SsdPath(algorithm, 8))
    assert y.dtype == torch.float32
    assert torch.equal(y, outside["y"])
    assert torch.equal(final_state, outside["final_state"])


@pytest.mark.parametrize("algorithm", CHUNKED)
def test_a_hard_reset_costs_no_digits(algorithm):
    """Small decays right after log-decays of -1e8: float32 running sums would have no digits left for them."""
    inputs = make_inputs(t=64, decay=0.1, dtype=torch.float32)
    inputs["log_decay"][:, 5::9] = -1e8
    oracle = run({name: x.double() for name, x in inputs.items()}, SsdPath.recurrent())
    assert_all_near(run(inputs, SsdPath(algorithm, 32)), oracle, FLOOR[torch.float32])


@pytest.mark.parametrize("log_decay", [0.0, -1e-30, -69.0, -87.5, -1e4, -1e8, float("-inf")])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_extreme_decays_give_finite_results(algorithm, log_decay):
    inputs = make_inputs(t=70, dtype=torch.float32)
    inputs["log_decay"].fill_(log_decay)
    results = run(inputs, SsdPath(algorithm, 32))
    oracle = run({name: x.double() for name, x in inputs.items()}, SsdPath.recurrent())
    for name, x in results.items():
        assert torch.isfinite(x).all(), name
    assert_near(results["y"], oracle["y"], FLOOR[torch.float32])
    assert_near(results["final_state"], oracle["final_state"], FLOOR[torch.float32])


@pytest.mark.parametrize("algorithm", BY_HAND)
def test_the_hand_derived_log_decay_gradient_does_not_cancel(algorithm):
    """After a reset the gradient of the log-decay is tiny; the hand-derived one keeps its relative precision."""
    inputs = make_inputs(t=40, decay=0.1, dtype=torch.float32)
    inputs["log_decay"][:, 20] = -60.0
    oracle = run({name: x.double() for name, x in inputs.items()}, SsdPath.recurrent())["grad_log_decay"][:, 20]
    assert oracle.abs().max() < 1e-20
    assert_near(run(inputs, SsdPath(algorithm, 16))["grad_log_decay"][:, 20], oracle, FLOOR[torch.float32])
    assert relative_error(run(inputs, SsdPath.serial(16))["grad_log_decay"][:, 20], oracle) > 0.5


def test_masks_hold_no_denormals():
    """A weight is a normal number or zero: x86 is ten times slower on what is between them."""
    lam = cumulative_decay(torch.full((200,), -0.7), -1)
    mask = causal_decay(lam, torch.float32)
    tiny = torch.finfo(torch.float32).tiny
    assert ((mask == 0) | (mask > tiny)).all()
    assert (mask.tril() > 0).any()


def test_a_hundred_thousand_steps_in_float32_stay_finite_and_exact():
    inputs = make_inputs(b=1, t=100_000, h=1, p=2, g=1, n=2, dtype=torch.float32, decay=0.01)
    results = run(inputs, SsdPath())
    for name, x in results.items():
        assert torch.isfinite(x).all(), name
    double = run({name: x.double() for name, x in inputs.items()}, SsdPath())
    assert_near(results["y"], double["y"], FLOOR[torch.float32])


@pytest.mark.parametrize("algorithm", BY_HAND)
@pytest.mark.parametrize("t", [16, 160])
def test_the_hand_derived_backward_keeps_its_inputs_only(t, algorithm):
    inputs = {name: x.requires_grad_() for name, x in make_inputs(t=t, r=2).items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        scan(**inputs, path=SsdPath(algorithm, 8))
    addresses = {x.data_ptr() for x in inputs.values()}
    assert {x.data_ptr() for x in saved} == addresses
    assert sum(x.numel() for x in saved) == sum(x.numel() for x in inputs.values())


@pytest.mark.parametrize("algorithm", BY_HAND)
def test_the_second_derivative_of_the_hand_derived_backward_is_rejected(algorithm):
    v, k, q, a, s = (x.requires_grad_() for x in make_inputs(t=5).values())
    y, _ = scan(v, k, q, a, initial_state=s, path=SsdPath(algorithm, 4))
    (dv,) = torch.autograd.grad(y.square().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dv.sum().backward()


@pytest.mark.parametrize("algorithm", ["minimal", "serial"])
def test_autograd_algorithms_have_a_second_derivative(algorithm):
    inputs = make_inputs(b=1, t=4, h=1, p=1, g=1, n=2)

    def run_scan(v, log_decay):
        return scan(v, inputs["k"], inputs["q"], log_decay, path=SsdPath(algorithm, 2))

    leaves = (inputs["v"].requires_grad_(), (inputs["log_decay"] - 0.1).requires_grad_())
    assert torch.autograd.gradgradcheck(run_scan, leaves)


BAD = {
    "v must have shape": {"v": lambda x: x[0]},
    "k must have shape": {"k": lambda x: x[:, :-1]},
    "q must have shape": {"q": lambda x: x[..., :-1]},
    "log_decay must have shape": {"log_decay": lambda x: x[..., :-1]},
    "initial_state must have shape": {"initial_state": lambda x: x[:1]},
    "at least one step": {name: (lambda x: x[:, :0]) for name in ("v", "k", "q", "log_decay")},
    "groups must divide heads": {name: (lambda x: x[:, :, :, :1].expand(-1, -1, -1, 3, -1)) for name in ("k", "q")},
    "never be positive": {"log_decay": lambda x: -x},
    "must be on": {"initial_state": lambda x: x.to("meta")},
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("message", BAD)
def test_bad_input_says_what_was_expected_and_what_came(message):
    inputs = make_inputs()
    for name, change in BAD[message].items():
        inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=f"scan: .*{message}.*got"):
        scan(**inputs)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "dtype"), [("v", torch.int64), ("k", torch.float32), ("log_decay", torch.float32), ("q", torch.float16)]
)
def test_wrong_dtypes_are_type_errors(name, dtype):
    inputs = make_inputs()
    inputs[name] = inputs[name].to(dtype)
    with pytest.raises(TypeError, match=r"scan: .* must .*, got torch"):
        scan(**inputs)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 5, 5, 13], "strictly increasing"),
        ([0, 8, 5, 13], "strictly increasing"),
        ([0, 5, 12], "from 0 to t = 13"),
        ([1, 5, 13], "from 0 to t = 13"),
        ([0], "shape"),
        ([[0, 13]], "shape"),
    ],
)
def test_bad_boundaries_are_rejected(bounds, message):
    inputs = make_inputs(b=1)
    del inputs["initial_state"]
    with pytest.raises(ValueError, match=message):
        scan(**inputs, cu_seqlens=torch.tensor(bounds))


@pytest.mark.usefixtures("unchecked")
def test_boundaries_need_a_batch_of_one_and_integers():
    inputs = make_inputs(b=2)
    del inputs["initial_state"]
    with pytest.raises(ValueError, match="batch of 1, got 2"):
        scan(**inputs, cu_seqlens=torch.tensor([0, 13]))
    with pytest.raises(TypeError, match="int32 or int64"):
        scan(**{name: x[:1] for name, x in inputs.items()}, cu_seqlens=torch.tensor([0.0, 13.0]))


def test_a_wrong_result_would_be_seen():
    """The measure itself: one entry off by a thousandth fails the comparison, a NaN too."""
    results = run(make_inputs(), SsdPath())
    wrong = results["y"].clone()
    wrong.view(-1)[3] += 1e-3
    assert relative_error(wrong, results["y"]) > FLOOR[torch.float32]
    wrong.view(-1)[3] = float("nan")
    assert relative_error(wrong, results["y"]) == float("inf")
