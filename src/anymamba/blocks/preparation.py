"""Mamba-3's step sizes, decays, trapezoidal weights and turns from its projection, as one operator of the kernels.

    dt = clamp(softplus(dt + dt_bias))     log_decay = -dt max(act(A), A_floor)     gamma = sigmoid(trap) dt
    kappa = (1 - sigmoid(trap)) dt         rate = range · π · tanh(turn)

`Mamba3._split` is the portable code of the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymamba.kernels.cpu.prepare import prepare_backward, prepare_forward
from anymamba.operators import define_operator
from anymamba.scan.numerics import state_dtype


def _fake(dt: Tensor, a: Tensor, trap: Tensor, turn: Tensor, *_: Any) -> tuple[Tensor, ...]:
    wide = state_dtype(dt.dtype)
    return tuple(torch.empty(x.shape, dtype=wide, device=dt.device) for x in (dt, dt, dt, dt, turn))


# dt, a, trap (b, t, h) and turn (b, t, s) as they leave the projection, dt_bias (h,); behind `lengths` (b,) dt is zero.
# Returns dt, log_decay, gamma, kappa (b, t, h) and rate (b, t, s), in the state's dtype.
prepare = define_operator(
    "mamba3_prepare_fused",
    inputs="Tensor dt, Tensor a, Tensor trap, Tensor turn, Tensor dt_bias, bool heavy_tail, float rate_floor, "
    "float dt_min, float dt_max, float turn_range, Tensor? lengths",
    outputs=5,
    differentiable=5,
    forward=prepare_forward,
    backward=prepare_backward,
    fake=_fake,
)
