"""The scan: one signature, several algorithms that agree."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.kernels import library
from anymamba.scan.checks import check_scan
from anymamba.scan.fused import scan_fused
from anymamba.scan.minimal import scan_minimal
from anymamba.scan.numerics import state_dtype, without_autocast
from anymamba.scan.operator import Algorithm, exported
from anymamba.scan.path import SsdPath
from anymamba.scan.recurrent import scan_recurrent
from anymamba.scan.serial import scan_serial
from anymamba.scan.serial_recalculated import scan_serial_recalculated

_ALGORITHMS: dict[str, Algorithm] = {
    "recurrent": scan_recurrent,
    "minimal": scan_minimal,
    "serial": scan_serial,
    "serial_recalculated": scan_serial_recalculated,
    "fused": scan_fused,
}
_EXPORTED: dict[str, Algorithm] = {
    "recurrent": exported("scan_recurrent", scan_recurrent),
    "minimal": exported("scan_minimal", scan_minimal),
    "serial": exported("scan_serial", scan_serial),
    "serial_recalculated": scan_serial_recalculated,
    "fused": scan_fused,
}


def resolve_path(path: SsdPath | None, device: torch.device, dtype: torch.dtype) -> SsdPath:
    """`path` with `fastest` decided: `fused` where a kernel covers `device` and `dtype`, else `serial_recalculated`.

    Raises:
        RuntimeError: `path` asks for `fused` and there is no such kernel.
    """
    path = SsdPath.or_default(path)
    if path.algorithm not in ("fastest", "fused"):
        return path
    reason = library.missing(device, dtype)
    if not reason:
        return SsdPath("fused", path.chunk_len, path.pathway)
    if path.algorithm == "fused":
        raise RuntimeError(f"SsdPath.fused(): no compiled kernel: {reason}. Use SsdPath() for the fastest there is.")
    return SsdPath("serial_recalculated", path.chunk_len, path.pathway)


def scan(
    v: Float[Tensor, "b t r h p"],
    k: Float[Tensor, "b t r g n"],
    q: Float[Tensor, "b t r g n"],
    log_decay: Float[Tensor, "b t h"],
    *,
    initial_state: Float[Tensor, "s h p n"] | None = None,
    path: SsdPath | None = None,
    cu_seqlens: Int[Tensor, " s1"] | None = None,
) -> tuple[Float[Tensor, "b t r h p"], Float[Tensor, "s h p n"]]:
    """Run the linear recurrence behind every SSD model over a sequence.

        S_t = exp(a_t) S_{t-1} + Σ_r v_t[r] ⊗ k_t[r]        y_t[r] = S_t q_t[r]

    It is differentiable in every tensor, through both results. `v`, `k` and `q` share one dtype; decays and states are
    float32, or float64 for float64 inputs, and so is all arithmetic.

    Args:
        v: values, (b, t, r, h, p): batch, time, MIMO rank, heads, head width.
        k: keys, (b, t, r, g, n): g groups of heads, state size n. Head h reads group h // (h / g).
        q: queries, (b, t, r, g, n).
        log_decay: a, (b, t, h), never positive. That is checked in eager mode on the CPU; elsewhere a positive value is
            undefined behaviour.
        initial_state: S_{-1}, (b, h, p, n), or (sequences, h, p, n) for packed input. Zeros if not given.
        path: the algorithm and its chunk length; `SsdPath()` if not given.
        cu_seqlens: boundaries (0, ..., t) of sequences packed one after another into a batch of one,
            (sequences + 1,), strictly increasing. Nothing crosses a boundary.

    Returns:
        y (b, t, r, h, p) in the dtype of `v`, and the final state(s), in the shape of `initial_state`.

    Raises:
        ValueError: shapes, devices or values that do not fit.
        TypeError: dtypes that do not fit.
        RuntimeError: `path` asks for a compiled kernel where there is none.
    """
    check_scan(v, k, q, log_decay, initial_state, cu_seqlens)
    path = resolve_path(path, v.device, v.dtype)
    b, t, r, h, p = v.shape
    n = k.shape[-1]
    if initial_state is None:
        rows = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = v.new_zeros((rows, h, p, n), dtype=state_dtype(v.dtype))
    chunk_len = path.chunk_len_or_optimal(n, p, r)
    algorithms = _EXPORTED if torch.compiler.is_exporting() else _ALGORITHMS
    with without_autocast(v.device):
        y, final_state = algorithms[path.algorithm](
            v, k, q, log_decay, initial_state=initial_state, chunk_len=chunk_len, cu_seqlens=cu_seqlens
        )
    return y, final_state
