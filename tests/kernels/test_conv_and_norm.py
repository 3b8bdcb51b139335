"""The compiled convolution and norm, beyond the tests of tests/blocks that they share with the portable code."""

import pytest
import torch

from anymamba.blocks.layers import CausalConv, GatedRMSNorm
from anymamba.core.registry import kernels_off
from anymamba.kernels.cpu import bindings
from tests.support import FLOOR, assert_near

pytestmark = pytest.mark.skipif(bindings.LIBRARY.handle is None, reason=bindings.LIBRARY.reason)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def run_conv(dtype, b=2, t=70, v=37, w=4, bounds=None, lengths=None, parameters=None):
    """Return everything that the convolution computes on a slice of a wider tensor, by name."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(b, t, v + 5, generator=generator).to(dtype)
    rows = b if bounds is None else len(bounds) - 1
    window = torch.randn(rows, v, w, generator=generator).to(dtype).requires_grad_()
    conv = CausalConv(v, w, dtype=dtype)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = wide.requires_grad_()
    out, new_window = conv(
        x[..., 2 : 2 + v],
        window,
        lengths=None if lengths is None else torch.tensor(lengths),
        cu_seqlens=None if bounds is None else torch.tensor(bounds),
    )
    heads = [torch.randn(y.shape, generator=generator).to(dtype) for y in (out, new_window)]
    grads = torch.autograd.grad([out, new_window], [x, window, *conv.parameters()], heads)
    return dict(zip(("out", "new_window", "dx", "dwindow", "dweight", "dbias"), (out, new_window, *grads), strict=True))


def run_norm(dtype, rows=70, channels=48, group_size=12, norm_before_gate=False):
    """Return everything that the norm computes, by name; z is a slice of a wider tensor."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, channels, generator=generator).to(dtype).requires_grad_()
    z = torch.randn(rows, channels + 3, generator=generator).to(dtype).requires_grad_()
    norm = GatedRMSNorm(channels, group_size=group_size, norm_before_gate=norm_before_gate, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(channels, generator=generator))
    y = norm(x, z[:, 1 : channels + 1])
    head = torch.randn(y.shape, generator=generator).to(dtype)
    return dict(zip(("y", "dx", "dz", "dweight"), (y, *torch.autograd.grad(y, [x, z, norm.weight], head)), strict=True))


CONV = {
    "batch": {},
    "one channel": {"v": 1, "t": 3},
    "width 1": {"w": 1},
    "width 7": {"w": 7, "t": 33},
    "packed": {"b": 1, "bounds": [0, 1, 2, 40, 70]},
    "padded": {"lengths": [0, 33]},
}
NORM = {
    "gate first": {},
    "norm first": {"norm_before_gate": True},
    "groups of one": {"group_size": 1},
    "awkward": {"channels": 51, "group_size": 17, "rows": 3},
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def compare(run, dtype, case):
    compiled = run(dtype, **case)
    with kernels_off():
        portable = run(dtype, **case)
    for name, expected in portable.items():
        assert_near(compiled[name], expected, FLOOR[dtype], name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CONV.values(), ids=CONV)
def test_the_compiled_convolution_equals_the_portable_one(case, dtype):
    compare(run_conv, dtype, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", NORM.values(), ids=NORM)
def test_the_compiled_norm_equals_the_portable_one(case, dtype):
    compare(run_norm, dtype, case)


@pytest.mark.parametrize(
    ("run", "case"),
    [(run_conv, {}), (run_conv, CONV["packed"]), (run_norm, {}), (run_norm, NORM["norm first"])],
    ids=["conv", "conv packed", "norm", "norm first"],
)
def test_the_number_of_threads_moves_no_bit(run, case, threads):
    threads(1)
    one = run(torch.float32, **case)
    for count in (2, 3):
        threads(count)
        for name, x in run(torch.float32, **case).items():
            assert torch.equal(x, one[name]), name
