"""Every operator in Triton's interpreter, against float64; tests/scan, tests/ops and tests/blocks run on it as well."""

import importlib

import pytest
import torch

from anymamba import kernels
from anymamba.core import registry
from anymamba.core.operators import OPERATORS, gradients
from anymamba.kernels.triton import _MODULES
from anymamba.scan import scan, selective_scan, ssd
from tests.support import FLOOR, assert_near

pytestmark = pytest.mark.interpreted
CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def kernel_of(operator):
    """Return an operator in Triton."""
    return importlib.import_module(f"anymamba.kernels.triton.{_MODULES[operator]}").KERNELS[operator]


def as_list(outputs):
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def in_float64(inputs):
    """Return the inputs with float64 in place of every floating-point tensor."""
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]


def compare(operator, inputs, tolerance):
    """Compare results and gradients with the portable code in float64."""
    described, kernel = OPERATORS[operator], kernel_of(operator)
    with registry.kernels_off():
        outputs = as_list(described.definition(*in_float64(inputs)))
        cotangents = [torch.randn_like(y) for y in outputs]
        grads = gradients(described.definition, tuple(cotangents), tuple(in_float64(inputs)), described.differentiable)
    actual = as_list(kernel.forward(*inputs))
    cotangents = [dy.to(y.dtype) for dy, y in zip(cotangents, actual, strict=True)]
    actual += as_list(kernel.backward(*cotangents, *inputs))
    names = [*described.results, *(f"d{name}" for name in described.names[: described.differentiable])]
    for name, x, expected in zip(names, actual, [*outputs, *grads], strict=True):
        if expected.numel():
            assert_near(x, expected, tolerance, name)


@pytest.mark.parametrize("operator", _MODULES)
def test_an_operator_runs_on_triton_here(operator):
    inputs = kernel_of(operator).examples(CPU, torch.float32)
    first = registry._IMPLEMENTATIONS[operator, "cpu"][0]
    assert first.library == "triton"
    assert registry.find_kernel(operator, *inputs) is first.implementation
    assert kernels.missing_kernel(operator, *inputs) == ""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", _MODULES)
def test_values_and_gradients_equal_the_portable_code_in_float64(operator, dtype):
    compare(operator, kernel_of(operator).examples(CPU, dtype), FLOOR[dtype])


def draw(b, t, r, h, p, g, n):
    """Draw the inputs of a scan in float32."""
    return [
        *(torch.randn(b, t, r, heads, size) for heads, size in ((h, p), (g, n), (g, n))),
        -torch.rand(b, t, h),
        torch.randn(b, h, p, n),
        None,
    ]


# More than one tile of p and of n, more heads of a group than a slice has, ranks that do not divide a chunk.
@pytest.mark.parametrize("sizes", [(1, 5, 1, 9, 3, 1, 5), (1, 30, 3, 1, 66, 1, 70)], ids=["slices", "tiles"])
def test_sums_over_parts_are_complete(sizes):
    compare("scan", (*draw(*sizes), None, "fastest"), FLOOR[torch.float32])


def run(function, tensors, **options):
    """Return results and gradients of a loss on them, as a list."""
    leaves = [None if x is None else x.clone().requires_grad_() for x in tensors]
    y, state = function(*leaves[:-1], initial_state=leaves[-1], **options)
    grads = torch.autograd.grad(y.sum() + 2 * state.sum(), [x for x in leaves if x is not None])
    return [y, state, *grads]


def scan_case(b):
    *tensors, _ = draw(b, 70, 1, 2, 5, 1, 6)
    return scan, tensors, range(4)


def ssd_case(b):
    x, dt, keys, states = torch.randn(b, 70, 2, 5), torch.rand(b, 70, 2), torch.randn(2, b, 70, 1, 6), (b, 2, 5, 6)
    return ssd, [x, dt, -torch.rand(2), *keys, None, torch.randn(states)], (0, 1, 3, 4)


def selective_case(b):
    tokens, keys = torch.randn(3, b, 70, 6), torch.randn(2, b, 70, 5)
    tensors = [tokens[0], tokens[1], -torch.rand(6, 5), *keys, torch.randn(6), tokens[2], torch.randn(b, 6, 5)]
    return selective_scan, tensors, (0, 1, 3, 4, 6)


@pytest.mark.parametrize("case", [scan_case, ssd_case, selective_case])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_packed(case):
    """But for the gradients of parameters, which are sums over rows."""
    function, tensors, by_token = case(2)
    together = run(function, tensors)
    rows = {*by_token, len(tensors) - 1}
    alone = run(function, [x[:1] if i in rows else x for i, x in enumerate(tensors)])
    packed = [x.flatten(0, 1)[None, :105] if i in by_token else x for i, x in enumerate(tensors)]
    packed = run(function, packed, cu_seqlens=torch.tensor([0, 70, 105]))
    kept = [i for i, x in enumerate(tensors) if x is not None]
    for place, x in enumerate(together):
        index = kept[place - 2] if place > 1 else None
        if place == 1 or index == len(tensors) - 1:  # states, by row
            assert torch.equal(x[:1], alone[place])
            assert torch.equal(x[0], packed[place][0])
        elif place == 0 or index in by_token:
            assert torch.equal(x[:1], alone[place])
            assert torch.equal(x[:1], packed[place][:, :70])
