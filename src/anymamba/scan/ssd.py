"""Mamba-2's state space duality (SSD): the scan of scaled inputs, with a skip."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.core.checks import (
    can_read_values,
    check_annotated_shapes,
    check_dtypes,
    check_initial_state,
    check_nonpositive,
    check_parameter,
    check_shape,
    check_tensor,
)
from anymamba.core.dtypes import without_autocast
from anymamba.core.operators import Operator, allocate_like
from anymamba.core.registry import Implementation
from anymamba.scan.path import ALGORITHMS, SsdPath
from anymamba.scan.scan import check_groups, check_inputs_finite, scan_operator


@check_annotated_shapes
def ssd(
    x: Float[Tensor, "b t h p"],
    dt: Float[Tensor, "b t h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, "*h_or_hp"] | None = None,
    *,
    initial_state: Float[Tensor, "z h p n"] | None = None,
    path: SsdPath | None = None,
    cu_seqlens: Int[Tensor, " z1"] | None = None,
) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "z h p n"]]:
    """Run the selective state space model of Mamba-2 over a sequence.

        h_t = exp(dt_t A) h_{t-1} + dt_t x_t ⊗ B_t        y_t = h_t C_t + D x_t

    Args:
        x: Inputs.
        dt: Step sizes, not negative, float32 (float64 for float64 `x`).
        A: Decay rates, never positive, in the dtype of `dt`.
        B: Input projections; head h reads group h // (h / g).
        C: Output projections.
        D: Skip weights, (h,) or (h, p). Default: no skip.
        initial_state: State of each row or packed sequence, in the dtype of `dt`. Default: zeros.
        path: Algorithm and chunk length. Default: `SsdPath()`.
        cu_seqlens: Boundaries of packed sequences, as in `anymamba.scan.scan`.

    Returns:
        y in the dtype of `x`, and the final state(s).

    Raises:
        ValueError: Shapes, devices or values do not match.
        TypeError: Dtypes do not match.
        RuntimeError: `path` requests a compiled kernel, and there is none.
    """
    path = SsdPath.or_default(path)
    (h, p), (g, n) = x.shape[2:], B.shape[2:]
    check_groups("ssd", h, g, 1)
    check_dtypes("ssd", "x", x, activations={"B": B, "C": C}, states={"dt": dt, "A": A})
    if D is not None:
        check_tensor("ssd", "D", D)
        check_shape("ssd", "D", D, "h" if D.ndim == 1 else "h p", {"h": h, "p": p})
        check_parameter("ssd", "D", D, x)
    if can_read_values(dt) and dt.numel() and (smallest := dt.detach().min().item()) < 0:
        raise ValueError(f"ssd: dt must not be negative, got down to {smallest:.6g}")
    check_nonpositive("ssd", "A", A)
    state = check_initial_state("ssd", initial_state, x, (h, p, n), cu_seqlens)
    check_inputs_finite("ssd", x=x, dt=dt, A=A, B=B, C=C, D=D, initial_state=state)
    with without_autocast(x.device):
        y, final_state = _operator(x, dt, dt * A, B, C, D, state, cu_seqlens, path.chunk_len, path.algorithm)
    return y, final_state


def _definition(
    x: Tensor, dt: Tensor, log_decay: Tensor, b_btgn: Tensor, c_btgn: Tensor, skip: Tensor | None, *scan_inputs: Any
) -> tuple[Tensor, Tensor]:
    v_btrhp = (x * dt.unsqueeze(-1)).to(x.dtype).unsqueeze(2)
    y_btrhp, final_state = scan_operator(v_btrhp, b_btgn.unsqueeze(2), c_btgn.unsqueeze(2), log_decay, *scan_inputs)
    y = y_btrhp.squeeze(2)
    if skip is not None:
        y = torch.addcmul(y, (skip if skip.ndim == 2 else skip.unsqueeze(-1)).to(x.dtype), x)
    return y, final_state


_operator = Operator(
    "ssd",
    inputs="Tensor x, Tensor dt, Tensor log_decay, Tensor B, Tensor C, Tensor? D, Tensor initial_state, "
    "Tensor? cu_seqlens, int? chunk_len, str algorithm",
    outputs="y, final_state",
    differentiable=7,
    fake=lambda x, dt, log_decay, b, c, skip, state, *_: allocate_like(x, state),
    definition=_definition,
    # The scan inside is a separate operator, which chooses among the algorithms.
    portable=dict.fromkeys(ALGORITHMS, Implementation(_definition)),
    fastest=lambda *_: "fastest",
    may_be_infinite=frozenset({"log_decay"}),
)
