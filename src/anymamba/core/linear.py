"""Products with the weights of projections, by the fastest library for the processor and the sizes.

On x86-64, torch multiplies float32 matrices with MKL, which uses AVX-512 on Intel processors only. oneDNN, with which
torch multiplies bfloat16, uses it on all. On other processors with AVX-512, a projection of many rows therefore runs on
oneDNN, forward and backward, in about half the time. Without gradients, a projection of few rows (a short prompt)
runs on our own kernels, which read the weight once for all rows. The choice follows from the processor and the sizes,
never from a measurement, so that a resumed run continues with the same bits.

Tracers and transforms, `anymamba.portable()`, other dtypes and other devices see torch's own product.

Environment:
    ANYMAMBA_MATMUL: `torch` or `onednn` chooses torch's library; `onednn` then computes products of any size.

Letters: m rows of activations, o outputs, i inputs.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.core.operators import are_dense_tensors, has_no_hooks, is_tracing
from anymamba.core.registry import find_kernel, is_portable

Library = Literal["torch", "onednn"]
_NAMES = ("torch", "onednn")
_REQUESTED = os.environ.get("ANYMAMBA_MATMUL", "")
# Fewest rows, inputs and outputs, and fewest multiplications, for oneDNN.
_MIN_DIM = 1 if _REQUESTED == "onednn" else 16
_MIN_PRODUCTS = 1 if _REQUESTED == "onednn" else 2**22
# Most rows, by torch's library, and smallest weight for our own kernels. They were measured against MKL, not against
# the libraries of other processors and systems, such as Apple's.
_MAX_ROWS = {"torch": 256 if torch.backends.mkl.is_available() else 0, "onednn": _MIN_DIM - 1}
_MIN_WEIGHT_NUMEL = 2**16
_FEATURE_LINES = ("flags", "Features")  # of /proc/cpuinfo, on x86-64 and on Arm
# Values of ONEDNN_MAX_CPU_ISA with which oneDNN multiplies bfloat16 as float32.
_WITHOUT_BFLOAT16 = ("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni")


_FORWARD = nn.Linear.forward


def apply_linear(module: nn.Module, x: Tensor) -> Tensor:
    """Return `module(x)`; a plain `nn.Linear` without hooks is computed by `linear`, any other module is called."""
    is_eager = not torch.compiler.is_compiling()
    if is_eager and type(module) is nn.Linear and nn.Linear.forward is _FORWARD and has_no_hooks(module):
        return linear(x, module.weight, module.bias)
    y: Tensor = module(x)
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear`: (..., i), (o, i), (o) -> (..., o), with derivatives of any order."""
    inputs = (x, weight) if bias is None else (x, weight, bias)
    if torch.compiler.is_compiling() or not _are_covered(inputs):
        return F.linear(x, weight, bias)
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    if not wants_gradient and _is_short(x, weight) and (few_rows := find_kernel("linear", x, weight)):
        y: Tensor = few_rows.forward(x, weight, bias)
        return y
    if matmul_library() == "torch" or not _is_large(x, weight):
        return F.linear(x, weight, bias)
    return _Product.apply(x, weight, bias) if wants_gradient else _product(x, weight, bias)  # type: ignore[no-untyped-call]


@functools.cache
def matmul_library() -> Library:
    """Return the library that multiplies float32 matrices on this CPU.

    Raises `ValueError` if ANYMAMBA_MATMUL names an unknown or missing library.
    """
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if _REQUESTED not in ("", *_NAMES):
        raise ValueError(f"ANYMAMBA_MATMUL must be one of {', '.join(_NAMES)}, got {_REQUESTED!r}")
    if _REQUESTED == "onednn" and not has_onednn:
        raise ValueError("ANYMAMBA_MATMUL is onednn, which this build of torch does not have")
    if _REQUESTED:
        return "onednn" if _REQUESTED == "onednn" else "torch"
    has_wide_vectors = torch.backends.cpu.get_cpu_capability() == "AVX512"
    is_held_back = torch.backends.mkl.is_available() and not _is_intel()
    return "onednn" if has_onednn and has_wide_vectors and is_held_back else "torch"


def multiplies_bfloat16() -> bool:
    """Return whether torch multiplies bfloat16 in dedicated units: AVX-512 BF16, AMX, or those of Arm.

    With them bfloat16 is about twice as fast as float32, without them slower. Only Linux lists the units; on other
    systems the result is False.
    """
    return _has_bfloat16_units() and bool(torch._C._get_mkldnn_enabled())


@functools.cache
def _has_bfloat16_units() -> bool:
    features = {
        word for line in _cpuinfo() if line.startswith(_FEATURE_LINES) for word in line.partition(":")[2].split()
    }
    if not torch.backends.mkldnn.is_available() or _onednn_max_isa() in _WITHOUT_BFLOAT16:
        return False
    if platform.machine() == "aarch64":  # oneDNN leaves Arm's units to another library
        return "bf16" in features and torch.backends.mkldnn.is_acl_available()
    return not features.isdisjoint(("avx512_bf16", "amx_bf16"))


def _onednn_max_isa() -> str:
    """Return the instruction set that the environment limits oneDNN to; empty if there is no limit."""
    names = (os.environ.get(f"{prefix}_MAX_CPU_ISA") for prefix in ("ONEDNN", "DNNL"))
    return next((name for name in names if name), "").lower()


def _is_intel() -> bool:
    """Return True for Intel CPUs and when the vendor is unknown."""
    if not (lines := _cpuinfo()):
        return "AuthenticAMD" not in platform.processor()
    return not any(line.startswith("vendor_id") and "GenuineIntel" not in line for line in lines)


def _cpuinfo() -> list[str]:
    """Return the lines of /proc/cpuinfo; none on systems other than Linux."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _are_covered(inputs: tuple[Tensor, ...]) -> bool:
    """Return whether the inputs are plain float32 on a CPU with compatible shapes, and not traced or transformed."""
    x, weight = inputs[:2]
    return (
        x.dtype == torch.float32
        and all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in inputs)
        and are_dense_tensors(inputs)
        and all(tensor.layout == torch.strided for tensor in inputs)
        and x.numel() > 0
        and weight.ndim == 2
        and x.shape[-1:] == weight.shape[1:]
        and all(bias.shape == weight.shape[:1] for bias in inputs[2:])
        and not is_portable()
        and not is_tracing()
        and torch._C._len_torch_function_stack() == 0
        and not torch.is_autocast_enabled("cpu")
        and _is_full_precision()
    )


def _is_full_precision() -> bool:
    """Return whether float32 must be multiplied in float32.

    "high" permits TF32 but does not demand it; only "medium" is left to torch's own library.
    """
    try:
        return torch.get_float32_matmul_precision() != "medium"
    except RuntimeError:  # the precision was set for one device or library, through torch's newer settings
        return False


def _is_short(x: Tensor, weight: Tensor) -> bool:
    """Return whether there are so few rows, and the weight is so large, that the time to read the weight dominates."""
    return x.numel() <= _MAX_ROWS[matmul_library()] * weight.shape[1] and weight.numel() >= _MIN_WEIGHT_NUMEL


def _is_large(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN is faster: for small products, its overhead exceeds the product itself."""
    out, width = weight.shape
    return x.numel() >= _MIN_DIM * width and min(out, width) >= _MIN_DIM and x.numel() * out >= _MIN_PRODUCTS


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x_mi, bias = x.reshape(-1, x.shape[-1]), None if bias is None else bias.contiguous()
    y_mo = torch.ops.mkldnn._linear_pointwise.default(_dense(x_mi), _dense(weight), bias, "none", [], "")
    return unflatten_like(y_mo, x)


def unflatten_like(y_mo: Tensor, x: Tensor) -> Tensor:
    """Return rows in the shape of `x`, not as a view to autograd, so that the caller may change them in place."""
    y: Tensor = y_mo if x.ndim == 2 else torch.ops.aten._unsafe_view.default(y_mo, [*x.shape[:-1], y_mo.shape[-1]])
    return y


def _dense(x: Tensor) -> Tensor:
    """Return a matrix with contiguous rows or columns: with gaps, oneDNN multiplies number by number."""
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()


class _Product(torch.autograd.Function):
    """The product `linear`, whose gradients are products of the same kind and can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wants_x, wants_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        dy_mo = dy.reshape(-1, dy.shape[-1])
        dx = linear(dy, weight.t()) if wants_x else None
        dweight = linear(dy_mo.t(), x.reshape(-1, x.shape[-1]).t()) if wants_weight else None
        return dx, dweight, dy_mo.sum(0) if wants_bias else None
