"""Arguments of the kernels are checked, whatever calls them: they follow shapes and dtypes into memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from anymamba import Mamba2, Mamba3, SsdPath
from anymamba.blocks.layers import CausalConv, GatedRMSNorm
from anymamba.kernels import describe_kernels
from anymamba.kernels.cpu import bindings, schema
from anymamba.ops.norms_and_gates import rank_gate
from anymamba.scan import scan
from tests.kernels.test_mamba3 import rotated_scan
from tests.scan.test_selective_scan import NAMES as SELECTIVE
from tests.scan.test_selective_scan import make_inputs as make_selective
from tests.support import assert_near

pytestmark = pytest.mark.skipif(bindings.LIBRARY.handle is None, reason=bindings.LIBRARY.reason)

BFLOAT = torch.bfloat16


def test_a_convolution_rejects_windows_that_do_not_fit():
    conv, x = CausalConv(4, 3), torch.randn(2, 5, 4)
    for window in (torch.zeros(1, 4, 3), torch.zeros(2, 4, 4)):
        with pytest.raises(ValueError, match=r"(window|weight) must have shape"):
            conv(x, window)
    with pytest.raises(TypeError, match="window must be"):
        conv(x, torch.zeros(2, 4, 3, dtype=BFLOAT))
    block = Mamba2(16, d_state=4, headdim=8)
    block.conv1d = CausalConv(block.config.conv_dim, 2)
    with pytest.raises(ValueError, match="w=4"):
        block(torch.randn(1, 3, 16))


def test_a_convolution_of_no_steps_keeps_its_window():
    conv, window = CausalConv(4, 3), torch.randn(2, 4, 3, requires_grad=True)
    out, new = conv(torch.randn(2, 0, 4), window)
    assert out.shape == (2, 0, 4)
    assert torch.equal(new, window)
    assert torch.equal(torch.autograd.grad(new, window, head := torch.randn(2, 4, 3))[0], head)


def test_many_packed_sequences_have_their_own_windows():
    conv, t = CausalConv(3, 4), 1000
    x, windows = torch.randn(1, t, 3), torch.randn(t, 3, 4)
    packed, new = conv(x, windows, cu_seqlens=torch.arange(t + 1))
    alone, alone_new = conv(x.transpose(0, 1), windows)
    assert torch.equal(packed, alone.transpose(0, 1))
    assert torch.equal(new, alone_new)


def test_the_selective_scan_rejects_what_does_not_fit():
    x, dt, a, b, c, d, z, state = (make_selective(t=5)[name] for name in SELECTIVE)

    def operator(*inputs):
        return torch.ops.anymamba.selective_scan(*inputs, None, "fused")

    for wrong in (
        (x, dt[:, :4], a, b, c, d, z, state, None),
        (x, dt, a[:3], b, c, d, z, state, None),
        (x, dt, a, b[..., :2], c, d, z, state, None),
        (x, dt, a, b, c, d[:1], z, state, None),
        (x, dt, a, b, c, d, z[:1], state, None),
        (x, dt, a, b, c, d, z, state[:1], None),
        (x, dt, a, b, c, d, z, state, torch.tensor([0, 2, 5])),
        (x[:1], dt[:1], a, b[:1], c[:1], d, z[:1], state, torch.tensor([0, 9, 5])),
    ):
        with pytest.raises(ValueError, match="must"):
            operator(*wrong)
    for wrong in ((x, dt.to(BFLOAT), a, b, c, d, z, state), (x, dt, a.float(), b, c, d, z, state)):
        with pytest.raises(TypeError, match=r"must be torch\.float64"):
            operator(*wrong, None)


def test_norm_and_gate_reject_another_dtype_or_half_the_weights():
    x = torch.randn(2, 3, 8)
    with pytest.raises(TypeError, match=r"z must be torch.float32"):
        GatedRMSNorm(8)(x, x.to(BFLOAT))
    y, z, weight = torch.randn(1, 3, 2, 4, 5), torch.randn(1, 3, 4, 5), torch.randn(4, 2, 5)
    with pytest.raises(TypeError, match=r"z must be torch.float32"):
        rank_gate(y, z.to(BFLOAT))
    with pytest.raises(ValueError, match="both or neither"):
        rank_gate(y, z, weight)


def scan_inputs(t=6, h=4, g=2):
    v, k, q = torch.randn(1, t, 1, h, 3), torch.randn(1, t, 1, g, 5), torch.randn(1, t, 1, g, 5)
    return [v, k, q, -torch.rand(1, t, h), torch.zeros(1, h, 3, 5), None, 4, "fused"]


@pytest.mark.parametrize(
    ("index", "replaced", "message"),
    [
        (1, torch.randn(1, 6, 1, 3, 5), "groups that divide"),
        (2, torch.randn(1, 5, 1, 2, 5), "q must have shape"),
        (2, torch.randn(1, 6, 1, 2, 5, dtype=BFLOAT), "q must be torch.float32"),
        (3, -torch.rand(1, 6, 2), "log_decay must have shape"),
        (3, -torch.rand(1, 6, 4, dtype=torch.float64), "log_decay must be torch.float32"),
        (4, torch.zeros(2, 4, 3, 5), "initial_state must have shape"),
        (6, 0, "at least one step"),
    ],
)
def test_the_scan_as_an_operator_rejects_what_does_not_fit(index, replaced, message):
    inputs = scan_inputs()
    inputs[index] = replaced
    with pytest.raises((ValueError, TypeError), match=message):
        torch.ops.anymamba.scan(*inputs)


def test_the_scan_as_an_operator_rejects_no_steps_and_packed_rows():
    with pytest.raises(ValueError, match="a scan has steps"):
        torch.ops.anymamba.scan(*scan_inputs(t=0))
    packed = [torch.cat([x, x]) if isinstance(x, torch.Tensor) else x for x in scan_inputs()]
    packed[5] = torch.tensor([0, 2, 6])
    with pytest.raises(ValueError, match="batch of 1"):
        torch.ops.anymamba.scan(*packed)


def test_ranks_without_weights_of_their_own_are_rejected():
    t, h, p, n, s, r = 5, 2, 3, 4, 1, 2
    tokens = [torch.rand(1, t, h) for _ in range(4)]
    with pytest.raises(ValueError, match="value_weight"):
        rotated_scan(
            torch.randn(1, t, h, p),
            *(torch.randn(1, t, r, 1, n) for _ in range(2)),
            *(torch.randn(h, r, n) for _ in range(2)),
            torch.randn(1, t, s),
            tokens[0],
            -tokens[1],
            *tokens[2:],
            torch.ones(h),
            None,
            torch.zeros(1, h, p, n),
            torch.zeros(1, h, s),
        )


def test_a_negated_view_is_read_as_what_it_is():
    v, k, q, log_decay = scan_inputs()[:4]
    lazy = torch.complex(log_decay, -log_decay).conj().imag
    assert lazy.is_neg()
    y, _ = scan(v, k, q, lazy, path=SsdPath.fused())
    assert torch.equal(y, scan(v, k, q, log_decay, path=SsdPath.fused())[0])


@torch.no_grad()
def test_a_head_that_is_switched_off_stays_finite():
    block, x = Mamba3(16, d_state=8, headdim=8), torch.randn(2, 7, 16)
    block.dt_bias[0] = -torch.inf
    y, cache = block.prefill(x)
    expected, _ = block.prefill(x, path=SsdPath.serial())
    assert y.isfinite().all()
    assert_near(y, expected, 1e-5)
    assert block.step(x[:, 0], cache)[0].isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("family", [Mamba2, Mamba3])
def test_a_step_reads_no_more_of_a_parameter_than_it_has(family):
    x = torch.randn(2, 16)

    def block_with(**replaced):
        block = family(16, d_state=8, headdim=8)
        for name, value in replaced.items():
            setattr(block, name, value)
        return block

    with pytest.raises(ValueError, match="must have shape"):
        block_with(D=nn.Parameter(torch.ones(3))).step(x)
    with pytest.raises(RuntimeError):
        block_with(out_proj=nn.Linear(37, 16)).step(x)
    with pytest.raises(RuntimeError):
        block_with(in_proj=nn.Linear(16, 10)).step(x)


@torch.no_grad()
def test_a_method_replaced_on_a_block_is_called():
    block, x = Mamba2(16, d_state=8, headdim=8), torch.randn(2, 16)
    before, original = block.step(x)[0], block._dt
    block._dt = lambda *inputs: 2 * original(*inputs)
    after = block.step(x)[0]
    assert not torch.allclose(before, after)
    assert_near(after, block(x.unsqueeze(1))[:, 0], 1e-5)


def test_a_library_of_other_sources_is_rejected(monkeypatch):
    assert bindings._is_compatible(bindings.LIBRARY.handle)
    monkeypatch.setattr(schema, "ROTATIONS", (*schema.ROTATIONS, "unheard_of"))
    assert not bindings._is_compatible(bindings.LIBRARY.handle)


def test_a_library_may_be_named_by_a_relative_path():
    path = Path(bindings.LIBRARY.handle._name)
    code = "from anymamba.kernels.cpu.bindings import LIBRARY; print(LIBRARY)"
    environment = {**os.environ, "ANYMAMBA_LIBRARY": path.name}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=path.parent, env=environment, capture_output=True, text=True, check=True
    )
    assert str(path.resolve()) in done.stdout


def test_a_mistake_in_the_environment_is_one_line_and_exit_code_2():
    environment = {**os.environ, "ANYMAMBA_KERNELS": "no"}
    command = [sys.executable, "-m", "anymamba", "info"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    libraries = ", ".join(describe_kernels())
    assert done.stderr == f"anymamba: ANYMAMBA_KERNELS must be one of on, off, {libraries}, got 'no'\n"
