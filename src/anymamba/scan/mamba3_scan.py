"""Mamba-3's recurrence: the trapezoidal rule on the scan, and the same with biases, rotation, ranks and skip.

    h_t = alpha_t (h_{t-1} + kappa_t Σ_r v_{t-1}[r] ⊗ k_{t-1}[r]) + gamma_t Σ_r v_t[r] ⊗ k_t[r]
    y_t[r] = h_t q_t[r]

with alpha_t = exp(log_decay_t): every token enters the state twice, at its own step and at the next. Two pathways
compute it:

- *single*: one scan over the predecessors of the tokens, each with its two weights added up. A token's own term is
  added to what it reads, so no output depends on a later token, and nothing is subtracted:

      m_t = exp(a_{t-1}) m_{t-1} + (gamma_{t-1} + kappa_t) u_{t-1}        u_t = Σ_r v_t[r] ⊗ k_t[r]
      y_t[r] = exp(a_t) m_t q_t[r] + gamma_t u_t q_t[r]                  h_T = exp(a_T) m_T + gamma_T u_T

  `exp(a_t)` multiplies what was read, because folded into values of half precision it would underflow.
- *double*: two scans, one over tokens and one over their predecessors.

Both start from the state with the pending `kappa_0` term of the token before (so `m_0`, which has no predecessor), and
leave the same state.

`trapezoid_scan` takes keys and queries that are already rotated. `rotated_trapezoid_scan` takes the results of a
block's projection and rotates them; the kernels compute rotated keys and queries where they are needed and never hold
them in memory.

Letters: b batch, t time, r, m MIMO ranks, h heads, p head width, g groups, e heads of a group, n state, z sequences,
f the heads of a group and their width fused, c numbers that describe a token's rotation.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.core.checks import (
    check_annotated_shapes,
    check_dtypes,
    check_initial_state,
    check_nonpositive,
    check_parameter,
    check_time_steps,
)
from anymamba.core.dtypes import without_autocast
from anymamba.core.layout import first_steps, last_steps, select_real, shift_later
from anymamba.core.operators import Operator, allocate_like
from anymamba.core.registry import Implementation
from anymamba.ops.rotation import RotationKind, cumulative_rotation, rotate
from anymamba.scan.chunking import decay_factor
from anymamba.scan.path import ALGORITHMS, SsdPath
from anymamba.scan.scan import check_groups, check_inputs_finite, scan_operator


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
        v: Values.
        k: Keys; head h reads group h // (h / g).
        q: Queries.
        log_decay: Log-decays, never positive, float32 (float64 for float64 `v`).
        gamma: Weights of a token in its own step, in the dtype of `log_decay`.
        kappa: Weights of the token before, in the dtype of `log_decay`.
        initial_state: h_{-1} of each row or packed sequence. Default: zeros.
        previous_v: Values of the token before the first. Default: no token.
        previous_k: Keys of the token before the first; given if and only if `previous_v` is.
        path: Algorithm, chunk length and pathway. Default: `SsdPath()`.
        cu_seqlens: Boundaries of packed sequences, as in `anymamba.scan.scan`.

    Returns:
        y in the dtype of `v`, and the final state(s).

    Raises:
        ValueError: Shapes, devices or values do not match, or only one of `previous_v` and `previous_k` is given.
        TypeError: Dtypes do not match.
    """
    path, where = SsdPath.or_default(path), "trapezoid_scan"
    check_groups(where, v.shape[3], k.shape[3], v.shape[2])
    activations = {"k": k, "q": q, "previous_v": previous_v, "previous_k": previous_k}
    states = {"log_decay": log_decay, "gamma": gamma, "kappa": kappa}
    check_dtypes(where, "v", v, activations=activations, states=states)
    check_nonpositive(where, "log_decay", log_decay, " (a decay is at most 1)")
    if (previous_v is None) != (previous_k is None):
        raise ValueError(f"{where}: previous_v and previous_k must be given both or neither, got one")
    state = check_initial_state(where, initial_state, v, (*v.shape[3:], k.shape[4]), cu_seqlens)
    check_inputs_finite(where, v=v, **activations, **states, initial_state=state)
    with without_autocast(v.device):
        if previous_v is not None and previous_k is not None:
            state = add_outer_products(state, previous_v, previous_k, first_steps(kappa, cu_seqlens))
        tokens = (v, k, q, log_decay, gamma, kappa)
        return _run_pathway(tokens, state, cu_seqlens, path.chunk_len, path.algorithm, path.pathway)


def add_outer_products(state: Tensor, v_zrhp: Tensor, k_zrgn: Tensor, weight_zh: Tensor) -> Tensor:
    """Return `state + weight Σ_r v[r] ⊗ k[r]`, in the dtype of the state.

    With kappa of a first token as the weight it adds the pending term of the token before it.
    """
    (z, r, h, p), groups = v_zrhp.shape, k_zrgn.shape[2]
    weighted_zrhp = v_zrhp.to(state.dtype) * weight_zh[:, None, :, None]
    weighted_zgfr = weighted_zrhp.reshape(z, r, groups, h // groups * p).permute(0, 2, 3, 1)
    k_zgrn = k_zrgn.to(state.dtype).transpose(1, 2)
    term_zgfn = weighted_zgfr * k_zgrn if r == 1 else weighted_zgfr @ k_zgrn
    return state + term_zgfn.reshape(state.shape)


def _run_pathway(
    tokens: tuple[Tensor, ...],
    state: Tensor,
    cu_seqlens: Tensor | None,
    chunk_len: int | None,
    algorithm: str,
    pathway: str,
) -> tuple[Tensor, Tensor]:
    """Compute `trapezoid_scan`, unchecked, from a state with its pending term; `tokens` are its first six inputs."""
    v, k, q, log_decay, gamma, kappa = tokens
    # Float16 lacks the range: weights may be large or small, and a state is read before its decay.
    q = q.to(log_decay.dtype if v.dtype == torch.float16 else v.dtype)

    def run(v: Tensor, weight: Tensor, k: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        weighted = (v * weight[:, :, None, :, None]).to(q.dtype)
        y, final = scan_operator(weighted, k.to(q.dtype), q, log_decay, state, cu_seqlens, chunk_len, algorithm)
        return y, final

    previous_v, previous_k = shift_later(v, cu_seqlens), shift_later(k, cu_seqlens)
    if pathway == "double":
        y_now, now = run(v, gamma, k, log_decay, state)
        beta = kappa * torch.exp(log_decay)
        y_before, before = run(previous_v, beta, previous_k, log_decay, torch.zeros_like(state))
        return (y_now + y_before).to(v.dtype), now + before

    # 1) Scan the predecessors, each with both of its weights. A first token has none: the state holds its pending term.
    weight = shift_later(gamma, cu_seqlens) + kappa
    read, entering = run(previous_v, weight, previous_k, shift_later(log_decay, cu_seqlens), state)
    # 2) Decay what a token read by its own decay, and add its own term.
    decay = decay_factor(log_decay, log_decay.dtype)
    y = torch.addcmul(_same_step_term(v, k, q, gamma), decay[:, :, None, :, None], read.to(decay.dtype))
    # 3) Do the same to the state before the last token.
    last_v, last_k, last_gamma, last_decay = (last_steps(x, cu_seqlens, None, x) for x in (v, k, gamma, decay))
    return y.to(v.dtype), add_outer_products(last_decay[..., None, None] * entering, last_v, last_k, last_gamma)


def _same_step_term(v: Tensor, k: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    """Return `weight_t Σ_m <q_t[r], k_t[m]> v_t[m]`, (b, t, r, h, p), in the dtype of the weights."""
    acc_dtype, groups = weight.dtype, k.shape[3]
    scores_btgrm = torch.einsum("btrgn,btmgn->btgrm", q.to(acc_dtype), k.to(acc_dtype))
    weighted_btgerm = weight.unflatten(2, (groups, -1))[..., None, None] * scores_btgrm.unsqueeze(3)
    weighted_bthrm = weighted_btgerm.flatten(2, 3)
    if v.shape[2] == 1:
        return weighted_bthrm[..., 0].transpose(2, 3).unsqueeze(-1) * v
    return torch.einsum("bthrm,btmhp->btrhp", weighted_bthrm, v.to(acc_dtype))


@check_annotated_shapes
def rotated_trapezoid_scan(
    x: Float[Tensor, "b t h p"],
    k: Float[Tensor, "b t r g n"],
    q: Float[Tensor, "b t r g n"],
    k_bias: Float[Tensor, "h r n"],
    q_bias: Float[Tensor, "h r n"],
    angular_rate: Float[Tensor, "b t c"],
    dt: Float[Tensor, "b t h"],
    log_decay: Float[Tensor, "b t h"],
    gamma: Float[Tensor, "b t h"],
    kappa: Float[Tensor, "b t h"],
    D: Float[Tensor, " h"],
    value_weight: Float[Tensor, "h r p"] | None = None,
    *,
    initial_state: Float[Tensor, "z h p n"],
    previous_k: Float[Tensor, "z r h n"],
    previous_x: Float[Tensor, "z h p"],
    initial_rotation: Float[Tensor, "z h *angle"],
    rotation_kind: RotationKind = "interleaved",
    path: SsdPath | None = None,
    lengths: Int[Tensor, " b"] | None = None,
    cu_seqlens: Int[Tensor, " z1"] | None = None,
) -> tuple[Float[Tensor, "b t r h p"], Float[Tensor, "z h p n"], Float[Tensor, "z r h n"], Float[Tensor, "z h *angle"]]:
    """Run the recurrence over a sequence.

        v[r] = x value_weight[r]                       k, q = rotated(k + k_bias), rotated(q + q_bias)
        y[r] = trapezoid_scan(v, k, q)[r] + D v[r]

    Args:
        x: Inputs.
        k: Keys of each group of heads, before bias and rotation.
        q: Queries of each group of heads, before bias and rotation.
        k_bias: Key bias of each head and rank.
        q_bias: Query bias of each head and rank.
        angular_rate: Rates of rotation, (b, t, s) or (b, t, h·j·3), see `anymamba.ops.rotation`.
        dt: Step sizes, multiplied with the rates.
        log_decay: Log-decays, never positive; float32 or wider, like the rates, `dt`, `gamma` and `kappa`.
        gamma: Weights of a token in its own step.
        kappa: Weights of the token before.
        D: Skip weights.
        value_weight: Value weights of each rank; optional for one rank.
        initial_state: State before the first token, of each row or packed sequence.
        previous_k: Rotated keys of the token before the first.
        previous_x: Inputs of the token before the first.
        initial_rotation: Rotation before the first token.
        rotation_kind: Which channels rotate together, and how.
        path: Algorithm, chunk length and pathway. Default: `SsdPath()`.
        lengths: Number of leading steps of each row that are real; `dt`, `log_decay`, `gamma` and `kappa` must be zero
            after them. Default: all.
        cu_seqlens: Boundaries of packed sequences.

    Returns:
        y of every rank; and after the last real token the state, the rotated keys, and the rotation.

    Raises:
        ValueError: Shapes, devices or values do not match.
        TypeError: Dtypes do not match.
    """
    path, where = SsdPath.or_default(path), "rotated_trapezoid_scan"
    check_groups(where, x.shape[2], k.shape[3], k.shape[2])
    check_time_steps(where, x.shape[1])
    states = {"angular_rate": angular_rate, "dt": dt, "log_decay": log_decay, "gamma": gamma, "kappa": kappa}
    states |= {"initial_state": initial_state, "initial_rotation": initial_rotation}
    activations = {"k": k, "q": q, "previous_k": previous_k, "previous_x": previous_x}
    check_dtypes(where, "x", x, activations=activations, states=states)
    for name, weight in (("k_bias", k_bias), ("q_bias", q_bias), ("D", D), ("value_weight", value_weight)):
        check_parameter(where, name, weight, x)
    if value_weight is None and k.shape[2] > 1:
        raise ValueError(f"{where}: value_weight must be given for more than one rank, got none for {k.shape[2]}")
    check_nonpositive(where, "log_decay", log_decay, " (a decay is at most 1)")
    check_inputs_finite(where, previous_k=previous_k, previous_x=previous_x, initial_state=initial_state, kappa=kappa)
    with without_autocast(x.device):
        previous_v, first_kappa = expand_ranks(previous_x, value_weight), first_steps(kappa, cu_seqlens)
        pending_state = add_outer_products(initial_state, previous_v, previous_k, first_kappa)
        tensors = (x, k, q, k_bias, q_bias, angular_rate, dt, log_decay, gamma, kappa, D, value_weight)
        options = (rotation_kind, lengths, cu_seqlens, path.chunk_len, path.algorithm, path.pathway)
        y, state, last_k, rotation = _operator(*tensors, pending_state, initial_rotation, *options)
    # A row without tokens keeps what it had.
    return y, state, select_real(lengths, last_k, previous_k), select_real(lengths, rotation, initial_rotation)


def expand_ranks(x: Tensor, weight_hrp: Tensor | None) -> Tensor:
    """Return the values of every rank, (..., h, p) -> (..., r, h, p)."""
    v = x.unsqueeze(-3)
    return v if weight_hrp is None else v * weight_hrp.transpose(0, 1).to(v.dtype)


def _definition(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotate keys and queries, and run the scan. The inputs are those of the operator, in its order."""
    x, k, q, k_bias, q_bias, angular_rate, dt, log_decay, gamma, kappa, skip, value_weight, *others = inputs
    pending_state, initial_rotation, rotation_kind, lengths, cu_seqlens, *path = others
    rotation = cumulative_rotation(rotation_kind, angular_rate, dt, initial_rotation, cu_seqlens)
    k_btrhn, q_btrhn = rotate(rotation_kind, k, k_bias, rotation), rotate(rotation_kind, q, q_bias, rotation)
    v_btrhp = expand_ranks(x, value_weight)
    tokens = (v_btrhp, k_btrhn, q_btrhn, log_decay, gamma, kappa)
    y, state = _run_pathway(tokens, pending_state, cu_seqlens, *path)
    y = torch.addcmul(y, skip.to(y.dtype).unsqueeze(-1), v_btrhp)
    no_k = k_btrhn.new_zeros((initial_rotation.shape[0], *k_btrhn.shape[2:]))
    last_k = last_steps(k_btrhn, cu_seqlens, lengths, no_k)
    # Padding takes no steps, so nothing rotates there.
    return y, state, last_k, last_steps(rotation, cu_seqlens, None, initial_rotation)


def _fake(x: Tensor, k: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (b, t, h, p), r, n = x.shape, k.shape[2], k.shape[4]
    state, rotation = allocate_like(*inputs[10:12])
    return x.new_empty((b, t, r, h, p)), state, x.new_empty((state.shape[0], r, h, n)), rotation


_operator = Operator(
    "rotated_trapezoid_scan",
    inputs="Tensor x, Tensor k, Tensor q, Tensor k_bias, Tensor q_bias, Tensor angular_rate, Tensor dt, "
    "Tensor log_decay, Tensor gamma, Tensor kappa, Tensor D, Tensor? value_weight, Tensor pending_state, "
    "Tensor initial_rotation, str rotation_kind, Tensor? lengths, Tensor? cu_seqlens, int? chunk_len, str algorithm, "
    "str pathway",
    outputs="y, state, k, rotation",
    differentiable=14,
    fake=_fake,
    definition=_definition,
    # The scan inside is a separate operator, which chooses among the algorithms.
    portable=dict.fromkeys(ALGORITHMS, Implementation(_definition)),
    fastest=lambda *_: "fastest",
    may_be_infinite=frozenset({"log_decay"}),
)
