"""Mamba-3's trapezoidal rule, on either pathway of any algorithm, is its recurrence."""

import pytest
import torch

from anymamba import SsdPath, trapezoid_scan
from tests.scan.cases import ALGORITHMS
from tests.support import FLOOR, assert_all_near

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
    """The formula, step by step."""
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


@pytest.mark.usefixtures("unchecked")
def test_bad_input_says_what_was_expected_and_what_came():
    inputs = make()
    with pytest.raises(ValueError, match=r"trapezoid_scan: gamma must have shape \(b=2, t=11, h=4\), got \(2, 11, 3\)"):
        trapezoid_scan(**{**inputs, "gamma": inputs["gamma"][..., :3]})
    with pytest.raises(ValueError, match="previous_v and previous_k must be given both or neither"):
        trapezoid_scan(**{**inputs, "previous_v": None})
    with pytest.raises(ValueError, match="log_decay must never be positive"):
        trapezoid_scan(**{**inputs, "log_decay": -inputs["log_decay"]})
