"""The kernels of a block's operators against the portable code in float64, in values and gradients.

They are called as the operators call them, so this file needs Triton's interpreter and nothing else.
"""

import importlib
import math

import pytest
import torch

from anymamba.core.operators import OPERATORS, gradients
from anymamba.kernels.triton import _MODULES
from tests.support import FLOOR, assert_near

pytestmark = pytest.mark.interpreted

DTYPES = [torch.float64, torch.float32, torch.bfloat16]  # `test_operators_in_triton.py` has float16 too


def load_kernel(operator):
    return importlib.import_module(f"anymamba.kernels.triton.{_MODULES[operator]}").KERNELS[operator]


def normal(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def padded_slice(*shape, dtype):
    """Return a tensor whose rows are parts of wider ones, as those of a projection are."""
    return normal(*shape[:-1], shape[-1] + 5, dtype=dtype)[..., 2 : 2 + shape[-1]]


def check(name, inputs, dtype, least=0.0):
    """Compare a kernel's results and gradients with the definition on the same numbers in float64."""
    operator, kernel = OPERATORS[name], load_kernel(name)
    exact = tuple(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs)
    outputs = operator.definition(*exact)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
    actual = kernel.forward(*inputs)
    actual = (actual,) if isinstance(actual, torch.Tensor) else tuple(actual)
    cotangents = tuple(normal(*y.shape, dtype=y.dtype) for y in actual)
    expected = gradients(operator.definition, tuple(x.double() for x in cotangents), exact, operator.differentiable)
    grads = kernel.backward(*cotangents, *inputs)
    grads = (grads,) if isinstance(grads, torch.Tensor) else grads
    for title, x, reference in zip(operator.results, actual, outputs, strict=True):
        assert_near(x, reference, FLOOR[dtype], f"{name}: {title}", least)
    for title, raw, x, reference in zip(operator.names, inputs, grads, expected, strict=False):
        if raw is not None:
            assert x.dtype == raw.dtype
            assert_near(x, reference, 2 * FLOOR[dtype], f"{name}: gradient of {title}", least)


CONVOLUTIONS = {
    "batch": {},
    "one step": {"t": 1},
    "shorter than the window": {"t": 2, "w": 6},
    "width 1": {"w": 1},
    "many channels": {"v": 131, "t": 3},
    "several blocks of tokens": {"t": 37},
    "no bias": {"bias": False},
    "lengths": {"b": 4, "t": 6, "lengths": [0, 2, 6, 3]},
    "packed": {"bounds": [0, 1, 3, 4, 12]},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_the_convolution_equals_the_definition(case, dtype):
    sizes = {"b": 2, "t": 9, "v": 5, "w": 4, "bias": True, "lengths": None, "bounds": None, **CONVOLUTIONS[case]}
    b, t, v, w = (sizes[name] for name in "btvw")
    bounds, lengths = (x if x is None else torch.tensor(x) for x in (sizes["bounds"], sizes["lengths"]))
    b, t = (b, t) if bounds is None else (1, int(bounds[-1]))
    rows = b if bounds is None else len(bounds) - 1
    parameters = normal(v, w, dtype=dtype), normal(v, dtype=dtype) if sizes["bias"] else None
    inputs = padded_slice(b, t, v, dtype=dtype), normal(rows, v, w, dtype=dtype), *parameters, lengths, bounds
    check("causal_conv", inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", ["first", "last", "none"])
@pytest.mark.parametrize(("shape", "group_size"), [((2, 3, 12), 12), ((70, 12), 4), ((1, 2), 2), ((2, 4, 5, 6), 3)])
def test_the_norm_equals_the_definition(shape, group_size, gate, dtype):
    z = None if gate == "none" else padded_slice(*shape, dtype=dtype)
    weight = normal(shape[-1], dtype=dtype)
    check("rms_norm", (padded_slice(*shape, dtype=dtype), z, weight, group_size, gate != "first", 1e-5), dtype)


def test_a_group_that_no_program_can_hold_is_left_to_portable_code():
    kernel = load_kernel("rms_norm")
    x = torch.zeros(1, 20000)
    assert "more than 16384 channels" in kernel.missing(x, None, x[0], 20000, True, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("b", "t", "r", "h", "p"), [(2, 3, 1, 3, 5), (1, 20, 4, 2, 70), (2, 1, 3, 1, 1)])
def test_the_gate_over_ranks_equals_the_definition(b, t, r, h, p, weighted, dtype):
    weights = [normal(h, r, p, dtype=dtype) if weighted else None for _ in range(2)]
    check("rank_gate", (normal(b, t, r, h, p, dtype=dtype), normal(b, t, h, p, dtype=dtype), *weights), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heavy", "quaternion", "lengths", "limits"),
    [
        (True, False, None, (0.0, math.inf)),
        (False, True, [7, 0, 3], (0.25, 1.5)),
        (True, True, None, (0.25, 1.5)),
        (False, False, [7, 0, 3], (0.0, math.inf)),
    ],
)
def test_discretization_equals_the_definition(heavy, quaternion, lengths, limits, dtype):
    raw = [padded_slice(3, 7, width, dtype=dtype) for width in (5, 5, 5, 6)]
    lengths = None if lengths is None else torch.tensor(lengths)
    bias = normal(5, dtype=dtype)
    check("discretize", (*raw, bias, heavy, 0.5, *limits, 1.5, quaternion, lengths), dtype)
    check("step_sizes", (raw[0], bias, *limits, lengths), dtype)


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 0.4, 0.6, 30.0, 1e4])
def test_discretization_is_exact_for_tiny_and_huge_numbers(scale):
    raw = [scale * normal(1, 4, width, dtype=torch.float32) for width in (5, 5, 5, 6)]
    bias = torch.zeros(5)
    for quaternion in (False, True):
        check("discretize", (*raw, bias, True, 0.0, 0.0, math.inf, 1.0, quaternion, None), torch.float32, 1e-35)
    check("step_sizes", (raw[0], bias, 0.0, math.inf, None), torch.float32)


def test_a_row_has_the_same_bits_alone_in_a_batch_and_packed():
    kernel = load_kernel("causal_conv")
    x, window, weight = normal(3, 7, 5), normal(3, 5, 4), normal(5, 4)
    together = kernel.forward(x, window, weight, None, None, None)
    packed = kernel.forward(x.view(1, 21, 5), window, weight, None, None, torch.tensor([0, 7, 14, 21]))
    alone = [kernel.forward(x[i : i + 1], window[i : i + 1], weight, None, None, None) for i in range(3)]
    for i in range(2):
        assert torch.equal(torch.cat([results[i] for results in alone]), together[i])
        assert torch.equal(packed[i].view(together[i].shape), together[i])


@pytest.mark.parametrize("name", ["causal_conv", "rms_norm", "rank_gate", "step_sizes", "discretize"])
def test_the_gradients_are_the_same_every_time(name):
    kernel = load_kernel(name)
    inputs = kernel.examples(torch.device("cpu"), torch.float32)
    outputs = kernel.forward(*inputs)
    cotangents = [torch.ones_like(y) for y in ((outputs,) if isinstance(outputs, torch.Tensor) else outputs)]
    first, second = (kernel.backward(*cotangents, *inputs) for _ in range(2))
    pairs = zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (first, second)), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
