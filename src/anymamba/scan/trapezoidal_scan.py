"""Mamba-3's trapezoidal rule on the scan: every token counts twice, at its own step and at the next.

    h_t = alpha_t (h_{t-1} + kappa_t Σ_r v_{t-1}[r] ⊗ k_{t-1}[r]) + gamma_t Σ_r v_t[r] ⊗ k_t[r]
    y_t[r] = h_t q_t[r]

with alpha_t = exp(log_decay_t). Two pathways compute it:

- *single*: one scan with the two weights of a token added up, `gamma_t + kappa_{t+1}`; what the look-ahead
`kappa_{t+1}` added to the token's own output is subtracted again. - *double*: two scans, one over tokens and one over
their predecessors.

Both start from the state with the pending `kappa_0` term of the token before, and leave the same state.

Letters: b batch, t time, r, m MIMO ranks, h heads, p head width, g groups, e heads of a group, n state, z sequences,
f the heads of a group and their width fused.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.core.checks import (
    check_annotated_shapes,
    check_cu_seqlens,
    check_dtypes,
    check_nonpositive,
    check_time_steps,
    initial_state_or_zeros,
)
from anymamba.core.dtypes import without_autocast
from anymamba.core.layout import first_steps, shift_earlier, shift_later
from anymamba.scan.path import SsdPath
from anymamba.scan.scan import check_groups, scan_operator


@check_annotated_shapes
def trapezoid_scan(
    v: Float[Tensor, "b t r h p"],
    k: Float[Tensor, "b t r g n"],
    q: Float[Tensor, "b t r g n"],
    log_decay: Float[Tensor, "b t h"],
    gamma: Float[Tensor, "b t h"],
    kappa: Float[Tensor, "b t h"],
    *,
    initial_state: Float[Tensor, "z h p n"] | None = None,
    previous_v: Float[Tensor, "z r h p"] | None = None,
    previous_k: Float[Tensor, "z r g n"] | None = None,
    path: SsdPath | None = None,
    cu_seqlens: Int[Tensor, " z1"] | None = None,
) -> tuple[Float[Tensor, "b t r h p"], Float[Tensor, "z h p n"]]:
    """Run the formula above over a sequence, on keys and queries that are already rotated.

    Args:
        v: values.
        k: keys; head h reads group h // (h / g).
        q: queries.
        log_decay: never positive, float32 or wider, like the next two.
        gamma: weights of a token in its own step.
        kappa: weights of the token before.
        initial_state: h_{-1}, one for each row or packed sequence. Zeros if not given.
        previous_v: the values of the token before the first; none if not given, like the next.
        previous_k: its keys.
        path: the algorithm, its chunk length and the pathway; `SsdPath()` if not given.
        cu_seqlens: boundaries of packed sequences, as for `anymamba.scan.scan`.

    Returns:
        y in the dtype of `v`, and the final state(s).
    """
    path, where = SsdPath.or_default(path), "trapezoid_scan"
    check_groups(where, v.shape[3], k.shape[3], v.shape[2])
    check_time_steps(where, v.shape[1])
    alike = {"k": k, "q": q, "previous_v": previous_v, "previous_k": previous_k}
    check_dtypes(where, "v", v, activations=alike, states={"log_decay": log_decay, "gamma": gamma, "kappa": kappa})
    check_nonpositive(where, "log_decay", log_decay, " (a decay is at most 1)")
    if (previous_v is None) != (previous_k is None):
        raise ValueError(f"{where}: previous_v and previous_k must be given both or neither, got one")
    if cu_seqlens is not None:
        check_cu_seqlens(where, cu_seqlens, v.shape[0], v.shape[1], v.device)
    state = initial_state_or_zeros(where, initial_state, v, (*v.shape[3:], k.shape[4]), cu_seqlens)
    with without_autocast(v.device):
        if previous_v is not None and previous_k is not None:
            state = add_pending_term(state, previous_v, previous_k, first_steps(kappa, cu_seqlens))
        return trapezoid(
            v, k, q, log_decay, gamma, kappa, state, cu_seqlens, path.chunk_len, path.algorithm, path.pathway
        )


def add_pending_term(state: Tensor, v_zrhp: Tensor, k_zrgn: Tensor, kappa_zh: Tensor) -> Tensor:
    """The state with the second weight of its last token, which only the next token's step size decides."""
    (z, r, h, p), groups = v_zrhp.shape, k_zrgn.shape[2]
    weighted_zrhp = v_zrhp.to(state.dtype) * kappa_zh[:, None, :, None]
    weighted_zgfr = weighted_zrhp.reshape(z, r, groups, h // groups * p).permute(0, 2, 3, 1)
    k_zgrn = k_zrgn.to(state.dtype).transpose(1, 2)
    added_zgfn = weighted_zgfr * k_zgrn if r == 1 else weighted_zgfr @ k_zgrn
    return state + added_zgfn.reshape(state.shape)


def trapezoid(
    v: Tensor,
    k: Tensor,
    q: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    kappa: Tensor,
    state: Tensor,
    cu_seqlens: Tensor | None,
    chunk_len: int | None,
    algorithm: str,
    pathway: str,
) -> tuple[Tensor, Tensor]:
    """`trapezoid_scan` from a state with its pending term, unchecked."""

    def run(v: Tensor, weight: Tensor, k: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        weighted = (v * weight[:, :, None, :, None]).to(v.dtype)
        y, final = scan_operator(weighted, k, q, log_decay, state, cu_seqlens, chunk_len, algorithm)
        return y, final

    if pathway == "double":
        y_now, now = run(v, gamma, k, state)
        beta = kappa * torch.exp(log_decay)
        y_before, before = run(shift_later(v, cu_seqlens), beta, shift_later(k, cu_seqlens), torch.zeros_like(state))
        return y_now + y_before, now + before
    ahead = shift_earlier(kappa, cu_seqlens)
    y, final = run(v, gamma + ahead, k, state)
    wide = log_decay.dtype
    own_btgrm = torch.einsum("btrgn,btmgn->btgrm", q.to(wide), k.to(wide))
    weight_btgerm = ahead.unflatten(2, (own_btgrm.shape[2], -1))[..., None, None] * own_btgrm.unsqueeze(3)
    if v.shape[2] == 1:
        return torch.addcmul(
            y, weight_btgerm.flatten(2, 3)[..., 0].transpose(2, 3).unsqueeze(-1).to(y.dtype), v, value=-1
        ), final
    taken = torch.einsum("bthrm,btmhp->btrhp", weight_btgerm.flatten(2, 3).to(y.dtype), v)
    return y - taken, final
