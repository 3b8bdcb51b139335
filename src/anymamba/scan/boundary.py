"""The state at the end of a part of a sequence, for workers that share one: without the outputs, a matrix product.

    S_T = exp(Σ_t a_t) S_{-1} + Σ_t exp(Σ_{s>t} a_s) v_t ⊗ k_t

Letters: b batch, t time, r MIMO rank, h heads, p head width, g groups, n state, f the heads of a group and their width.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from anymamba.scan.numerics import cumulative_decay, decay_factor


def final_state(
    v: Float[Tensor, "b t r h p"], k: Float[Tensor, "b t r g n"], log_decay: Float[Tensor, "b t h"]
) -> Float[Tensor, "b h p n"]:
    """The last state of `anymamba.scan.scan` from a state of zeros, differentiable, in the dtype of `log_decay`."""
    (b, t, r, h, p), (g, n), wide = v.shape, k.shape[3:], log_decay.dtype
    lam_bth = cumulative_decay(log_decay, 1)
    weight_bth = decay_factor(lam_bth[:, -1:] - lam_bth, wide)
    v_bgxf = (v.to(wide) * weight_bth[:, :, None, :, None]).reshape(b, t * r, g, h // g * p).transpose(1, 2)
    k_bgnx = k.to(wide).reshape(b, t * r, g, n).permute(0, 2, 3, 1)
    # Keys first: so the gradient of the values, which are many more, is laid out as they are.
    return (k_bgnx @ v_bgxf).transpose(2, 3).reshape(b, h, p, n)


def carried_state(start: Tensor, log_kept: Tensor, own: Tensor) -> tuple[Tensor]:
    """The state after a part: what remains of the one before it, plus its own; `log_kept` is never positive."""
    return (decay_factor(log_kept, start.dtype) * start + own,)
