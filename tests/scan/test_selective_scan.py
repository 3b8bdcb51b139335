"""Mamba-1's scan: every algorithm against the definition, values and gradients, and its entry points."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anymamba import SsdPath, selective_scan
from tests.scan.cases import HAS_KERNELS
from tests.support import FLOOR, assert_all_near, assert_near

BY_HAND = ("serial_recalculated", *(["fused"] if HAS_KERNELS else []))
NAMES = ("x", "dt", "A", "B", "C", "D", "z", "initial_state")


def make_inputs(b=2, t=11, i=6, n=5, bounds=None, dtype=torch.float64, scale=1.0, seed=0):
    """Draw inputs far from any special value; `scale` is that of the step sizes before their softplus."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    b, rows = (1, len(bounds) - 1) if bounds else (b, b)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "x": normal(b, t, i).to(dtype),
        "dt": (scale * normal(b, t, i)).to(wide),
        "A": -normal(i, n).exp().to(wide),
        "B": normal(b, t, n).to(dtype),
        "C": normal(b, t, n).to(dtype),
        "D": normal(i).to(wide),
        "z": normal(b, t, i).to(dtype),
        "initial_state": normal(rows, i, n).to(wide),
    }


def run(inputs, path, bounds=None):
    """Return both results, and the gradients of all inputs under a loss on both."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    y, final = selective_scan(**leaves, path=path, cu_seqlens=cu_seqlens)
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (o * torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype)).sum() for o in (y, final)
    )
    grads = torch.autograd.grad(loss, list(leaves.values()))
    named = {f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"y": y.detach(), "final_state": final.detach(), **named}


def by_definition(x, dt, A, B, C, D, z, initial_state):
    """Compute the formula number by number."""
    b, t, i = x.shape
    y, state = torch.zeros_like(x), initial_state.clone()
    for row in range(b):
        for step in range(t):
            for channel in range(i):
                size = torch.log1p(dt[row, step, channel].exp())
                for n in range(A.shape[1]):
                    kept = torch.exp(size * A[channel, n]) * state[row, channel, n]
                    state[row, channel, n] = kept + size * x[row, step, channel] * B[row, step, n]
                read = (state[row, channel] * C[row, step]).sum() + D[channel] * x[row, step, channel]
                gate = z[row, step, channel]
                y[row, step, channel] = read * gate / (1 + torch.exp(-gate))
    return y, state


@pytest.mark.parametrize("algorithm", ["recurrent", *BY_HAND])
def test_the_formula(algorithm):
    inputs = make_inputs(t=4)
    expected = dict(zip(("y", "state"), by_definition(**inputs), strict=True))
    actual = dict(zip(("y", "state"), selective_scan(**inputs, path=SsdPath(algorithm)), strict=True))
    assert_all_near(actual, expected, FLOOR[torch.float64])


@settings(max_examples=60)
@given(data=st.data())
def test_all_algorithms_agree_on_values_and_gradients(data):
    sizes = {
        "b": data.draw(st.integers(1, 3), label="b"),
        "t": data.draw(st.integers(1, 70), label="t"),
        "i": data.draw(st.sampled_from([1, 3, 8, 31, 32, 33, 70]), label="i"),
        "n": data.draw(st.sampled_from([1, 3, 8, 16]), label="n"),
    }
    bounds = None
    if data.draw(st.booleans(), label="packed"):
        cuts = data.draw(st.sets(st.integers(1, max(1, sizes["t"] - 1)), max_size=4), label="cuts")
        bounds = [0, *sorted(cut for cut in cuts if cut < sizes["t"]), sizes["t"]]
    inputs = make_inputs(**sizes, bounds=bounds, scale=data.draw(st.sampled_from([0.1, 1.0, 5.0]), label="scale"))
    dropped = data.draw(st.sets(st.sampled_from(["D", "z", "initial_state"])), label="dropped")
    inputs = {name: x for name, x in inputs.items() if name not in dropped}
    expected = run(inputs, SsdPath.recurrent(), bounds)
    for algorithm in BY_HAND:
        chunk_len = data.draw(st.sampled_from([None, 1, 4, 100]), label="chunk_len")
        assert_all_near(run(inputs, SsdPath(algorithm, chunk_len), bounds), expected, FLOOR[torch.float64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("algorithm", BY_HAND)
def test_narrow_dtypes_compute_in_float32(algorithm, dtype):
    inputs = make_inputs(t=100, i=20, n=16, dtype=dtype)
    results = run(inputs, SsdPath(algorithm))
    expected = run({name: x.double() for name, x in inputs.items()}, SsdPath.recurrent())
    assert results["y"].dtype == dtype
    assert results["final_state"].dtype == torch.float32
    assert_all_near(results, expected, 4 * FLOOR[dtype])
    assert_all_near({"s": results["final_state"]}, {"s": expected["final_state"]}, FLOOR[torch.float32])


@pytest.mark.parametrize("algorithm", BY_HAND)
def test_no_step_leaves_the_state_and_takes_no_gradient(algorithm):
    inputs = make_inputs()
    inputs["dt"][:, 4:] = -torch.inf
    results = run(inputs, SsdPath(algorithm))
    shorter = {name: x[:, :4] if x.ndim == 3 and name != "initial_state" else x for name, x in inputs.items()}
    _, state = selective_scan(**shorter, path=SsdPath(algorithm))
    assert_near(results["final_state"], state, FLOOR[torch.float64])
    assert (results["grad of dt"][:, 4:] == 0).all()


@pytest.mark.parametrize("algorithm", BY_HAND)
def test_hard_resets_and_long_memories_stay_finite(algorithm):
    inputs = make_inputs(b=1, t=200, dtype=torch.float32)
    inputs["dt"][:, ::7] = 100.0
    inputs["A"][0] = -1e6
    inputs["A"][1] = -1e-9
    expected = run({name: x.double() for name, x in inputs.items()}, SsdPath.recurrent())
    results = run(inputs, SsdPath(algorithm))
    assert all(torch.isfinite(x).all() for x in results.values())
    assert_all_near({"y": results["y"]}, {"y": expected["y"]}, 10 * FLOOR[torch.float32])


@pytest.mark.parametrize("algorithm", BY_HAND)
def test_gradcheck(algorithm):
    inputs = {name: x.requires_grad_() for name, x in make_inputs(b=1, t=4, i=2, n=2).items()}

    def call(*tensors):
        return selective_scan(**dict(zip(NAMES, tensors, strict=True)), path=SsdPath(algorithm))

    assert torch.autograd.gradcheck(call, tuple(inputs[name] for name in NAMES))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads_or_the_batch(threads):
    inputs = make_inputs(b=3, t=50, i=70, n=16, dtype=torch.float32)
    whole = run(inputs, SsdPath())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        again = run(inputs, SsdPath())
        alone = {n: x[:1] if n not in ("A", "D") else x for n, x in inputs.items()}
        first, _ = selective_scan(**alone)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(again[name], whole[name]) for name in whole)
    assert torch.equal(first, whole["y"][:1])


@pytest.mark.parametrize("algorithm", ["recurrent", *BY_HAND])
def test_an_empty_batch_is_an_empty_result(algorithm):
    results = run(make_inputs(b=0), SsdPath(algorithm))
    assert results["y"].shape == (0, 11, 6)
    assert (results["grad of A"] == 0).all()


def test_the_portable_backward_keeps_no_state_of_every_step():
    """Sizes at which a block of one step alone would fill a CPU's cache."""
    inputs = make_inputs(b=1, t=100, i=2**14, n=16, dtype=torch.float32)
    kept = []
    original = torch.Tensor.clone

    def watch_states(x, *arguments, **keywords):
        if x.shape == inputs["initial_state"].shape:
            kept.append(x)
        return original(x, *arguments, **keywords)

    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    y, _ = selective_scan(**leaves, path=SsdPath.serial_recalculated())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", watch_states)
        y.sum().backward()
    assert 0 < len(kept) <= 10


def test_strides_do_not_matter():
    inputs = make_inputs(i=8)
    both = torch.cat([inputs["x"], inputs["z"]], -1)
    apart = dict(zip(("x", "z"), both.chunk(2, -1), strict=True))
    transposed = {"dt": inputs["dt"].transpose(0, 1).contiguous().transpose(0, 1)}
    for algorithm in BY_HAND:
        expected, actual = (run(i, SsdPath(algorithm)) for i in (inputs, {**inputs, **apart, **transposed}))
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("algorithm", ["minimal", "serial"])
def test_matrix_products_do_not_compute_it(algorithm):
    with pytest.raises(ValueError, match="no matrix product, got"):
        selective_scan(**make_inputs(), path=SsdPath(algorithm))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"dt": torch.zeros(2, 11, 7, dtype=torch.float64)}, ValueError, r"dt must have shape \(b=2, t=11, i=6\)"),
        ({"A": torch.ones(6, 5, dtype=torch.float64)}, ValueError, "A must never be positive, got up to 1"),
        ({"A": -torch.ones(6, 5)}, TypeError, "A must be torch.float64, got torch.float32"),
        ({"B": torch.zeros(2, 11, 4, dtype=torch.float64)}, ValueError, "B must have shape"),
        ({"C": torch.zeros(2, 11, 5)}, TypeError, "C must be torch.float64"),
        ({"dt": torch.zeros(2, 11, 6)}, TypeError, "dt must be torch.float64"),
        ({"D": torch.zeros(6, dtype=torch.int64)}, TypeError, "D must have a floating-point dtype"),
        ({"D": torch.zeros(5)}, ValueError, r"D must have shape \(i=6\)"),
        ({"z": torch.zeros(2, 10, 6, dtype=torch.float64)}, ValueError, "z must have shape"),
        ({"initial_state": torch.zeros(1, 6, 5, dtype=torch.float64)}, ValueError, "initial_state must have shape"),
        ({"initial_state": torch.zeros(2, 6, 5)}, TypeError, "initial_state must be torch.float64"),
        ({"cu_seqlens": torch.tensor([0, 11])}, ValueError, "need a batch of 1, got 2"),
        ({"dt": None}, TypeError, "dt must be a tensor, got NoneType"),
    ],
)
def test_what_does_not_fit_is_named(change, error, words, unchecked):
    with pytest.raises(error, match=words):
        selective_scan(**{**make_inputs(), **change})
