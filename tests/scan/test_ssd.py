import pytest
import torch

from anymamba import SsdPath, ssd
from tests.scan.cases import ALGORITHMS
from tests.support import FLOOR, assert_near


def make_inputs(b=2, t=19, h=4, p=3, g=2, n=5, d=None, dtype=torch.float64):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "x": torch.randn(b, t, h, p, dtype=dtype),
        "dt": torch.rand(b, t, h, dtype=wide),
        "A": -torch.rand(h, dtype=wide) - 0.1,
        "B": torch.randn(b, t, g, n, dtype=dtype),
        "C": torch.randn(b, t, g, n, dtype=dtype),
        "D": None if d is None else torch.randn(*d, dtype=wide),
    }


def by_hand(x, dt, A, B, C, D, state):
    """Compute the recurrence with loops over batch, head and time; repeat_interleave expands groups to heads."""
    b, t, h, p = x.shape
    B, C = (m.repeat_interleave(h // B.shape[2], dim=2) for m in (B, C))
    y, state = torch.zeros_like(x), state.clone()
    for row in range(b):
        for head in range(h):
            for step in range(t):
                dt_a = dt[row, step, head]
                inner = torch.outer(x[row, step, head], B[row, step, head])
                state[row, head] = torch.exp(dt_a * A[head]) * state[row, head] + dt_a * inner
                y[row, step, head] = state[row, head] @ C[row, step, head]
                if D is not None:
                    y[row, step, head] += D[head] * x[row, step, head]
    return y, state


@pytest.mark.parametrize("d", [None, (4,), (4, 3)], ids=["no D", "D per head", "D per channel"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ssd_equals_the_formula_by_hand(algorithm, d):
    inputs = make_inputs(d=d)
    state = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    y, final_state = ssd(**inputs, initial_state=state, path=SsdPath(algorithm, 8))
    y_hand, state_hand = by_hand(**inputs, state=state)
    assert_near(y, y_hand, FLOOR[torch.float64])
    assert_near(final_state, state_hand, FLOOR[torch.float64])


@pytest.mark.parametrize("dt", [0.0, 1e-20, 1e4])
@pytest.mark.parametrize("a", [-1e-30, -1.0, -1e4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_extreme_steps_and_rates_stay_finite(algorithm, a, dt):
    inputs = make_inputs(t=80, d=(4,), dtype=torch.float32)
    inputs["dt"].fill_(dt)
    inputs["A"].fill_(a)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    y, final_state = ssd(**leaves, path=SsdPath(algorithm, 32))
    (y.sum() + final_state.sum()).backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(final_state).all()
    for name, x in leaves.items():
        assert torch.isfinite(x.grad).all(), name


def test_packed_ssd_equals_separate_sequences():
    inputs = make_inputs(b=1, t=19, d=(4,))
    y, states = ssd(**inputs, cu_seqlens=torch.tensor([0, 7, 19]))
    timed = ("x", "dt", "B", "C")
    for row, part in enumerate((slice(0, 7), slice(7, 19))):
        alone = {name: x[:, part] if name in timed else x for name, x in inputs.items()}
        y_alone, state = ssd(**alone)
        assert_near(y[:, part], y_alone, FLOOR[torch.float64])
        assert_near(states[row : row + 1], state, FLOOR[torch.float64])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": lambda x: x[0]}, r"ssd: x must have shape \(b, t, h, p\), got"),
        ({"dt": lambda x: x[..., :1]}, "ssd: dt must have shape"),
        ({"A": lambda x: x[:1]}, "ssd: A must have shape"),
        ({"B": lambda x: x[:, :3]}, "ssd: B must have shape"),
        ({"C": lambda x: x[..., :3]}, "ssd: C must have shape"),
        ({"D": lambda x: torch.ones(3)}, "ssd: D must have shape"),
        ({"dt": lambda x: x - 2}, "ssd: dt must not be negative, got down to -"),
        ({"A": lambda x: -x}, "ssd: A must never be positive, got up to"),
    ],
)
def test_bad_input_says_what_was_expected_and_what_came(change, message):
    inputs = make_inputs(d=(4,))
    for name, function in change.items():
        inputs[name] = function(inputs[name])
    with pytest.raises(ValueError, match=message):
        ssd(**inputs)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "D"])
def test_an_input_that_is_no_tensor_is_rejected(name):
    with pytest.raises(TypeError, match=f"ssd: {name} must be a tensor, got list"):
        ssd(**{**make_inputs(d=(4,)), name: [1.0, 2.0]})


def test_every_input_must_be_on_one_device(unchecked):
    x, dt, a, b = torch.randn(1, 4, 2, 3), torch.rand(1, 4, 2), -torch.rand(2), torch.randn(1, 4, 1, 5)
    with pytest.raises(ValueError, match="D must be on cpu, got meta"):
        ssd(x, dt, a, b, b, torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="cu_seqlens must be on cpu, got meta"):
        ssd(x, dt, a, b, b, cu_seqlens=torch.tensor([0, 4], device="meta"))
