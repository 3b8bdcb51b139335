"""Forward and backward of the scan by the compiled kernels.

The backward keeps the inputs only; the formulas are those of `scan/serial_recalculated.py`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from anymamba.kernels import library

_i64, _pointer = ctypes.c_int64, ctypes.c_void_p


class _ScanArgs(ctypes.Structure):
    """`ScanArgs` of csrc/scan_args.h, field by field."""

    _fields_ = (
        *((name, _i64) for name in ("dtype", "threads", "batch", "time", "rank", "heads", "groups", "width", "state")),
        ("chunk_len", _i64),
        ("sequences", _i64),
        ("bounds", _pointer),
        ("v", _pointer),
        ("v_strides", _i64 * 4),
        ("k", _pointer),
        ("k_strides", _i64 * 4),
        ("q", _pointer),
        ("q_strides", _i64 * 4),
        ("log_decay", _pointer),
        ("log_decay_strides", _i64 * 3),
        ("initial_state", _pointer),
        ("y", _pointer),
        ("final_state", _pointer),
        ("dy", _pointer),
        ("dy_strides", _i64 * 4),
        ("dfinal_state", _pointer),
        *((name, _pointer) for name in ("dv", "dk", "dq", "dlog_decay", "dinitial_state")),
    )


class _Call:
    """The arguments of one call, and the tensors behind its pointers, which must outlive it."""

    def __init__(
        self, v: Tensor, k: Tensor, q: Tensor, log_decay: Tensor, chunk_len: int, cu_seqlens: Tensor | None
    ) -> None:
        b, t, r, h, p = v.shape
        g, n = k.shape[3:]
        self.kept: list[Tensor] = []
        self.args = _ScanArgs(
            dtype=library.dtype_code(v.dtype),
            threads=torch.get_num_threads(),
            batch=b,
            time=t,
            rank=r,
            heads=h,
            groups=g,
            width=p,
            state=n,
            chunk_len=chunk_len,
            sequences=b if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        )
        for name, x in (("v", v), ("k", k), ("q", q)):
            self.strided(name, x)
        self.args.log_decay_strides = log_decay.stride()
        self.dense("log_decay", log_decay)
        if cu_seqlens is not None:
            self.dense("bounds", cu_seqlens.to(torch.int64).contiguous())

    def strided(self, name: str, x: Tensor) -> None:
        x = library.dense_last_axis(x)
        setattr(self.args, f"{name}_strides", x.stride()[:-1])
        self.dense(name, x)

    def dense(self, name: str, x: Tensor) -> None:
        self.kept.append(x)
        setattr(self.args, name, x.data_ptr())

    def run(self, name: str, **tensors: Tensor) -> None:
        for field, x in tensors.items():
            self.dense(field, x)
        library.call(name, self.args)


def scan_forward(
    v: Tensor, k: Tensor, q: Tensor, log_decay: Tensor, initial_state: Tensor, chunk_len: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scan (`anymamba.scan.scan` has the contract); y and the final states."""
    y, final_state = torch.empty(v.shape, dtype=v.dtype), torch.empty(initial_state.shape, dtype=initial_state.dtype)
    if final_state.shape[0]:
        call = _Call(v, k, q, log_decay, chunk_len, cu_seqlens)
        call.run("anymamba_scan_forward", initial_state=initial_state.contiguous(), y=y, final_state=final_state)
    return y, final_state


def scan_backward(
    dy: Tensor,
    dfinal_state: Tensor,
    v: Tensor,
    k: Tensor,
    q: Tensor,
    log_decay: Tensor,
    initial_state: Tensor,
    chunk_len: int,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of v, k, q, log_decay and initial_state from those of y and the final states."""
    inputs = (v, k, q, log_decay, initial_state)
    heads = v.shape[3] * v.shape[4]
    # Without heads there is nothing to sum, and keys and queries have a gradient of zero.
    make = torch.empty if heads and k.shape[-1] else torch.zeros
    dv, dk, dq, da, dinitial_state = (make(x.shape, dtype=x.dtype) for x in inputs)
    if initial_state.shape[0] and make is torch.empty:
        call = _Call(v, k, q, log_decay, chunk_len, cu_seqlens)
        call.strided("dy", dy)
        call.run(
            "anymamba_scan_backward",
            initial_state=initial_state.contiguous(),
            dfinal_state=dfinal_state.contiguous(),
            dv=dv,
            dk=dk,
            dq=dq,
            dlog_decay=da,
            dinitial_state=dinitial_state,
        )
    return dv, dk, dq, da, dinitial_state
