"""Every operator, by every implementation: what torch asks of one, and what we promise of ours."""

import pytest
import torch

from anymamba import Mamba2, Mamba3, SsdPath, portable
from anymamba.core.operators import OPERATORS
from anymamba.core.registry import kernels_off, missing_kernel
from anymamba.quantization.ops import quantize_tensor
from anymamba.scan import scan
from tests.scan.cases import HAS_KERNELS, make_inputs
from tests.support import FLOOR, assert_near

LENGTHS, BOUNDS = torch.tensor([5, 2]), torch.tensor([0, 2, 5])


def normal(*shape):
    return torch.randn(shape)


def scan_inputs(b=2, z=2):
    decay = -torch.rand(b, 5, 4)
    return normal(b, 5, 1, 4, 3), normal(b, 5, 1, 2, 6), normal(b, 5, 1, 2, 6), decay, normal(z, 4, 3, 6)


def rotated_inputs(b=2, z=2, r=1, channels=2, start=None):
    keys = normal(b, 5, r, 2, 6), normal(b, 5, r, 2, 6), normal(4, r, 6), normal(4, r, 6)
    real = (torch.arange(5) < LENGTHS[:, None])[:b, :, None] if b > 1 else 1.0  # padding takes no steps
    numbers = normal(b, 5, channels), *(sign * real * torch.rand(b, 5, 4) for sign in (1, -1, 1, 1))
    weights = normal(4), normal(4, r, 3) if r > 1 else None
    return (
        normal(b, 5, 4, 3),
        *keys,
        *numbers,
        *weights,
        normal(z, 4, 3, 6),
        normal(z, 4, 2) if start is None else start,
    )


def ssd_inputs(b):
    dt = torch.rand(b, 5, 4)
    return normal(b, 5, 4, 3), dt, -dt * torch.rand(4), normal(b, 5, 2, 6), normal(b, 5, 2, 6)


def selective_inputs(b):
    return normal(b, 5, 4), normal(b, 5, 4), -torch.rand(4, 3), normal(b, 5, 3), normal(b, 5, 3)


def unit_quaternions(z=2):
    return torch.nn.functional.normalize(normal(z, 4, 1, 4), dim=-1)


# Inputs of each operator in several forms: batches, packed, padded; with and without what is optional.
EXAMPLES = {
    "scan": lambda: [
        *((*scan_inputs(), None, 2, algorithm) for algorithm in ("fastest", "minimal", "serial", "recurrent")),
        (*scan_inputs(b=1), BOUNDS, None, "fastest"),
        (*scan_inputs(b=1), BOUNDS, 2, "serial_recalculated"),
    ],
    "ssd": lambda: [
        (*ssd_inputs(2), None, normal(2, 4, 3, 6), None, None, "fastest"),
        (*ssd_inputs(1), normal(4, 3), normal(2, 4, 3, 6), BOUNDS, 2, "serial"),
    ],
    "selective_scan": lambda: [
        (*selective_inputs(2), None, None, normal(2, 4, 3), None, None, "fastest"),
        (*selective_inputs(1), normal(4), normal(1, 5, 4), normal(2, 4, 3), BOUNDS, 2, "serial_recalculated"),
    ],
    "rotated_trapezoid_scan": lambda: [
        (*rotated_inputs(), "interleaved", LENGTHS, None, 2, "fastest", "single"),
        (*rotated_inputs(b=1, r=2), "halves", None, BOUNDS, None, "serial", "double"),
        (*rotated_inputs(channels=12, start=unit_quaternions()), "quaternion", None, None, None, "fastest", "single"),
    ],
    "causal_conv": lambda: [
        (normal(2, 5, 4), normal(2, 4, 3), normal(4, 3), normal(4), LENGTHS, None),
        (normal(1, 5, 4), normal(2, 4, 3), normal(4, 3), None, None, BOUNDS),
    ],
    "rms_norm": lambda: [
        (normal(2, 5, 6), None, normal(6), 6, True, 1e-5),
        (normal(2, 5, 6), normal(2, 5, 6), normal(6), 3, False, 1e-5),
        (normal(2, 5, 6), normal(2, 5, 6), normal(6), 2, True, 1e-5),
    ],
    "quantized_linear": lambda: [
        (normal(3, 40), normal(7), *quantize_tensor(normal(7, 40), "int8")),
        (normal(70, 40), None, *quantize_tensor(normal(7, 40), "int4")),
        (normal(3, 40), None, *quantize_tensor(normal(7, 40), "bfloat16")),
    ],
    "rank_gate": lambda: [
        (normal(2, 5, 1, 4, 3), normal(2, 5, 4, 3), None, None),
        (normal(2, 5, 2, 4, 3), normal(2, 5, 4, 3), normal(4, 2, 3), normal(4, 2, 3)),
    ],
    "step_sizes": lambda: [
        (normal(2, 5, 4), normal(4), 0.0, float("inf"), None),
        (normal(2, 5, 4), normal(4), 0.5, 1.0, LENGTHS),
    ],
    "discretize": lambda: [
        (*(normal(2, 5, 4) for _ in range(3)), normal(2, 5, 2), normal(4), True, 0.1, 0.0, 1.0, 1.0, False, LENGTHS),
        (*(normal(2, 5, 4) for _ in range(3)), normal(2, 5, 12), normal(4), False, 0.1, 0.0, 1.0, 1.0, True, None),
    ],
}


def cases(name):
    torch.manual_seed(0)
    return EXAMPLES[name]()


def leaves(name, inputs):
    """Return the inputs, of which those that are differentiable require gradients."""
    count = OPERATORS[name].differentiable
    return [x.clone().requires_grad_() if i < count and x is not None else x for i, x in enumerate(inputs)]


def test_every_operator_is_here():
    assert EXAMPLES.keys() == OPERATORS.keys()


@pytest.mark.usefixtures("each_implementation", "unchecked")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_operator_passes_opcheck(name):
    for inputs in cases(name):
        torch.library.opcheck(getattr(torch.ops.anymamba, name).default, tuple(leaves(name, inputs)))


@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_implementation_returns_what_the_fake_promises(name):
    node = getattr(torch.ops.anymamba, name)
    for inputs in cases(name):
        outputs = node(*inputs)
        promised = node(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in inputs))
        pairs = [(outputs, promised)] if isinstance(outputs, torch.Tensor) else zip(outputs, promised, strict=True)
        for output, promise in pairs:
            assert (output.shape, output.dtype, output.stride()) == (promise.shape, promise.dtype, promise.stride())


def run(name, inputs, call):
    """Return outputs and gradients."""
    arguments = leaves(name, inputs)
    outputs = call(*arguments)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    generator = torch.Generator().manual_seed(1)
    heads = [torch.randn(y.shape, generator=generator) for y in outputs]
    inputs_with_grad = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, inputs_with_grad, heads, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_node_the_kernels_the_portable_code_and_the_definition_agree(name):
    """As nodes of a graph and in eager mode."""
    # The kernels round the activations of a product with integer weights to 16 bits.
    floor = 2e-4 if name == "quantized_linear" else 4 * FLOOR[torch.float32]
    for inputs in cases(name):
        with portable():
            expected = run(name, inputs, OPERATORS[name])
        for call in (OPERATORS[name], getattr(torch.ops.anymamba, name)):
            for actual, reference in zip(run(name, inputs, call), expected, strict=True):
                assert_near(actual, reference, floor, name)
            with kernels_off():
                for actual, reference in zip(run(name, inputs, call), expected, strict=True):
                    assert_near(actual, reference, 4 * FLOOR[torch.float32], name)


def nodes_of(function, *inputs):
    """Return the namespaces of the operators in a graph of a function."""
    graph = torch.fx.experimental.proxy_tensor.make_fx(function)(*inputs)
    return {node.target.namespace for node in graph.graph.nodes if hasattr(node.target, "namespace")}


@pytest.mark.parametrize("block", [Mamba2(16, d_state=8, headdim=8), Mamba3(16, d_state=8, headdim=8)], ids=["2", "3"])
def test_a_graph_holds_nodes_of_ours_and_inside_portable_none(block):
    x = torch.randn(1, 6, 16)
    with torch.no_grad():
        assert "anymamba" in nodes_of(block, x)
        with portable():
            assert nodes_of(block, x) == {"aten"}


@pytest.mark.filterwarnings("ignore")  # torch's own rules are written in what it calls deprecated
def test_second_and_forward_derivatives_are_there_inside_portable():
    block = Mamba3(8, d_state=4, headdim=4, dtype=torch.float64)
    x = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)
    with portable():
        assert torch.autograd.gradgradcheck(block, (x,), atol=1e-5)
        jacobian = torch.func.jacfwd(lambda x: block(x).sum())(x.detach())
        (expected,) = torch.autograd.grad(block(x).sum(), [x])
        assert_near(jacobian, expected, FLOOR[torch.float64])
        assert_near(torch.func.grad(lambda x: block(x).sum())(x.detach()), expected, FLOOR[torch.float64])
    with pytest.raises(NotImplementedError, match=r"has no torch.func.grad.*inside anymamba.portable"):
        torch.func.grad(lambda x: block(x).sum())(x.detach())


def test_the_switches_are_switched_back_after_an_error():
    for switch in (kernels_off, portable):
        with pytest.raises(KeyError), switch():
            raise KeyError
    inputs = cases("scan")[0]
    assert bool(missing_kernel("scan", *inputs)) is not HAS_KERNELS
    with kernels_off():
        assert missing_kernel("scan", *inputs) == "the kernels are switched off"


def test_a_path_without_a_kernel_says_so():
    inputs = make_inputs(dtype=torch.float32)
    with kernels_off(), pytest.raises(RuntimeError, match="scan: no compiled kernel: the kernels are switched off"):
        scan(**inputs, path=SsdPath.fused())
    with portable(), pytest.raises(RuntimeError, match=r"no compiled kernel inside anymamba.portable\(\)"):
        scan(**inputs, path=SsdPath.fused())
