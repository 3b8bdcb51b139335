"""Mamba-2's state space duality (SSD) on top of the scan."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.scan.checks import check_scan, expect_like, expect_shape, values_are_cheap
from anymamba.scan.fused import ssd_fused
from anymamba.scan.numerics import state_dtype, without_autocast
from anymamba.scan.path import SsdPath
from anymamba.scan.scan import resolve_path, scan


def ssd(
    x: Float[Tensor, "b t h p"],
    dt: Float[Tensor, "b t h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, "*h_or_hp"] | None = None,
    *,
    initial_state: Float[Tensor, "s h p n"] | None = None,
    path: SsdPath | None = None,
    cu_seqlens: Int[Tensor, " s1"] | None = None,
) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "s h p n"]]:
    """Run the selective state space model of Mamba-2 over a sequence.

        h_t = exp(dt_t A) h_{t-1} + dt_t x_t ⊗ B_t        y_t = h_t C_t + D x_t

    Args:
        x: inputs, (b, t, h, p).
        dt: step sizes, (b, t, h), not negative, float32 (float64 for float64 `x`).
        A: decay rates, (h,), not positive, in the dtype of `dt`.
        B: input projections, (b, t, g, n); head h reads group h // (h / g).
        C: output projections, (b, t, g, n).
        D: skip weights, (h,) or (h, p), or none.
        initial_state: (b, h, p, n), or (sequences, h, p, n) for packed input, in the dtype of `dt`. Zeros if not given.
        path: the algorithm and its chunk length; `SsdPath()` if not given.
        cu_seqlens: boundaries of packed sequences, as for `anymamba.scan.scan`.

    Returns:
        y (b, t, h, p) in the dtype of `x`, and the final state(s), in the shape of `initial_state`.

    Raises:
        ValueError: shapes, devices or values that do not fit.
        TypeError: dtypes that do not fit.
    """
    sizes: dict[str, int] = {}
    expect_shape("ssd", "x", x, "b t h p", sizes)
    expect_shape("ssd", "dt", dt, "b t h", sizes)
    expect_shape("ssd", "A", A, "h", sizes)
    expect_shape("ssd", "B", B, "b t g n", sizes)
    expect_shape("ssd", "C", C, "b t g n", sizes)
    expect_like("ssd", "B", B, x.dtype, x.device)
    expect_like("ssd", "C", C, x.dtype, x.device)
    wide = state_dtype(x.dtype)
    expect_like("ssd", "dt", dt, wide, x.device)
    expect_like("ssd", "A", A, wide, x.device)
    if D is not None:
        expect_shape("ssd", "D", D, "h" if D.ndim == 1 else "h p", sizes)
        expect_like("ssd", "D", D, D.dtype, x.device)
    if values_are_cheap(dt) and dt.numel() and A.numel():
        if (smallest := dt.detach().min().item()) < 0:
            raise ValueError(f"ssd: dt must not be negative, got down to {smallest:.6g}")
        if (largest := A.detach().max().item()) > 0:
            raise ValueError(f"ssd: A must not be positive, got up to {largest:.6g}")
    path = resolve_path(path, x.device, x.dtype)
    if path.algorithm == "fused":
        return _fused(x, dt, dt * A, B, C, D, initial_state, path, cu_seqlens)
    v_btrhp = (x * dt.unsqueeze(-1)).to(x.dtype).unsqueeze(2)
    y_btrhp, final_state = scan(
        v_btrhp,
        B.unsqueeze(2),
        C.unsqueeze(2),
        dt * A,
        initial_state=initial_state,
        path=path,
        cu_seqlens=cu_seqlens,
    )
    y = y_btrhp.squeeze(2)
    if D is not None:
        y = torch.addcmul(y, (D if D.ndim == 2 else D.unsqueeze(-1)).to(x.dtype), x)
    return y, final_state


def _fused(
    x_bthp: Tensor,
    dt_bth: Tensor,
    log_decay_bth: Tensor,
    b_btgn: Tensor,
    c_btgn: Tensor,
    skip: Tensor | None,
    initial_state: Tensor | None,
    path: SsdPath,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The same in one operator, which scales x and adds the skip while it has them in cache."""
    v_btrhp, k_btrgn, q_btrgn = x_bthp.unsqueeze(2), b_btgn.unsqueeze(2), c_btgn.unsqueeze(2)
    check_scan(v_btrhp, k_btrgn, q_btrgn, log_decay_bth, initial_state, cu_seqlens)
    b, _, h, p = x_bthp.shape
    n = b_btgn.shape[-1]
    if initial_state is None:
        rows = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = log_decay_bth.new_zeros((rows, h, p, n))
    chunk_len = path.chunk_len_or_optimal(n, p)
    with without_autocast(x_bthp.device):
        y_btrhp, final_state = ssd_fused(
            v_btrhp, k_btrgn, q_btrgn, log_decay_bth, dt_bth, skip, initial_state, chunk_len, cu_seqlens
        )
    return y_btrhp.squeeze(2), final_state
