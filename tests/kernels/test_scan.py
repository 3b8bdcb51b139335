"""The compiled scan, beyond the matrix of tests/scan that it shares with the portable algorithms."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from anymamba.kernels.cpu import bindings
from anymamba.scan import SsdPath, scan, ssd
from tests.scan.cases import HAS_KERNELS, make_inputs, run
from tests.support import FLOOR, assert_all_near, assert_near, in_another_process, relative_error

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason=bindings.LIBRARY.reason)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("r", [1, 4])
@pytest.mark.parametrize(
    ("t", "h", "p", "g", "n"),
    [
        (1, 1, 1, 1, 1),
        (3, 2, 17, 2, 63),
        (17, 6, 3, 2, 130),
        (63, 5, 1, 1, 3),
        (65, 4, 65, 4, 17),
        (130, 12, 16, 1, 16),
        (130, 10, 63, 2, 1),
    ],
)
def test_awkward_sizes_equal_the_recurrence(t, h, p, g, n, r):
    inputs = make_inputs(t=t, r=r, h=h, p=p, g=g, n=n, decay=0.2)
    oracle = run(inputs, SsdPath.recurrent())
    assert_all_near(run(inputs, SsdPath.fused()), oracle, FLOOR[torch.float64])
    single = run({name: x.float() for name, x in inputs.items()}, SsdPath.fused())
    assert_all_near(single, oracle, FLOOR[torch.float32])


@pytest.mark.parametrize("r", [1, 2])
def test_float32_is_as_precise_as_the_portable_path(r):
    inputs = make_inputs(t=300, r=r, h=8, p=32, g=2, n=48, decay=0.1, dtype=torch.float32)
    oracle = run({name: x.double() for name, x in inputs.items()}, SsdPath.recurrent())
    fused, portable = run(inputs, SsdPath.fused()), run(inputs, SsdPath.serial_recalculated())
    for name, expected in oracle.items():
        error, floor = relative_error(fused[name], expected), relative_error(portable[name], expected)
        assert error <= 2 * floor, f"{name}: {error:.2e}, portable {floor:.2e}"


@pytest.mark.parametrize("bounds", [None, [0, 1, 2, 70, 71, 150]], ids=["batch", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_number_of_threads_moves_no_bit(threads, dtype, bounds):
    inputs = make_inputs(t=150, h=20, p=9, g=2, n=12, bounds=bounds, dtype=dtype)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(run(inputs, SsdPath.fused(), bounds))
    for other in results[1:]:
        for name in other:
            assert torch.equal(other[name], results[0][name]), name


def test_a_row_has_the_same_bits_alone_and_in_a_batch(threads):
    threads(2)
    inputs = make_inputs(b=3, t=90, h=12, p=8, g=2, n=16, dtype=torch.float32)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    y, final_state = scan(**leaves, path=SsdPath.fused())
    grads = torch.autograd.grad(y.square().sum() + final_state.square().sum(), list(leaves.values()))
    for row in range(3):
        alone = {name: x[row : row + 1].clone().requires_grad_() for name, x in inputs.items()}
        y_alone, final_alone = scan(**alone, path=SsdPath.fused())
        assert torch.equal(y_alone[0], y[row])
        assert torch.equal(final_alone[0], final_state[row])
        loss = y_alone.square().sum() + final_alone.square().sum()
        for grad_alone, grad in zip(torch.autograd.grad(loss, list(alone.values())), grads, strict=True):
            assert torch.equal(grad_alone[0], grad[row])


def test_slices_of_one_wide_projection_are_read_in_place():
    wide = torch.randn(2, 70, 24 + 10 + 10 + 5)
    v, k, q, _ = wide.split([24, 10, 10, 5], dim=-1)
    v, k, q = v.unflatten(-1, (1, 4, 6)), k.unflatten(-1, (1, 2, 5)), q.unflatten(-1, (1, 2, 5))
    log_decay = -torch.rand(4, 70, 2).permute(2, 1, 0)
    strided = scan(v, k, q, log_decay, path=SsdPath.fused())
    dense = scan(*(x.contiguous() for x in (v, k, q, log_decay)), path=SsdPath.fused())
    assert torch.equal(strided[0], dense[0])
    assert torch.equal(strided[1], dense[1])


@pytest.mark.parametrize(("dtype", "lowest"), [(torch.float32, -69.3), (torch.float64, -690.3)], ids=str)
def test_a_decay_is_within_two_units_in_the_last_place(dtype, lowest):
    """A state of one, read after one step: the decay itself."""
    log_decay = torch.cat([torch.linspace(lowest, 0, 20_001, dtype=dtype), -torch.logspace(-9, 0, 5_000, dtype=dtype)])
    rows = len(log_decay)
    zeros, ones = torch.zeros(rows, 1, 1, 1, 1, dtype=dtype), torch.ones(rows, 1, 1, 1, 1, dtype=dtype)
    y, final_state = scan(
        zeros, zeros, ones, log_decay.view(-1, 1, 1), initial_state=ones.squeeze(1), path=SsdPath.fused()
    )
    expected = np.exp(log_decay.numpy().astype(np.longdouble))
    for decay in (y, final_state):
        error = np.abs(decay.flatten().numpy().astype(np.longdouble) - expected)
        assert (error / np.spacing(expected.astype(log_decay.numpy().dtype))).max() <= 2


@pytest.mark.parametrize("log_decay", [0.0, -1e-7, -1e8])
def test_twenty_thousand_steps_stay_finite(log_decay):
    inputs = make_inputs(b=1, t=20_000, h=2, p=4, g=1, n=4, dtype=torch.float32)
    inputs["log_decay"].fill_(log_decay)
    for name, x in run(inputs, SsdPath.fused()).items():
        assert torch.isfinite(x).all(), name


def test_a_nan_stays_in_its_row_and_shows():
    inputs = make_inputs(b=2, t=40, dtype=torch.float32)
    inputs["log_decay"][1, 20, 0] = float("nan")
    y, final_state = torch.ops.anymamba.scan(*inputs.values(), None, 16, "fused")
    assert torch.isfinite(y[0]).all()
    assert torch.isfinite(y[1, :16]).all()
    assert torch.isnan(y[1, 20:, :, 0]).all()
    assert torch.isnan(final_state[1, 0]).all()


def test_denormals_survive_outside_of_the_kernels(threads):
    threads(2)
    run(make_inputs(t=70, h=8, dtype=torch.float32), SsdPath.fused())
    tiny = torch.full((100_000,), 1e-40)
    assert (tiny * 1.0 > 0).all()


@pytest.mark.parametrize("bounds", [[0, 5, 14], [1, 13], [0, 8, 5, 13], [-1, 13]])
def test_wrong_boundaries_are_rejected_before_they_reach_memory(bounds):
    inputs = make_inputs(b=1)
    inputs["initial_state"] = inputs["initial_state"].expand(len(bounds) - 1, -1, -1, -1)
    with pytest.raises(ValueError, match="must increase strictly from 0 to t = 13"):
        torch.ops.anymamba.scan(*inputs.values(), torch.tensor(bounds), 4, "fused")


def test_several_python_threads_may_call_at_once(threads):
    threads(2)
    inputs = make_inputs(t=70, h=8, dtype=torch.float32)
    expected = run(inputs, SsdPath.fused())
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(lambda _: run(inputs, SsdPath.fused()), range(12)):
            for name, x in results.items():
                assert torch.equal(x, expected[name]), name


COMPARE = """
import torch
from anymamba.kernels.cpu import bindings
from anymamba.scan import SsdPath
from tests.scan.cases import make_inputs, run
from tests.support import FLOOR, assert_all_near
for dtype in (torch.float64, torch.float32):
    inputs = make_inputs(t=70, r=2, h=6, p=17, g=2, n=19, dtype=dtype)
    oracle = run({name: x.double() for name, x in inputs.items()}, SsdPath.recurrent())
    assert_all_near(run(inputs, SsdPath.fused()), oracle, FLOOR[dtype])
print(bindings.LIBRARY.isa)
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_smaller_instruction_sets_agree(isa):
    if bindings.LIBRARY.isa == "baseline" and isa != "baseline":
        pytest.skip("this processor has no AVX2")
    if bindings.LIBRARY.isa == "wide":
        pytest.skip("a build of one instruction set")
    assert in_another_process(COMPARE, ANYMAMBA_ISA=isa) == isa


def test_kernels_can_be_switched_off():
    code = """
from anymamba.scan import SsdPath, scan
from tests.scan.cases import make_inputs
scan(**make_inputs())
try:
    scan(**make_inputs(), path=SsdPath.fused())
except RuntimeError as error:
    print(error)
"""
    assert "switched off by ANYMAMBA_KERNELS=off" in in_another_process(code, ANYMAMBA_KERNELS="off")


def test_a_forked_process_computes():
    code = """
import os, torch
from anymamba.scan import SsdPath
from tests.scan.cases import make_inputs, run
torch.set_num_threads(2)
inputs = make_inputs(t=40, h=8)
expected = run(inputs, SsdPath.fused())["y"]
child = os.fork()
if child == 0:
    y, _ = torch.ops.anymamba.scan(*inputs.values(), None, 64, "fused")
    os._exit(0 if torch.equal(y, expected) else 1)
print(os.waitpid(child, 0)[1])
"""
    assert in_another_process(code) == "0"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bounds", [None, [0, 1, 50, 90]], ids=["batch", "packed"])
@pytest.mark.parametrize("skip", [None, (6,), (6, 5)], ids=["no skip", "skip per head", "skip per channel"])
def test_ssd_with_scale_and_skip_inside_equals_the_recurrence(skip, bounds, dtype):
    generator = torch.Generator().manual_seed(0)
    b, wide = 1 if bounds else 2, torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    x, B, C = normal(b, 90, 6, 5), normal(b, 90, 2, 7), normal(b, 90, 2, 7)
    state = normal(3 if bounds else b, 6, 5, 7, dtype=wide)
    dt, A = normal(b, 90, 6, dtype=wide).detach().abs().requires_grad_(), normal(6, dtype=wide)
    A = (-A.detach().abs()).requires_grad_()
    D = None if skip is None else normal(*skip, dtype=wide)
    tensors = [x, dt, A, B, C, state, *([] if D is None else [D])]
    heads = [normal(*x.shape), normal(*state.shape, dtype=wide)]
    cu_seqlens = None if bounds is None else torch.tensor(bounds)

    def run_ssd(tensors, heads, path):
        x, dt, A, B, C, state, *D = leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        y, final_state = ssd(x, dt, A, B, C, *D, initial_state=state, path=path, cu_seqlens=cu_seqlens)
        return [y, final_state, *torch.autograd.grad([y, final_state], leaves, heads)]

    oracle = run_ssd([x.double() for x in tensors], [x.double() for x in heads], SsdPath.recurrent())
    for tensor, actual, expected in zip([x, state, *tensors], run_ssd(tensors, heads, None), oracle, strict=True):
        assert actual.dtype == tensor.dtype
        assert_near(actual, expected, FLOOR[dtype])
