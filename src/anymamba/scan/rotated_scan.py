"""Mamba-3's recurrence on the results of its projection: biases, rotation, ranks of values, trapezoidal rule and skip.

It is `trapezoid_scan` on rotated keys and queries of every head, which the kernels compute where they are needed and
never hold in memory.

Letters: b batch, t time, r MIMO rank, g groups, h heads, p head width, n state, c numbers that describe a token's turn,
z sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.core.checks import (
    check_annotated_shapes,
    check_dtypes,
    check_nonpositive,
    check_parameter,
    check_time_steps,
)
from anymamba.core.dtypes import without_autocast
from anymamba.core.layout import first_steps, last_steps, select_real
from anymamba.core.operators import Operator
from anymamba.core.registry import Implementation
from anymamba.ops.rotation import Rotation, rotate, running_rotation
from anymamba.scan.path import ALGORITHMS, SsdPath
from anymamba.scan.scan import check_groups
from anymamba.scan.trapezoidal_scan import add_pending_term, trapezoid


@check_annotated_shapes
def rotated_trapezoid_scan(
    x: Float[Tensor, "b t h p"],
    k: Float[Tensor, "b t r g n"],
    q: Float[Tensor, "b t r g n"],
    k_bias: Float[Tensor, "h r n"],
    q_bias: Float[Tensor, "h r n"],
    rate: Float[Tensor, "b t c"],
    step: Float[Tensor, "b t h"],
    log_decay: Float[Tensor, "b t h"],
    gamma: Float[Tensor, "b t h"],
    kappa: Float[Tensor, "b t h"],
    D: Float[Tensor, " h"],
    value_weight: Float[Tensor, "h r p"] | None = None,
    *,
    state: Float[Tensor, "z h p n"],
    previous_k: Float[Tensor, "z r h n"],
    previous_x: Float[Tensor, "z h p"],
    start: Float[Tensor, "z h *turn"],
    rotation: Rotation = "interleaved",
    path: SsdPath | None = None,
    lengths: Int[Tensor, " b"] | None = None,
    cu_seqlens: Int[Tensor, " z1"] | None = None,
) -> tuple[Float[Tensor, "b t r h p"], Float[Tensor, "z h p n"], Float[Tensor, "z r h n"], Float[Tensor, "z h *turn"]]:
    """Run the recurrence over a sequence.

        v[r] = x value_weight[r]                       k, q = rotated(k + k_bias), rotated(q + q_bias)
        y[r] = trapezoid_scan(v, k, q)[r] + D v[r]

    Args:
        x: inputs.
        k: keys of a group of heads, before bias and rotation.
        q: queries.
        k_bias: of each head and rank, like `q_bias`.
        q_bias: added to the queries.
        rate: how fast a token turns, (b, t, s) or (b, t, h·j·3), see `anymamba.ops.rotation`.
        step: for how long.
        log_decay: never positive, float32 or wider, like `rate`, `step`, `gamma` and `kappa`.
        gamma: weights of a token in its own step.
        kappa: weights of the token before.
        D: skip weights.
        value_weight: of each rank; it may be left out for one rank.
        state: before the first token, of each row or packed sequence.
        previous_k: the keys of the token before, rotated.
        previous_x: its inputs.
        start: the rotation before the first token.
        rotation: which channels turn together, and how.
        path: the algorithm, its chunk length and the pathway; `SsdPath()` if not given.
        lengths: how many leading steps of each row are real; after them `step`, `log_decay`, `gamma` and `kappa` must
            be zero. All if not given.
        cu_seqlens: boundaries of packed sequences.

    Returns:
        y of every rank; and after the last real token the state, the rotated keys, and the rotation.
    """
    path, where = SsdPath.or_default(path), "rotated_trapezoid_scan"
    check_groups(where, x.shape[2], k.shape[3], k.shape[2])
    check_time_steps(where, x.shape[1])
    wide = {"rate": rate, "step": step, "log_decay": log_decay, "gamma": gamma, "kappa": kappa}
    wide |= {"state": state, "start": start}
    alike = {"k": k, "q": q, "previous_k": previous_k, "previous_x": previous_x}
    check_dtypes(where, "x", x, activations=alike, states=wide)
    for name, weight in (("k_bias", k_bias), ("q_bias", q_bias), ("D", D), ("value_weight", value_weight)):
        check_parameter(where, name, weight, x)
    if value_weight is None and k.shape[2] > 1:
        raise ValueError(f"{where}: value_weight must be given for more than one rank, got none for {k.shape[2]}")
    check_nonpositive(where, "log_decay", log_decay, " (a decay is at most 1)")
    with without_autocast(x.device):
        pending = add_pending_term(
            state, values_of_ranks(previous_x, value_weight), previous_k, first_steps(kappa, cu_seqlens)
        )
        y, state, last_k, turned = _operator(
            x,
            k,
            q,
            k_bias,
            q_bias,
            rate,
            step,
            log_decay,
            gamma,
            kappa,
            D,
            value_weight,
            pending,
            start,
            rotation,
            lengths,
            cu_seqlens,
            path.chunk_len,
            path.algorithm,
            path.pathway,
        )
    # A row without tokens keeps what it had.
    return y, state, select_real(lengths, last_k, previous_k), select_real(lengths, turned, start)


def values_of_ranks(x: Tensor, weight_hrp: Tensor | None) -> Tensor:
    """(..., h, p) -> (..., r, h, p)."""
    v = x.unsqueeze(-3)
    return v if weight_hrp is None else v * weight_hrp.transpose(0, 1).to(v.dtype)


def _definition(
    x: Tensor,
    k: Tensor,
    q: Tensor,
    k_bias: Tensor,
    q_bias: Tensor,
    rate: Tensor,
    step: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    kappa: Tensor,
    skip: Tensor,
    value_weight: Tensor | None,
    pending_state: Tensor,
    start: Tensor,
    rotation: Any,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_len: int | None,
    algorithm: str,
    pathway: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    turned = running_rotation(rotation, rate, step, start, cu_seqlens)
    k_btrhn, q_btrhn = rotate(rotation, k, k_bias, turned), rotate(rotation, q, q_bias, turned)
    v_btrhp = values_of_ranks(x, value_weight)
    y, state = trapezoid(
        v_btrhp,
        k_btrhn,
        q_btrhn,
        log_decay,
        gamma,
        kappa,
        pending_state,
        cu_seqlens,
        chunk_len,
        algorithm,
        pathway,
    )
    y = torch.addcmul(y, skip.to(y.dtype).unsqueeze(-1), v_btrhp)
    none = k_btrhn.new_zeros((start.shape[0], *k_btrhn.shape[2:]))
    # Padding takes no steps, so nothing turns there.
    return y, state, last_steps(k_btrhn, cu_seqlens, lengths, none), last_steps(turned, cu_seqlens, None, start)


def _fake(x: Tensor, k: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    state, start = inputs[10:12]
    (b, t, h, p), r, n = x.shape, k.shape[2], k.shape[4]
    return (
        x.new_empty((b, t, r, h, p)),
        torch.empty(state.shape, dtype=state.dtype, device=x.device),
        x.new_empty((state.shape[0], r, h, n)),
        torch.empty(start.shape, dtype=start.dtype, device=x.device),
    )


_operator = Operator(
    "rotated_trapezoid_scan",
    inputs="Tensor x, Tensor k, Tensor q, Tensor k_bias, Tensor q_bias, Tensor rate, Tensor step, Tensor log_decay, "
    "Tensor gamma, Tensor kappa, Tensor D, Tensor? value_weight, Tensor pending_state, Tensor start, str rotation, "
    "Tensor? lengths, Tensor? cu_seqlens, int? chunk_len, str algorithm, str pathway",
    outputs="y, state, k, rotation",
    differentiable=14,
    fake=_fake,
    definition=_definition,
    # The scan inside is a separate operator, which chooses among the algorithms.
    portable=dict.fromkeys(ALGORITHMS, Implementation(_definition)),
    fastest=lambda *_: "fastest",
)
