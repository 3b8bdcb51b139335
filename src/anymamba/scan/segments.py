"""`serial_recalculated` on devices other than a CPU: the chunks of a segment at once, without a loop over them.

A launch costs more than a small chunk's work there. So time is cut into segments of as many chunks as memory allows
(`_MAX_ELEMENTS`, 1 GiB of float32), the chunks of a segment are rows of one batch, and the states at their edges are
one matrix product: with `P[c, s]` the decay from the end of chunk s - 1 to the start of chunk c, and the state `S_0`
that enters the segment followed by what each chunk adds, `S_1, S_2, ...`,

    H_c = Σ_{s ≤ c} P[c, s] S_s        dS_s = Σ_{c ≥ s} P[c, s] dH_c

The number of launches depends on the number of segments only. Nothing is read back from the device, except the
boundaries of packed sequences. Values and gradients agree with `serial_recalculated.py` up to rounding.

Letters: b batch, c, s chunks of a segment, l steps of a chunk, i steps and MIMO ranks of a chunk fused, h heads,
p head width, n state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.core.layout import Span, sequence_spans, split_span
from anymamba.core.operators import allocate_like
from anymamba.scan.chunking import causal_decay, cumulative_decay, resolve_chunk_len
from anymamba.scan.recurrent import ScanInputs
from anymamba.scan.serial_recalculated import Chunk, compute_chunk_grads

_MAX_ELEMENTS = 2**28  # of a segment's intermediate results; a single chunk may need more
_MAX_CHUNKS = 64  # of a segment: the product over its states is quadratic in them


class _Segment(NamedTuple):
    """The chunks of a segment as rows of one batch."""

    chunk: Chunk
    passed_bhcs: Tensor
    time: slice
    chunk_len: int

    @staticmethod
    def cut(scan: ScanInputs, time: slice, chunk_len: int) -> _Segment:
        chunk_len = min(chunk_len, time.stop - time.start)
        v, k, q, log_decay = (_fold(x, time, chunk_len) for x in (scan.v, scan.k, scan.q, scan.log_decay))
        chunk = Chunk.cut(v, k, q, log_decay, slice(None))
        total_bch = chunk.lam_bhl[..., -1].unflatten(0, (scan.v.shape[0], -1))
        lam_bhc = cumulative_decay(F.pad(total_bch.transpose(1, 2), (1, 0)), -1)
        return _Segment(chunk, causal_decay(lam_bhc, scan.initial_state.dtype), time, chunk_len)

    def pass_states(self, state_bhpn: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states that enter the chunks, (b·c, h, p, n), and the one that leaves the segment."""
        b, shape = state_bhpn.shape[0], state_bhpn.shape[1:]
        added_bchpn = self.chunk.added_state().reshape(b, -1, *shape)
        sources_bshpn = torch.cat([state_bhpn.unsqueeze(1), added_bchpn], dim=1)
        states_bchpn = torch.einsum("bhcs,bshpn->bchpn", self.passed_bhcs, sources_bshpn)
        return states_bchpn[:, :-1].flatten(0, 1), states_bchpn[:, -1]

    def pass_gradients(self, dread_bchpn: Tensor, dfinal_bhpn: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the states that leave the chunks, (b·c, h, p, n), and of the one that enters.

        Args:
            dread_bchpn: Gradients of the states that enter the chunks, from the outputs that read them.
            dfinal_bhpn: Gradient of the state that leaves the segment.
        """
        dstates_bchpn = torch.cat([dread_bchpn, dfinal_bhpn.unsqueeze(1)], dim=1)
        dsources_bshpn = torch.einsum("bhcs,bchpn->bshpn", self.passed_bhcs, dstates_bchpn)
        return dsources_bshpn[:, 1:].flatten(0, 1), dsources_bshpn[:, 0]

    def fold(self, x: Tensor) -> Tensor:
        """Cut time into chunks, which become rows, (b, t, ...) -> (b·c, l, ...), with zeros after the last step."""
        return _fold(x, self.time, self.chunk_len)

    def unfold(self, x: Tensor, rows: int) -> Tensor:
        """Invert `fold`, (b·c, l, ...) -> (b, time, ...)."""
        return x.unflatten(0, (rows, -1)).flatten(1, 2)[:, : self.time.stop - self.time.start]


def _fold(x: Tensor, time: slice, chunk_len: int) -> Tensor:
    missing = -(time.stop - time.start) % chunk_len
    padded = F.pad(x[:, time], (0, 0) * (x.ndim - 2) + (0, missing))
    return padded.unflatten(1, (-1, chunk_len)).flatten(0, 1)


def _segments(scan: ScanInputs, span: Span, chunk_len: int) -> list[slice]:
    """Cut a span into segments whose intermediate results, in the backward, fit in memory."""
    (b, _, r, h, p), n = scan.v.shape, scan.k.shape[4]
    i = min(chunk_len, span.stop - span.start) * r
    elements = b * h * (5 * i * i + 4 * p * n + 8 * i * p)  # of a chunk
    chunks = max(1, min(_MAX_CHUNKS, _MAX_ELEMENTS // max(1, elements)))
    return list(split_span(span, chunks * chunk_len))


def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Compute the scan, from `ScanInputs`."""
    scan = ScanInputs(*inputs)
    y, finals = allocate_like(scan.v, scan.initial_state)
    length = resolve_chunk_len(scan.v, scan.k, scan.chunk_len)
    for span in sequence_spans(scan.v.shape[1], scan.cu_seqlens):
        state = scan.initial_state[span.rows]
        for time in _segments(scan, span, length):
            segment = _Segment.cut(scan, time, length)
            entering, state = segment.pass_states(state)
            y[:, time] = segment.unfold(segment.chunk.by_step(segment.chunk.outputs(entering)), len(y))
        finals[span.rows] = state
    return y, finals


def backward(dy: Tensor, dfinal_state: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of v, k, q, log_decay and initial_state."""
    scan = ScanInputs(*inputs)
    v, k, q, log_decay, initial_state = scan[:5]
    dv, dk, dq, da, dinitial = allocate_like(v, k, q, log_decay, initial_state)
    rows, length = len(v), resolve_chunk_len(v, k, scan.chunk_len)
    for span in sequence_spans(v.shape[1], scan.cu_seqlens):
        # 1) Recompute the states that enter the segments.
        times, entering = _segments(scan, span, length), [initial_state[span.rows]]
        for time in times[:-1]:
            entering.append(_Segment.cut(scan, time, length).pass_states(entering[-1])[1])
        # 2) From the last segment to the first, pass back the gradient of the state.
        dstate = dfinal_state[span.rows]
        for time in reversed(times):
            segment = _Segment.cut(scan, time, length)
            chunk, state = segment.chunk, entering.pop()
            dy_bihp = segment.fold(dy).to(initial_state.dtype).flatten(1, 2)
            dread = chunk.read_state_grad(dy_bihp).reshape(rows, -1, *state.shape[1:])
            dleaving, dstate = segment.pass_gradients(dread, dstate)
            grads = compute_chunk_grads(chunk, segment.pass_states(state)[0], dy_bihp, dleaving)
            dv[:, time] = segment.unfold(chunk.by_step(grads.dv_bihp), rows)
            dk[:, time] = segment.unfold(chunk.by_step(grads.dk_bgin.transpose(1, 2)), rows)
            dq[:, time] = segment.unfold(chunk.by_step(grads.dq_bgin.transpose(1, 2)), rows)
            da[:, time] = segment.unfold(grads.da_bhl.transpose(1, 2), rows)
        dinitial[span.rows] = dstate
    return dv, dk, dq, da, dinitial
