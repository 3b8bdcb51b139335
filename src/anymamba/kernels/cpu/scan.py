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
        ("scale", _pointer),
        ("scale_strides", _i64 * 3),
        ("skip", _pointer),
        ("initial_state", _pointer),
        ("y", _pointer),
        ("final_state", _pointer),
        ("k_bias", _pointer),
        ("q_bias", _pointer),
        ("pairs", _i64),
        ("interleaved", _i64),
        *((name, _pointer) for name in ("rate", "dt", "start", "gamma", "kappa", "value_weight", "lengths")),
        ("last_k", _pointer),
        ("turned", _pointer),
        ("dy", _pointer),
        ("dy_strides", _i64 * 4),
        ("dfinal_state", _pointer),
        *((name, _pointer) for name in ("dv", "dk", "dq", "dlog_decay", "dscale", "dskip", "dinitial_state")),
        *((name, _pointer) for name in ("dlast_k", "dturned", "dk_bias", "dq_bias", "drate", "ddt", "dstart")),
        *((name, _pointer) for name in ("dgamma", "dkappa", "dvalue_weight")),
    )


class Call:
    """The arguments of one call, and the tensors behind its pointers, which must outlive it."""

    def __init__(
        self, v: Tensor, k: Tensor, q: Tensor, log_decay: Tensor, chunk_len: int, cu_seqlens: Tensor | None
    ) -> None:
        """Fill in what every scan has: shapes as in `ssd_forward`."""
        b, t, r, h, p = v.shape
        g, n = k.shape[3:]
        self.kept: list[Tensor] = []
        self.wide = log_decay.dtype
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
            self.dense("bounds", library.checked_bounds(cu_seqlens, t))

    def scale_and_skip(self, scale: Tensor | None, skip: Tensor | None) -> None:
        """Fill in both where they are given."""
        if scale is not None:
            self.args.scale_strides = scale.stride()
            self.dense("scale", scale)
        if skip is not None:
            wide, shape = self.wide, (self.args.heads, self.args.width)
            self.dense("skip", (skip if skip.ndim == 2 else skip.unsqueeze(-1)).to(wide).expand(shape).contiguous())

    def strided(self, name: str, x: Tensor) -> None:
        """Fill in a tensor with its strides."""
        x = library.dense_last_axis(x)
        setattr(self.args, f"{name}_strides", x.stride()[:-1])
        self.dense(name, x)

    def dense(self, name: str, x: Tensor) -> None:
        """Fill in a tensor that the kernels need no strides of, or know them already."""
        self.kept.append(x)
        setattr(self.args, name, x.data_ptr())

    def run(self, name: str, **tensors: Tensor) -> None:
        """Fill in contiguous tensors by the names of their fields, and call the kernel."""
        for field, x in tensors.items():
            self.dense(field, x)
        library.call(name, self.args)


def ssd_forward(
    v: Tensor,
    k: Tensor,
    q: Tensor,
    log_decay: Tensor,
    scale: Tensor | None,
    skip: Tensor | None,
    initial_state: Tensor,
    chunk_len: int,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The scan of `scale · v`, and `skip · v` added to y: y and the final states.

    Args:
        v: (b, t, r, h, p), as for `anymamba.scan.scan`, like k, q and the others that are not listed here.
        k: (b, t, r, g, n).
        q: (b, t, r, g, n).
        log_decay: (b, t, h).
        scale: (b, t, h) in the dtype of `log_decay`, or none.
        skip: (h,) or (h, p), or none.
        initial_state: (s, h, p, n).
        chunk_len: steps of a chunk.
        cu_seqlens: boundaries of packed sequences, or none.
    """
    y, final_state = (library.empty(x.shape, dtype=x.dtype) for x in (v, initial_state))
    if final_state.shape[0]:
        call = Call(v, k, q, log_decay, chunk_len, cu_seqlens)
        call.scale_and_skip(scale, skip)
        call.run("anymamba_scan_forward", initial_state=initial_state.contiguous(), y=y, final_state=final_state)
    return y, final_state


def ssd_backward(
    dy: Tensor,
    dfinal_state: Tensor,
    v: Tensor,
    k: Tensor,
    q: Tensor,
    log_decay: Tensor,
    scale: Tensor | None,
    skip: Tensor | None,
    initial_state: Tensor,
    chunk_len: int,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:
    """The gradients of v, k, q, log_decay, scale, skip (empty where there is none) and initial_state."""
    sequences, h, p = initial_state.shape[:3]
    # Without values there is nothing to sum, and everything else has a gradient of zero.
    make = library.empty if sequences * h * p else library.zeros
    grads = {
        name: make(x.shape, dtype=x.dtype)
        for name, x in (("v", v), ("k", k), ("q", q), ("log_decay", log_decay), ("initial_state", initial_state))
    }
    wide = log_decay.dtype
    grads["scale"] = make((0,) if scale is None else scale.shape, dtype=wide)
    grads["skip"] = make((0 if skip is None else sequences, h, p), dtype=wide)
    if make is library.empty:
        call = Call(v, k, q, log_decay, chunk_len, cu_seqlens)
        call.scale_and_skip(scale, skip)
        call.strided("dy", dy)
        call.run(
            "anymamba_scan_backward",
            initial_state=initial_state.contiguous(),
            dfinal_state=dfinal_state.contiguous(),
            **{f"d{name}": grad for name, grad in grads.items()},
        )
    dskip = grads["skip"].sum(0)
    if skip is not None:
        dskip = (dskip if skip.ndim == 2 else dskip.sum(-1)).to(skip.dtype)
    names = ("v", "k", "q", "log_decay", "scale")
    return (*(grads[name] for name in names), dskip, grads["initial_state"])


def scan_forward(
    v: Tensor, k: Tensor, q: Tensor, log_decay: Tensor, initial_state: Tensor, chunk_len: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scan (`anymamba.scan.scan` has the contract): y and the final states."""
    return ssd_forward(v, k, q, log_decay, None, None, initial_state, chunk_len, cu_seqlens)


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
) -> tuple[Tensor, ...]:
    """The gradients of v, k, q, log_decay and initial_state from those of y and the final states."""
    inputs = (v, k, q, log_decay, None, None, initial_state, chunk_len, cu_seqlens)
    dv, dk, dq, da, _, _, dinitial_state = ssd_backward(dy, dfinal_state, *inputs)
    return dv, dk, dq, da, dinitial_state
