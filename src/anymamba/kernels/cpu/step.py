"""One token through a Mamba-2 block, between its projections, in one call to the compiled kernels.

It has no gradient: `blocks/mamba2.py` uses it where none is asked for.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from anymamba.kernels import library
from anymamba.operators import is_observed

_i64, _f64, _pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class _StepArgs(ctypes.Structure):
    """`StepArgs` of csrc/block_args.h, field by field."""

    _fields_ = (
        *((name, _i64) for name in ("dtype", "threads", "batch", "heads", "head_width", "groups", "state")),
        *((name, _i64) for name in ("conv_width", "group_size", "norm_before_gate", "skip_per_channel")),
        *((name, _f64) for name in ("eps", "dt_min", "dt_max")),
        ("z", _pointer),
        ("z_row", _i64),
        ("xbc", _pointer),
        ("xbc_row", _i64),
        ("dt", _pointer),
        ("dt_row", _i64),
        *((name, _pointer) for name in ("window", "conv_weight", "conv_bias", "dt_bias", "a_log", "skip")),
        *((name, _pointer) for name in ("norm_weight", "old_state", "new_window", "new_state", "y")),
    )


def _step_now(
    z: Tensor,
    xbc: Tensor,
    dt: Tensor,
    window: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    dt_bias: Tensor,
    a_log: Tensor,
    skip: Tensor,
    norm_weight: Tensor | None,
    groups: int,
    group_size: int,
    norm_before_gate: bool,
    eps: float,
    dt_min: float,
    dt_max: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Advance a block by one token.

    Args:
        z: gate, (b, h p).
        xbc: inputs of the convolution, (b, v).
        dt: step sizes before their bias and softplus, (b, h).
        window: (b, v, w). It is not changed.
        state: (b, h, p, n), float32 or wider. It is not changed.
        conv_weight: (v, w).
        conv_bias: (v,), or none.
        dt_bias: (h,).
        a_log: (h,).
        skip: D, (h,) or (h p,).
        norm_weight: (h p,), or none for a gate without a norm.
        groups: of B and C.
        group_size: channels that are normed together.
        norm_before_gate: the order of norm and gate.
        eps: of the norm.
        dt_min: lower limit of the step size.
        dt_max: upper limit of the step size.

    Returns:
        y (b, h p) normed and gated, the new window, and the new state.
    """
    (b, h, p, n), wide = state.shape, state.dtype
    y = torch.empty((b, h * p), dtype=z.dtype)
    new_window, new_state = torch.empty(window.shape, dtype=window.dtype), torch.empty(state.shape, dtype=wide)
    if b == 0:
        return y, new_window, new_state
    rows = {"z": z, "xbc": xbc, "dt": dt}
    parameters = {
        "conv_weight": conv_weight,
        "conv_bias": conv_bias,
        "dt_bias": dt_bias,
        "a_log": a_log,
        "skip": skip,
        "norm_weight": norm_weight,
    }
    tensors = {name: library.dense_last_axis(x) for name, x in rows.items()}
    tensors |= {name: x.to(wide).contiguous() for name, x in parameters.items() if x is not None}
    tensors |= {"window": window.contiguous(), "old_state": state.contiguous()}
    tensors |= {"new_window": new_window, "new_state": new_state, "y": y}
    args = _StepArgs(
        dtype=library.dtype_code(z.dtype),
        threads=torch.get_num_threads(),
        batch=b,
        heads=h,
        head_width=p,
        groups=groups,
        state=n,
        conv_width=window.shape[2],
        group_size=group_size,
        norm_before_gate=norm_before_gate,
        skip_per_channel=skip.shape[0] != h,
        eps=eps,
        dt_min=dt_min,
        dt_max=dt_max,
        **{f"{name}_row": tensors[name].stride(0) for name in rows},
    )
    for field, tensor in tensors.items():
        setattr(args, field, tensor.data_ptr())
    library.call("anymamba_mamba2_step", args)
    return y, new_window, new_state


def _fake(z: Tensor, xbc: Tensor, dt: Tensor, window: Tensor, state: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (z, window, state))


_operator = torch.library.custom_op(
    "anymamba::mamba2_step",
    _step_now,
    mutates_args=(),
    schema="(Tensor z, Tensor xbc, Tensor dt, Tensor window, Tensor state, Tensor conv_weight, Tensor? conv_bias, "
    "Tensor dt_bias, Tensor a_log, Tensor skip, Tensor? norm_weight, SymInt groups, SymInt group_size, "
    "bool norm_before_gate, float eps, float dt_min, float dt_max) -> (Tensor, Tensor, Tensor)",
)
_operator.register_fake(_fake)


def mamba2_step(z: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`anymamba::mamba2_step` (its arguments are those of `_step_now`).

    Outside of tracing the kernel is called without the dispatcher, which takes longer than the kernel.
    """
    traced = is_observed() or type(z) is not Tensor
    y, window, state = (_operator if traced else _step_now)(z, *arguments)
    return y, window, state
