"""Forward and backward of Mamba-1's scan by the compiled kernels (contract: `scan/selective.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from anymamba.kernels import library
from anymamba.kernels.cpu.structures import SelectiveArgs


def _run(
    name: str,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    dy: Tensor | None = None,
    **contiguous: Tensor,
) -> None:
    """Call a kernel; `contiguous` are its results, and whatever else has no strides, by the names of their fields."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    (rows, t, i), n = x.shape, a.shape[1]
    sequences = rows if cu_seqlens is None else cu_seqlens.shape[0] - 1
    args = SelectiveArgs(
        dtype=library.dtype_code(x.dtype),
        threads=torch.get_num_threads(),
        batch=rows,
        time=t,
        channels=i,
        state=n,
        sequences=sequences,
    )
    tensors = {
        "rates": library.expect("A", a, (i, n), wide).contiguous(),
        "initial_state": library.expect("initial_state", initial_state, (sequences, i, n), wide).contiguous(),
        **contiguous,
    }
    strided = {"x": (x, i), "dt": (dt, i), "z": (z, i), "b": (b, n), "c": (c, n), "dy": (dy, i)}
    for field, (tensor, width) in strided.items():
        if tensor is not None:
            dtype = wide if field == "dt" else x.dtype
            tensors[field] = library.dense_last_axis(library.expect(field, tensor, (rows, t, width), dtype))
            setattr(args, f"{field}_strides", tensors[field].stride()[:2])
    if d is not None:
        tensors["skip"] = library.expect("D", d, (i,)).to(wide).contiguous()
    if cu_seqlens is not None:
        tensors["bounds"] = library.checked_bounds(cu_seqlens, rows, t)
    for field, tensor in tensors.items():
        setattr(args, field, tensor.data_ptr())
    library.call(name, args)


def selective_forward(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y (b, t, i) and the final states (s, i, n)."""
    y = library.empty(x.shape, dtype=x.dtype)
    if not x.numel():
        return y, initial_state.clone()
    final = library.empty(initial_state.shape, dtype=initial_state.dtype)
    _run("selective_forward", x, dt, a, b, c, d, z, initial_state, cu_seqlens, y=y, final_state=final)
    return y, final


def selective_backward(
    dy: Tensor,
    dfinal: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:
    """The gradients of the eight inputs, from those of y and the final states."""
    inputs = (x, dt, a, b, c, d, z, initial_state)
    names = ("dx", "ddt", "drates", "db", "dc", "dskip", "dz", "dinitial_state")
    make = library.empty if x.numel() else library.zeros
    grads = {
        name: make((a.shape[0],) if i is None else i.shape, dtype=a.dtype if name == "dskip" or i is None else i.dtype)
        for name, i in zip(names, inputs, strict=True)
    }
    if x.numel():
        dfinal = library.expect("dfinal_state", dfinal, initial_state.shape, initial_state.dtype).contiguous()
        _run("selective_backward", *inputs, cu_seqlens, dy, dfinal_state=dfinal, **grads)
    if d is not None:
        grads["dskip"] = grads["dskip"].to(d.dtype)
    return tuple(grads.values())
