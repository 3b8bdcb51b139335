"""Forward and backward of the scan by the compiled kernels.

The backward keeps the inputs only; the formulas are those of `scan/serial_recalculated.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anymamba.kernels import library
from anymamba.kernels.cpu.structures import ScanArgs


class Call:
    """The arguments of one call, and the tensors behind its pointers, which must outlive it."""

    def __init__(
        self, v: Tensor, k: Tensor, q: Tensor, log_decay: Tensor, chunk_len: int, cu_seqlens: Tensor | None
    ) -> None:
        """Fill in what every scan has: shapes as in `ssd_forward`."""
        b, t, r, h, p = v.shape
        g, n = k.shape[3:]
        if t < 1 or chunk_len < 1:
            raise ValueError(f"a scan has at least one step, in chunks of at least one, got {t} and {chunk_len}")
        if g < 1 or h % g:
            raise ValueError(f"the groups must divide the {h} heads, got {g}")
        self.kept: list[Tensor] = []
        self.dtype = v.dtype
        self.wide = torch.float64 if v.dtype == torch.float64 else torch.float32
        self.args = ScanArgs(
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
        self.strided("v", v, v.shape)
        self.strided("k", k, (b, t, r, g, n))
        self.strided("q", q, (b, t, r, g, n))
        self.decay("log_decay", log_decay)
        if cu_seqlens is not None:
            self.dense("bounds", library.checked_bounds(cu_seqlens, b, t))

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Of the initial and final states, (s, h, p, n)."""
        return self.args.sequences, self.args.heads, self.args.width, self.args.state

    def scale_and_skip(self, scale: Tensor | None, skip: Tensor | None) -> None:
        """Fill in both where they are given."""
        if scale is not None:
            self.decay("scale", scale)
        if skip is not None:
            shape = (self.args.heads, self.args.width)
            library.expect("skip", skip, shape[: skip.ndim])
            self.dense(
                "skip", (skip if skip.ndim == 2 else skip.unsqueeze(-1)).to(self.wide).expand(shape).contiguous()
            )

    def decay(self, name: str, x: Tensor) -> None:
        """Fill in a number for each head and step, (b, t, h), with its strides."""
        a = self.args
        setattr(a, f"{name}_strides", library.expect(name, x, (a.batch, a.time, a.heads), self.wide).stride())
        self.dense(name, x)

    def strided(self, name: str, x: Tensor, shape: Sequence[int]) -> None:
        """Fill in activations with their strides."""
        x = library.dense_last_axis(library.expect(name, x, shape, self.dtype))
        setattr(self.args, f"{name}_strides", x.stride()[:-1])
        self.dense(name, x)

    def given(self, name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
        """Fill in a tensor that the kernels read as contiguous: states, and whatever else is of their dtype."""
        self.dense(name, library.expect(name, x, shape, dtype).to(dtype or self.wide).contiguous())

    def dense(self, name: str, x: Tensor) -> None:
        """Fill in a tensor that the kernels need no strides of, or know them already."""
        self.kept.append(x)
        setattr(self.args, name, x.data_ptr())

    def run(self, name: str, **results: Tensor) -> None:
        """Fill in the contiguous tensors that the kernel writes, by the names of their fields, and call it."""
        for field, x in results.items():
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
        call.given("initial_state", initial_state, call.state_shape)
        call.run("scan_forward", y=y, final_state=final_state)
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
        call.strided("dy", dy, v.shape)
        call.given("initial_state", initial_state, call.state_shape)
        call.given("dfinal_state", dfinal_state, call.state_shape)
        call.run("scan_backward", **{f"d{name}": grad for name, grad in grads.items()})
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
