"""The scan one chunk at a time, with a backward derived by hand that keeps the inputs only.

Forward and backward walk over the chunks and hold one chunk's l×l blocks at a time, so that they stay in a CPU's cache;
`segments.py` has the same computation for other devices, many chunks at once. The backward first recomputes the
states that enter the chunks, then walks from the last chunk to the first with `G`, the gradient of the state that
leaves the chunk. With `U = exp(Lam) dy`, `M` the decay between steps, `W = scores ∘ M` and `rho = exp(Lam_end - Lam)`:

    dv     = Wᵀ dy + rho (k Gᵀ)                    dscores = (dy vᵀ) ∘ M, summed over the heads of a group
    dq     = U H + dscores k                       dk      = dscoresᵀ q + (rho v) G
    G     <- exp(Lam_end) G + Uᵀ q

An exponent is a sum of log-decays over an interval, and it passes its gradient to exactly those (no differences of
large sums, so nothing cancels). With `E = (dy vᵀ) ∘ W` the gradient on the exponent `Lam_l - Lam_s`,
`out_l = <U_l, H q_l>` on `Lam_l`, `in_l = <v_l, rho_l G k_l>` on `Lam_end - Lam_l`, and `keep = exp(Lam_end) <G, H>` on
`Lam_end`:

    da_k   = Σ_{l ≥ k} out_l + Σ_{l < k} in_l + keep + Σ_{l ≥ k} Σ_{s < k} E[l, s]

Letters: b batch, l steps of the chunk, i, j = (l r) steps and MIMO ranks fused, g groups, e heads of a group,
m = (e p) the heads of a group and their width fused, h = (g e), p head width, n state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.core.layout import sequence_spans, split_span
from anymamba.core.operators import allocate_like
from anymamba.scan.chunking import cumulative_decay, decay_between, decay_factor, resolve_chunk_len
from anymamba.scan.recurrent import ScanInputs
from anymamba.scan.serial import fuse_ranks


class Chunk(NamedTuple):
    """One chunk in the state's dtype, with its decays."""

    v_bihp: Tensor
    k_bgin: Tensor
    q_bgin: Tensor
    lam_bhl: Tensor
    from_start_bih1: Tensor
    to_end_bih1: Tensor
    kept_bh11: Tensor

    @staticmethod
    def cut(v: Tensor, k: Tensor, q: Tensor, log_decay: Tensor, time: slice) -> Chunk:
        """Cut a chunk out of the inputs of a scan."""
        dtype, rank = state_dtype(v.dtype), v.shape[2]
        lam_bhl = cumulative_decay(log_decay[:, time].transpose(1, 2), -1)
        end_bh1 = lam_bhl[..., -1:]
        from_start_blh = decay_factor(lam_bhl, dtype).transpose(1, 2)
        to_end_blh = decay_factor(end_bh1 - lam_bhl, dtype).transpose(1, 2)
        if rank > 1:
            from_start_blh = from_start_blh.repeat_interleave(rank, dim=1)
            to_end_blh = to_end_blh.repeat_interleave(rank, dim=1)
        return Chunk(
            v[:, time].to(dtype).flatten(1, 2),
            k[:, time].to(dtype).flatten(1, 2).transpose(1, 2),
            q[:, time].to(dtype).flatten(1, 2).transpose(1, 2),
            lam_bhl,
            from_start_blh.unsqueeze(-1),
            to_end_blh.unsqueeze(-1),
            decay_factor(end_bh1, dtype).unsqueeze(-1),
        )

    @property
    def rank(self) -> int:
        """Return the MIMO rank."""
        return self.v_bihp.shape[1] // self.lam_bhl.shape[2]

    @property
    def groups(self) -> tuple[int, int]:
        """Return the number of groups, and of heads of a group."""
        g = self.k_bgin.shape[1]
        return g, self.v_bihp.shape[2] // g

    def by_step(self, x_bi: Tensor) -> Tensor:
        """Separate steps from ranks, (b, i, ...) -> (b, l, r, ...)."""
        return x_bi.unflatten(1, (self.lam_bhl.shape[2], self.rank))

    def by_group(self, x_bihp: Tensor) -> Tensor:
        """Fuse the heads of a group and their width, (b, i, h, p) -> (b, g, i, m)."""
        return x_bihp.unflatten(2, self.groups).flatten(3).transpose(1, 2)

    def by_head(self, x_bgim: Tensor) -> Tensor:
        """Invert `by_group`, (b, g, i, m) -> (b, i, h, p)."""
        return x_bgim.transpose(1, 2).reshape(self.v_bihp.shape)

    def state_by_group(self, state_bhpn: Tensor) -> Tensor:
        """Fuse the heads of a group and their width in a state, (b, h, p, n) -> (b, g, m, n)."""
        return state_bhpn.unflatten(1, self.groups).flatten(2, 3)

    def decay(self) -> Tensor:
        """Return the decay between the fused steps, 1 to earlier ones, (b, h, i, i)."""
        return fuse_ranks(decay_between(self.lam_bhl, self.v_bihp.dtype), self.rank)

    def causal(self, x_bgii: Tensor) -> Tensor:
        """Set `x` to 0 for earlier steps, in place: once per group, so that no head needs a mask."""
        if self.rank == 1:
            return x_bgii.tril_()
        length = self.lam_bhl.shape[2]
        return x_bgii.mul_(fuse_ranks(x_bgii.new_ones(length, length).tril_(), self.rank))

    def scores(self) -> Tensor:
        """Return `<q_i, k_j>` per group, 0 to earlier steps, (b, g, i, i)."""
        return self.causal(self.q_bgin @ self.k_bgin.transpose(-1, -2))

    def weigh(self, scores_bgii: Tensor, x_bhii: Tensor) -> Tensor:
        """Return `scores ∘ x`, the scores of a group applied to each of its heads, (b, h, i, i)."""
        return (x_bhii.unflatten(1, self.groups) * scores_bgii.unsqueeze(2)).flatten(1, 2)

    def added_state(self) -> Tensor:
        """Return what the chunk alone adds to the state at its end, (b, g, m, n)."""
        return self.by_group(self.v_bihp * self.to_end_bih1).transpose(-1, -2) @ self.k_bgin

    def next_state(self, state_bhpn: Tensor) -> Tensor:
        """Return the state after the chunk, from the one before it."""
        return torch.addcmul(self.added_state().reshape(state_bhpn.shape), self.kept_bh11, state_bhpn)

    def read(self, state_bhpn: Tensor) -> Tensor:
        """Read the entering state with each query, before its decay, (b, i, h, p)."""
        return self.by_head(self.q_bgin @ self.state_by_group(state_bhpn).transpose(-1, -2))

    def read_state_grad(self, dy_bihp: Tensor) -> Tensor:
        """Return the gradient of the entering state from the outputs that read it, `Uᵀ q`, (b, g, m, n)."""
        return self.by_group(dy_bihp * self.from_start_bih1).transpose(-1, -2) @ self.q_bgin

    def outputs(self, state_bhpn: Tensor) -> Tensor:
        """Return the outputs, (b, i, h, p)."""
        y_diag_bhip = self.weigh(self.scores(), self.decay()) @ self.v_bihp.transpose(1, 2)
        return (self.read(state_bhpn) * self.from_start_bih1).add_(y_diag_bhip.transpose(1, 2))


class ChunkGrads(NamedTuple):
    """Gradients of one chunk's inputs and of the state that enters it."""

    dv_bihp: Tensor
    dk_bgin: Tensor
    dq_bgin: Tensor
    da_bhl: Tensor
    dstate_bhpn: Tensor


def compute_chunk_grads(chunk: Chunk, state_bhpn: Tensor, dy_bihp: Tensor, g_bhpn: Tensor) -> ChunkGrads:
    """Compute the formulas at the top of this file for one chunk, from `G` of the state that leaves it."""
    g_bgmn, h_bgmn = chunk.state_by_group(g_bhpn), chunk.state_by_group(state_bhpn)

    # 1) Outputs read the entering state: U, and the gradient `out` on Lam.
    u_bihp = dy_bihp * chunk.from_start_bih1
    u_bgim = chunk.by_group(u_bihp)
    out_bih = (u_bihp * chunk.read(state_bhpn)).sum(-1)

    # 2) Outputs read earlier values of the chunk: W, the gradient of the scores, and that of the exponents in M.
    decay_bhii, scores_bgii = chunk.decay(), chunk.scores()
    dw_bhii = dy_bihp.transpose(1, 2) @ chunk.v_bihp.permute(0, 2, 3, 1)
    dw_bhii *= decay_bhii
    w_bhii = chunk.weigh(scores_bgii, decay_bhii)
    dscores_bgii = chunk.causal(dw_bhii.unflatten(1, chunk.groups).sum(2))
    crossing_bhl = _sum_crossing(chunk.weigh(scores_bgii, dw_bhii), chunk.rank)

    # 3) Values enter the state that leaves: their gradient, that of the keys, and `in` on Lam_end - Lam.
    dv_in_bihp = chunk.by_head(chunk.k_bgin @ g_bgmn.transpose(-1, -2)) * chunk.to_end_bih1
    in_bih = (chunk.v_bihp * dv_in_bihp).sum(-1)
    dk_in_bgin = chunk.by_group(chunk.v_bihp * chunk.to_end_bih1) @ g_bgmn

    # 4) The entering state is kept: `keep` on Lam_end. Every exponent's gradient goes to the log-decays it sums.
    keep_bh1 = (chunk.kept_bh11 * g_bhpn * state_bhpn).sum((-1, -2)).unsqueeze(-1)
    out_bhl, in_bhl = (chunk.by_step(x).sum(2).transpose(1, 2) for x in (out_bih, in_bih))
    out_after_bhl = out_bhl.flip(-1).cumsum(-1).flip(-1)
    in_before_bhl = F.pad(in_bhl[..., :-1], (1, 0)).cumsum(-1)
    # 5) Add up what each input has received.
    return ChunkGrads(
        dv_bihp=dv_in_bihp.add_((w_bhii.transpose(-1, -2) @ dy_bihp.transpose(1, 2)).transpose(1, 2)),
        dk_bgin=dscores_bgii.transpose(-1, -2) @ chunk.q_bgin + dk_in_bgin,
        dq_bgin=dscores_bgii @ chunk.k_bgin + u_bgim @ h_bgmn,
        da_bhl=out_after_bhl + in_before_bhl + keep_bh1 + crossing_bhl,
        dstate_bhpn=torch.addcmul(
            (u_bgim.transpose(-1, -2) @ chunk.q_bgin).reshape(g_bhpn.shape), chunk.kept_bh11, g_bhpn
        ),
    )


def _sum_crossing(e_bhii: Tensor, rank: int) -> Tensor:
    """Return `Σ_{l ≥ k} Σ_{s < k} E[l, s]` for every k, (b, h, l): a running sum along s, then a sum over l ≥ k."""
    b, h, i, _ = e_bhii.shape
    e_bhll = e_bhii if rank == 1 else e_bhii.view(b, h, i // rank, rank, i // rank, rank).sum((3, 5))
    sums_bhl = e_bhll[:, :, 1:, :-1].cumsum(-1).tril_().sum(-2)
    return F.pad(sums_bhl, (1, 0))


def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Compute the scan, from `ScanInputs`."""
    v, k, q, log_decay, initial_state, cu_seqlens, chunk_len, _ = ScanInputs(*inputs)
    (y,) = allocate_like(v)
    states, length = initial_state.clone(), resolve_chunk_len(v, k, chunk_len)
    for span in sequence_spans(v.shape[1], cu_seqlens):
        for time in split_span(span, length):
            chunk = Chunk.cut(v, k, q, log_decay, time)
            y[:, time] = chunk.by_step(chunk.outputs(states[span.rows]))
            states[span.rows] = chunk.next_state(states[span.rows])
    return y, states


def backward(dy: Tensor, dfinal_state: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of v, k, q, log_decay and initial_state."""
    v, k, q, log_decay, initial_state, cu_seqlens, chunk_len, _ = ScanInputs(*inputs)
    dv, dk, dq, da = allocate_like(v, k, q, log_decay)
    dstates, length = dfinal_state.clone(), resolve_chunk_len(v, k, chunk_len)
    for span in sequence_spans(v.shape[1], cu_seqlens):
        # 1) Recompute the states that enter the chunks.
        times, entering = list(split_span(span, length)), [initial_state[span.rows]]
        for time in times[:-1]:
            entering.append(Chunk.cut(v, k, q, log_decay, time).next_state(entering[-1]))
        # 2) From the last chunk to the first, pass back the gradient of the state.
        for time in reversed(times):
            chunk = Chunk.cut(v, k, q, log_decay, time)
            dy_bihp = dy[:, time].to(initial_state.dtype).flatten(1, 2)
            grads = compute_chunk_grads(chunk, entering.pop(), dy_bihp, dstates[span.rows])
            dv[:, time] = chunk.by_step(grads.dv_bihp)
            dk[:, time] = chunk.by_step(grads.dk_bgin.transpose(1, 2))
            dq[:, time] = chunk.by_step(grads.dq_bgin.transpose(1, 2))
            da[:, time] = grads.da_bhl.transpose(1, 2)
            dstates[span.rows] = grads.dstate_bhpn
    return dv, dk, dq, da, dstates
