"""Mamba-3's trapezoidal rule, on either pathway of any algorithm, is its recurrence."""

import pytest
import torch

from anymamba import SsdPath, rotated_trapezoid_scan, trapezoid_scan
from tests.scan.cases import ALGORITHMS
from tests.support import FLOOR, assert_all_near, assert_near

D = torch.float64
NAMES = ("v", "k", "q", "log_decay", "gamma", "kappa", "initial_state", "previous_v", "previous_k")


def make(b=2, t=11, r=2, h=4, g=2, p=3, n=5, rows=None):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=D)

    rows = rows or b
    values = normal(b, t, r, h, p), normal(b, t, r, g, n), normal(b, t, r, g, n)
    weights = -normal(b, t, h).abs(), normal(b, t, h).abs(), normal(b, t, h).abs()
    before = normal(rows, h, p, n), normal(rows, r, h, p), normal(rows, r, g, n)
    return dict(zip(NAMES, (*values, *weights, *before), strict=True))


def recurrence(v, k, q, log_decay, gamma, kappa, initial_state, previous_v, previous_k):
    """Compute the formula step by step."""
    heads = v.shape[3] // k.shape[3]
    k, q, previous_k = (x.repeat_interleave(heads, dim=-2) for x in (k, q, previous_k))
    state, before, ys = initial_state, torch.einsum("zrhp,zrhn->zhpn", previous_v, previous_k), []
    for t in range(v.shape[1]):
        alpha, now_weight, last_weight = (x[:, t, :, None, None] for x in (torch.exp(log_decay), gamma, kappa))
        now = torch.einsum("brhp,brhn->bhpn", v[:, t], k[:, t])
        state, before = alpha * (state + last_weight * before) + now_weight * now, now
        ys.append(torch.einsum("bhpn,brhn->brhp", state, q[:, t]))
    return torch.stack(ys, 1), state


def run(function, inputs):
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    y, state = function(**leaves)
    generator = torch.Generator().manual_seed(1)
    heads = [torch.randn(x.shape, generator=generator, dtype=D) for x in (y, state)]
    grads = torch.autograd.grad([y, state], list(leaves.values()), heads)
    named = {f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"y": y.detach(), "state": state.detach(), **named}


@pytest.mark.parametrize("pathway", ["single", "double"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("sizes", [{}, {"r": 1, "g": 4}, {"t": 1}], ids=["mimo", "siso", "one step"])
def test_it_is_the_recurrence_in_values_and_gradients(sizes, algorithm, pathway):
    inputs, path = make(**sizes), SsdPath(algorithm, 4, pathway)
    actual = run(lambda **x: trapezoid_scan(**x, path=path), inputs)
    assert_all_near(actual, run(recurrence, inputs), FLOOR[D])


@pytest.mark.parametrize("pathway", ["single", "double"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_packed_sequences_are_separate_ones(algorithm, pathway):
    bounds, inputs = [0, 1, 4, 11], make(b=1, rows=3)
    path = SsdPath(algorithm, 4, pathway)
    y, state = trapezoid_scan(**inputs, path=path, cu_seqlens=torch.tensor(bounds))
    for z in range(3):
        alone = {n: x[z : z + 1] if n in NAMES[6:] else x[:, bounds[z] : bounds[z + 1]] for n, x in inputs.items()}
        y_alone, state_alone = recurrence(**alone)
        assert_all_near(
            {"y": y[:, bounds[z] : bounds[z + 1]], "state": state[z : z + 1]},
            {"y": y_alone, "state": state_alone},
            FLOOR[D],
        )


@pytest.mark.parametrize("pathway", ["single", "double"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("r", [1, 2])
def test_a_state_may_be_forgotten_at_once(r, algorithm, pathway):
    """A log-decay of -inf, at a first token, at a last one, and at the edge of a chunk."""
    inputs = make(r=r)
    inputs["log_decay"][:, [0, 3, 4, 7, 10], 1:] = -torch.inf
    path = SsdPath(algorithm, 4, pathway)
    actual = run(lambda **x: trapezoid_scan(**x, path=path), inputs)
    assert_all_near(actual, run(recurrence, inputs), FLOOR[D])


def make_ranks(inputs):
    """Return values of all ranks as multiples of the first, as a block makes them; the multiples (h, r, p)."""
    r, h, p = inputs["v"].shape[2:]
    weight_hrp = torch.randn(h, r, p, generator=torch.Generator().manual_seed(2), dtype=D)
    weight_hrp[:, 0] = 1
    for name in ("v", "previous_v"):
        inputs[name] = inputs[name][..., :1, :, :] * weight_hrp.transpose(0, 1)
    return weight_hrp


def run_rotated(inputs, weight_hrp, path):
    """Compute the same with `rotated_trapezoid_scan`, which the kernels fuse, without biases, rotation and skip."""
    rows, r, h, p = inputs["previous_v"].shape
    b, t, _, g, n = inputs["k"].shape
    dtype, acc_dtype = inputs["v"].dtype, inputs["log_decay"].dtype
    no_bias = torch.zeros(h, r, n, dtype=acc_dtype)
    y, state, _, _ = rotated_trapezoid_scan(
        inputs["v"][:, :, 0],
        inputs["k"],
        inputs["q"],
        no_bias,
        no_bias,
        torch.zeros(b, t, 0, dtype=acc_dtype),
        *(inputs[name].clone() for name in ("gamma", "log_decay", "gamma", "kappa")),
        torch.zeros(h, dtype=acc_dtype),
        weight_hrp.to(acc_dtype),
        initial_state=inputs["initial_state"],
        previous_k=inputs["previous_k"].repeat_interleave(h // g, dim=2).to(dtype),
        previous_x=inputs["previous_v"][:, 0],
        initial_rotation=torch.zeros(rows, h, 0, dtype=acc_dtype),
        path=path,
    )
    return y, state


def run_in(dtype, inputs, path):
    """Run both scans in a dtype, and the definition in float64 on the same numbers; return outputs and states."""
    acc_dtype, weight_hrp = torch.float32, make_ranks(inputs)
    activations = ("v", "k", "q", "previous_v", "previous_k")
    cast = {name: x.to(dtype if name in activations else acc_dtype) for name, x in inputs.items()}
    results = {"trapezoid": trapezoid_scan(**cast, path=path), "rotated": run_rotated(cast, weight_hrp, path)}
    return results, recurrence(**{name: x.to(D) for name, x in cast.items()})


@pytest.mark.parametrize("pathway", ["single", "double"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("ratio", [1e2, 1e6])
@pytest.mark.parametrize("r", [1, 2])
def test_weights_of_any_ratio_do_not_cancel(r, ratio, dtype, algorithm, pathway):
    """Every other token forgets the past, so that its output is its own term, small as that is next to kappa."""
    inputs = make(r=r)
    inputs["gamma"] = inputs["gamma"] / ratio
    inputs["log_decay"][:, ::2] = -60.0
    results, (expected_y, expected_state) = run_in(dtype, inputs, SsdPath(algorithm, 4, pathway))
    for name, (y, state) in results.items():
        for start in (0, 1):  # outputs that forget and those that do not differ in size by the ratio
            assert_near(y[:, start::2], expected_y[:, start::2], FLOOR[dtype], f"{name}: y from {start}")
        assert_near(state, expected_state, FLOOR[dtype], f"{name}: state")


@pytest.mark.parametrize("pathway", ["single", "double"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("r", [1, 2])
def test_float16_holds_neither_the_weights_nor_an_undecayed_state(r, algorithm, pathway):
    """Weights and states beyond the range of float16, which decays bring back into it, and tiny decays."""
    inputs = make(r=r)
    inputs["initial_state"] *= 1e6
    inputs["kappa"] *= 1e5
    inputs["log_decay"] = inputs["log_decay"] - 14.0
    results, (expected_y, expected_state) = run_in(torch.float16, inputs, SsdPath(algorithm, 4, pathway))
    assert expected_y.abs().max() < 1000
    for name, (y, state) in results.items():
        assert_near(y, expected_y, FLOOR[torch.float16], f"{name}: y")
        assert_near(state, expected_state, FLOOR[torch.float16], f"{name}: state")


@pytest.mark.usefixtures("unchecked")
def test_bad_input_says_what_was_expected_and_what_came():
    inputs = make()
    with pytest.raises(ValueError, match=r"trapezoid_scan: gamma must have shape \(b=2, t=11, h=4\), got \(2, 11, 3\)"):
        trapezoid_scan(**{**inputs, "gamma": inputs["gamma"][..., :3]})
    with pytest.raises(ValueError, match="previous_v and previous_k must be given both or neither"):
        trapezoid_scan(**{**inputs, "previous_v": None})
    with pytest.raises(ValueError, match="log_decay must never be positive"):
        trapezoid_scan(**{**inputs, "log_decay": -inputs["log_decay"]})
