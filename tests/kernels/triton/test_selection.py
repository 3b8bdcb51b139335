"""When the Triton kernels are used, what costs nothing without them, and the comparison on first use."""

import importlib.util

import pytest
import torch

from anymamba.core.operators import OPERATORS, gradients
from anymamba.core.registry import requested_library
from anymamba.kernels.triton import first_use, selection
from anymamba.kernels.triton.selection import GpuKernel
from tests.support import in_another_process

CPU = torch.device("cpu")


def test_importing_the_package_imports_no_triton():
    code = "import sys, anymamba, anymamba.scan; print(any(name.split('.')[0] == 'triton' for name in sys.modules))"
    assert in_another_process(code, TRITON_INTERPRET="", ANYMAMBA_KERNELS="") == "False"


def test_without_triton_every_operator_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    selection._missing_for.cache_clear()
    try:
        assert selection._missing_for("cuda", torch.float32) == "Triton is not installed"
    finally:
        selection._missing_for.cache_clear()


@pytest.mark.skipif(requested_library() == "triton", reason="is about processes that do not interpret")
def test_a_dtype_or_device_that_is_not_covered_is_named():
    pytest.importorskip("triton")
    assert selection._missing_for("cuda", torch.bfloat16) == ""
    assert selection._missing_for("cuda", torch.float64) == "there is no Triton kernel for torch.float64"
    assert "only with TRITON_INTERPRET=1" in selection._missing_for("cpu", torch.float32)


def norm(scale=1.0, error=None):
    """Return the portable norm in the place of a kernel, with an error in its gradients."""
    operator = OPERATORS["rms_norm"]

    def backward(dy, *inputs):
        if error:
            raise error
        dx, *others = gradients(operator.definition, (dy,), inputs, operator.differentiable)
        return dx * scale, *others

    def examples(device, dtype):
        x, z = torch.randn(2, 3, 8, dtype=dtype, device=device)
        return x, z, torch.ones(8, dtype=dtype, device=device), 4, True, 1e-5

    return GpuKernel(operator.definition, backward, examples)


def test_a_kernel_that_agrees_with_the_portable_code_is_used(capsys):
    assert first_use.compare("rms_norm", norm(), CPU, torch.float32) == ""
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (norm(scale=1.5), "differs in the gradient of x"),
        (norm(scale=float("nan")), "differs in the gradient of x"),
        (norm(error=RuntimeError("no kernel image is available\nfor this device")), "failed: RuntimeError: no kernel"),
    ],
    ids=["wrong", "not a number", "raises"],
)
def test_a_kernel_that_differs_is_dropped_with_one_line(kernel, reason, capsys):
    for _ in range(2):
        assert reason in first_use.difference("rms_norm", kernel, CPU, torch.float32)
    written = capsys.readouterr().err
    assert written.startswith("anymamba: rms_norm on cpu runs on portable code: its Triton kernel")
    assert written.count("\n") == 1
    assert "for this device" not in written
