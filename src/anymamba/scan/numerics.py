"""Precision rules that every algorithm of the scan shares.

States, cumulative sums and exponentials are float32 for inputs up to float32 and float64 for float64 inputs.
Two hazards are handled here, once:

- **Cancellation.** The decay between two steps is `exp(Lam_l - Lam_s)` with `Lam` a running sum of log-decays. After a
  hard reset (log-decay of -100 or -1e8) a float32 `Lam` has no digits left for the small decays that follow. So `Lam`
  is summed and subtracted in float64 (where the device has it) and only the difference is rounded, and a log-decay is
  cut at -1000, which is a factor of zero in either precision.
- **Denormals.** A decay that underflows gradually makes x86 arithmetic ten times slower. An exponent below
  `log(smallest normal) + 18` becomes a factor of exactly zero; the 18 leaves eight decades for the numbers that the
  factor is multiplied with.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.ground.numerics import summing_dtype

MIN_LOG_DECAY = -1000.0


def cumulative_decay(log_decay: Tensor, dim: int) -> Tensor:
    """Inclusive running sum of `log_decay` along `dim`, in float64 where the device has it."""
    return log_decay.to(summing_dtype(log_decay.device)).clamp(min=MIN_LOG_DECAY).cumsum(dim)


def decay_factor(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """`exp(exponent)` in `dtype` for exponents that are ≤ 0 (or -inf), free of denormals."""
    return _exp_above_floor(exponent.to(dtype).clamp(min=_floor(dtype)))


def decay_between(lam: Tensor, dtype: torch.dtype) -> Tensor:
    """Decay from every step to every later one, and 1 to every earlier one.

    `M[l, s] = exp(min(Lam_l - Lam_s, 0))`.

    Args:
        lam: (..., l), from `cumulative_decay`.
        dtype: of the result.

    Returns:
        (..., l, l).
    """
    difference = lam.unsqueeze(-1) - lam.unsqueeze(-2)
    return _exp_above_floor(difference.to(dtype).clamp_(_floor(dtype), 0.0))


def causal_decay(lam: Tensor, dtype: torch.dtype) -> Tensor:
    """Decay from every step to every later one, and 0 to every earlier one: the lower triangle of `decay_between`."""
    return decay_between(lam, dtype).tril()


def _floor(dtype: torch.dtype) -> float:
    return math.log(torch.finfo(dtype).tiny) + 18


def _exp_above_floor(exponent: Tensor) -> Tensor:
    """`exp`, and 0 at the floor. The floor is not -inf, for which torch's `exp` takes three times as long on a CPU."""
    least = math.exp(_floor(exponent.dtype))
    return F.threshold(exponent.exp(), least * (1 + 1e-5), 0.0)
