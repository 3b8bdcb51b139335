"""How time is cut into chunks, how decays between steps are computed, and the final state without the outputs.

§ Chunks. A chunk never crosses the boundary of a packed sequence, so nothing of one sequence can reach another, not
even a NaN.

§ Precision rules that every algorithm of the scan shares.

States, cumulative sums and exponentials are float32 for inputs up to float32 and float64 for float64 inputs.
Two hazards are handled here, once:

- **Cancellation.** The decay between two steps is `exp(Lam_l - Lam_s)` with `Lam` a running sum of log-decays. After a
  hard reset (log-decay of -100 or -1e8) a float32 `Lam` has no digits left for the small decays that follow. So `Lam`
  is summed and subtracted in float64 (where the device has it) and only the difference is rounded, and a log-decay is
  cut at -1000, which is a factor of zero in either precision.
- **Denormals.** A decay that underflows gradually makes x86 arithmetic ten times slower. An exponent below
  `log(smallest normal) + 18` becomes a factor of exactly zero; the 18 leaves eight decades for the numbers that the
  factor is multiplied with.

§ The final state, for ranks that share a sequence. Without the outputs it is one matrix product:

    S_T = exp(Σ_t a_t) S_{-1} + Σ_t exp(Σ_{s>t} a_s) v_t ⊗ k_t

Letters: b batch, t time, r MIMO rank, h heads, p head width, g groups, n state, c chunks, l steps of a chunk,
f the heads of a group and their width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anymamba.core.dtypes import accumulation_dtype
from anymamba.core.layout import sequence_spans
from anymamba.core.operators import is_tracing
from anymamba.scan.path import SsdPath


class ChunkLayout:
    """A table of equal chunks of time, padded with zeros at the end of each sequence.

    Zeros are inert: a log-decay of 0 keeps the state and a value of 0 adds nothing to it.

    Attributes:
        sequences: Range of chunks [first, last) of each sequence; a single one for all rows of an unpacked batch.
    """

    def __init__(self, t: int, chunk_len: int, cu_seqlens: Tensor | None) -> None:
        """Lay out `t` steps, cut at `cu_seqlens` if given, in chunks of `chunk_len`."""
        self.t = t
        self.index: Tensor | None = None
        if cu_seqlens is None:
            # In a trace the length may be a symbol, and a known chunk length is better.
            self.chunk_len = chunk_len if is_tracing() else min(chunk_len, t)
            self.sequences = [(0, _ceil(t, self.chunk_len))]
            return
        lengths = [span.stop - span.start for span in sequence_spans(t, cu_seqlens)]
        self.chunk_len = min(chunk_len, max(lengths))
        counts = [_ceil(length, self.chunk_len) for length in lengths]
        ends = torch.tensor(counts).cumsum(0).tolist()
        self.sequences = [(end - count, end) for count, end in zip(counts, ends, strict=True)]
        slot = [
            torch.arange(length) + first * self.chunk_len
            for length, (first, _) in zip(lengths, self.sequences, strict=True)
        ]
        self.slot_of_time = torch.cat(slot).to(cu_seqlens.device)
        self.index = torch.full((ends[-1] * self.chunk_len,), t, device=cu_seqlens.device)
        self.index[self.slot_of_time] = torch.arange(t, device=cu_seqlens.device)

    def split(self, x: Tensor) -> Tensor:
        """Cut time into chunks, (b, t, ...) -> (b, c, l, ...)."""
        if self.index is None:
            # Not `F.pad`: where the length is traced as a symbol, its gradient has other strides than were traced.
            missing = self.sequences[0][1] * self.chunk_len - self.t
            zeros = x.new_zeros((x.shape[0], missing, *x.shape[2:]))
            padded = torch.cat([x, zeros], dim=1)
        else:
            padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, 1))[:, self.index]
        return padded.unflatten(1, (self.sequences[-1][1], self.chunk_len))

    def join(self, x: Tensor) -> Tensor:
        """Invert `split` and drop the padding, (b, c, l, ...) -> (b, t, ...)."""
        flat = x.flatten(1, 2)
        return flat[:, : self.t] if self.index is None else flat[:, self.slot_of_time]

    def initial_states(self, initial_state: Tensor) -> tuple[Tensor, ...]:
        """Return the initial state of each of `sequences`, with its batch axis."""
        return (initial_state,) if self.index is None else initial_state.split(1)


def _ceil(length: int, chunk_len: int) -> int:
    """Return the number of chunks of a length. (Torch cannot negate a quotient of symbols.)"""
    return (length + chunk_len - 1) // chunk_len


def resolve_chunk_len(v_btrhp: Tensor, k_btrgn: Tensor, chunk_len: int | None) -> int:
    """Return `chunk_len`, or if it is None, the one that suits the portable algorithms."""
    return SsdPath(chunk_len=chunk_len).chunk_len_or_optimal(k_btrgn.shape[4], v_btrhp.shape[4], v_btrhp.shape[2])


MIN_LOG_DECAY = -1000.0


def cumulative_decay(log_decay: Tensor, dim: int) -> Tensor:
    """Return the inclusive running sum of `log_decay` along `dim`, in float64 where the device has it."""
    return log_decay.to(accumulation_dtype(log_decay.device)).clamp(min=MIN_LOG_DECAY).cumsum(dim)


def decay_factor(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `exp(exponent)` in `dtype` for exponents that are ≤ 0 (or -inf), free of denormals."""
    return _exp_above_floor(exponent.to(dtype).clamp(min=_floor(dtype)))


def decay_between(lam: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the decay (..., l, l) from every step to every later one, and 1 to every earlier one.

    `M[l, s] = exp(min(Lam_l - Lam_s, 0))`, with `Lam` (..., l) from `cumulative_decay`.
    """
    difference = lam.unsqueeze(-1) - lam.unsqueeze(-2)
    return _exp_above_floor(difference.to(dtype).clamp_(_floor(dtype), 0.0))


def causal_decay(lam: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the decay from every step to every later one, and 0 to every earlier one."""
    return decay_between(lam, dtype).tril()


def _floor(dtype: torch.dtype) -> float:
    return math.log(torch.finfo(dtype).tiny) + 18


def _exp_above_floor(exponent: Tensor) -> Tensor:
    """Return `exp`, and 0 at the floor, which is finite: torch's `exp` of -inf takes three times as long on a CPU."""
    smallest = math.exp(_floor(exponent.dtype))
    return F.threshold(exponent.exp(), smallest * (1 + 1e-5), 0.0)


def compute_final_state(
    v: Float[Tensor, "b t r h p"], k: Float[Tensor, "b t r g n"], log_decay: Float[Tensor, "b t h"]
) -> Float[Tensor, "b h p n"]:
    """Return the final state of `anymamba.scan.scan` from zeros, differentiable, in the dtype of `log_decay`."""
    (b, t, r, h, p), (g, n), acc_dtype = v.shape, k.shape[3:], log_decay.dtype
    lam_bth = cumulative_decay(log_decay, 1)
    weight_bth = decay_factor(lam_bth[:, -1:] - lam_bth, acc_dtype)
    v_bgxf = (v.to(acc_dtype) * weight_bth[:, :, None, :, None]).reshape(b, t * r, g, h // g * p).transpose(1, 2)
    k_bgnx = k.to(acc_dtype).reshape(b, t * r, g, n).permute(0, 2, 3, 1)
    # Keys first: so the gradient of the values, which are many more, is laid out as they are.
    return (k_bgnx @ v_bgxf).transpose(2, 3).reshape(b, h, p, n)


def carry_state(initial: Tensor, total_log_decay: Tensor, local: Tensor) -> tuple[Tensor]:
    """Return the state after a part of a sequence: the decayed initial one, plus that of the part alone."""
    return (decay_factor(total_log_decay, initial.dtype) * initial + local,)
