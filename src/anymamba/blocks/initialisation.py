"""Initial values that several families share."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def initial_dt_bias(
    heads: int,
    dt_min: int | float,
    dt_max: int | float,
    floor: int | float,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, " h"]:
    """The bias whose softplus is log-uniform in (dt_min, dt_max), at least `floor`: `dt + log(1 - exp(-dt))`."""
    uniform_h = torch.rand(heads, device=device, dtype=torch.float32)
    dt_h = torch.exp(uniform_h * (math.log(dt_max) - math.log(dt_min)) + math.log(dt_min)).clamp(min=floor)
    return (dt_h + torch.log(-torch.expm1(-dt_h))).to(dtype)
