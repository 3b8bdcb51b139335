"""Step sizes, and Mamba-3's decays, trapezoidal weights and angular rates, from the raw channels of a projection.

    dt = clamp(softplus(dt + dt_bias))     log_decay = -dt max(act(A), A_floor)
    gamma = sigmoid(trapezoid_logit) dt    kappa = (1 - sigmoid(trapezoid_logit)) dt

Angular rates are bounded: `max_rotation · π · tanh(rotation)` for each pair of channels that rotates in its plane, and
the vector `max_rotation · π · tanh|rotation| rotation / |rotation|` for each block of four that rotates about an axis.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.core.checks import check_annotated_shapes, check_dtypes, check_parameter
from anymamba.core.dtypes import state_dtype
from anymamba.core.layout import is_padding
from anymamba.core.operators import Operator
from anymamba.core.recompute import recompute_all


@check_annotated_shapes
def step_sizes(
    dt: Float[Tensor, "b t h"],
    dt_bias: Float[Tensor, " h"],
    *,
    dt_limit: tuple[int | float, int | float] = (0.0, math.inf),
    lengths: Int[Tensor, " b"] | None = None,
) -> Float[Tensor, "b t h"]:
    """Return the step sizes alone, as Mamba-2 needs them. Arguments are those of `discretize`."""
    check_dtypes("step_sizes", "dt", dt, activations={}, states={})
    check_parameter("step_sizes", "dt_bias", dt_bias, dt)
    sizes: Tensor = _step_sizes(dt, dt_bias, float(dt_limit[0]), float(dt_limit[1]), lengths)
    return sizes


@check_annotated_shapes
def discretize(
    dt: Float[Tensor, "b t h"],
    a: Float[Tensor, "b t h"],
    trapezoid_logit: Float[Tensor, "b t h"],
    rotation: Float[Tensor, "b t c"],
    dt_bias: Float[Tensor, " h"],
    *,
    heavy_tail: bool = True,
    a_floor: int | float = 0.0,
    dt_limit: tuple[int | float, int | float] = (0.0, math.inf),
    max_rotation: int | float = 1.0,
    quaternion: bool = False,
    lengths: Int[Tensor, " b"] | None = None,
) -> tuple[
    Float[Tensor, "b t h"],
    Float[Tensor, "b t h"],
    Float[Tensor, "b t h"],
    Float[Tensor, "b t h"],
    Float[Tensor, "b t c"],
]:
    """Compute the formulas above; all results are in the dtype of states.

    Args:
        dt: Raw step sizes.
        a: Raw decay rates.
        trapezoid_logit: Raw weights of the trapezoidal rule.
        rotation: Raw angular rates.
        dt_bias: Bias of the step sizes.
        heavy_tail: Use `heavy_tail` as the activation of the decay rates; False means softplus.
        a_floor: Smallest decay rate.
        dt_limit: Range that step sizes are clamped to.
        max_rotation: Largest angular rate, in half circles per unit of dt.
        quaternion: Read every three channels of `rotation` as one vector.
        lengths: Number of leading steps of each row that are real; the step size is zero after them. Default: all.

    Returns:
        dt, log_decay, gamma, kappa and the angular rates.
    """
    activations = {"a": a, "trapezoid_logit": trapezoid_logit, "rotation": rotation}
    check_dtypes("discretize", "dt", dt, activations=activations, states={})
    check_parameter("discretize", "dt_bias", dt_bias, dt)
    bounds = map(float, (a_floor, *dt_limit, max_rotation))
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _operator(
        dt, a, trapezoid_logit, rotation, dt_bias, heavy_tail, *bounds, quaternion, lengths
    )
    return results


def stationary_weight(dt: Tensor, rates: Tensor) -> Tensor:
    """Return Σ_k dt exp(k dt A) = dt / (1 - exp(dt A)), the weight over all steps of a token that repeats forever.

    Step sizes are at least 0, and decay rates A below 0.
    """
    exponent = dt * rates
    underflowed = exponent == 0  # the limit there is -1/A
    return torch.where(underflowed, -1 / rates, -dt / torch.expm1(exponent.masked_fill(underflowed, -1)))


def heavy_tail(x: Tensor) -> Tensor:
    """Return `1 + x` for x ≥ 0, `1 / (1 - x)` below: positive, smooth, and decaying like 1/|x|, not like e^x."""
    return F.relu(x) + 1 / (1 - x.clamp(max=0))


def bounded_vector(x: Tensor) -> Tensor:
    """Return `tanh|x| x / |x|` over the last axis, smooth at zero and for any length."""
    tiny = torch.finfo(x.dtype).tiny
    # |x| without overflow or underflow of its squares; the scale cancels, so it needs no gradient.
    scale = x.detach().abs().amax(-1, keepdim=True).clamp(min=math.sqrt(tiny))
    length = scale * (x / scale).square().sum(-1, keepdim=True).clamp(min=tiny).sqrt()
    return torch.tanh(length) * (x / length)


def _compute_step_sizes(dt: Tensor, dt_bias: Tensor, dt_min: float, dt_max: float, lengths: Tensor | None) -> Tensor:
    acc_dtype = state_dtype(dt.dtype)
    sizes = F.softplus(dt.to(acc_dtype) + dt_bias.to(acc_dtype))
    if (dt_min, dt_max) != (0.0, math.inf):
        sizes = sizes.clamp(dt_min, dt_max)
    if lengths is None:
        return sizes
    return sizes.masked_fill(is_padding(lengths, dt.shape[1]).unsqueeze(-1), 0)


def _definition(
    dt: Tensor,
    a: Tensor,
    trapezoid_logit: Tensor,
    rotation: Tensor,
    dt_bias: Tensor,
    is_heavy: bool,
    a_floor: float,
    dt_min: float,
    dt_max: float,
    max_rotation: float,
    quaternion: bool,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    acc_dtype, size = state_dtype(dt.dtype), _compute_step_sizes(dt, dt_bias, dt_min, dt_max, lengths)
    rate = (heavy_tail(a.to(acc_dtype)) if is_heavy else F.softplus(a.to(acc_dtype))).clamp(min=a_floor)
    current_weight, raw = torch.sigmoid(trapezoid_logit.to(acc_dtype)), rotation.to(acc_dtype)
    bounded = bounded_vector(raw.unflatten(-1, (-1, 3))).flatten(-2) if quaternion else torch.tanh(raw)
    return size, -size * rate, current_weight * size, (1 - current_weight) * size, (max_rotation * math.pi) * bounded


def _fake(dt: Tensor, a: Tensor, trapezoid_logit: Tensor, rotation: Tensor, *_: Any) -> tuple[Tensor, ...]:
    acc_dtype = state_dtype(dt.dtype)
    return tuple(torch.empty(x.shape, dtype=acc_dtype, device=dt.device) for x in (dt, dt, dt, dt, rotation))


_step_sizes = Operator(
    "step_sizes",
    inputs="Tensor dt, Tensor dt_bias, float dt_min, float dt_max, Tensor? lengths",
    outputs="dt",
    differentiable=2,
    fake=lambda dt, *_: torch.empty(dt.shape, dtype=state_dtype(dt.dtype), device=dt.device),
    definition=_compute_step_sizes,
    portable={"": recompute_all(_compute_step_sizes, outputs=1, differentiable=2)},
)
_operator = Operator(
    "discretize",
    inputs="Tensor dt, Tensor a, Tensor trapezoid_logit, Tensor rotation, Tensor dt_bias, bool heavy_tail, "
    "float a_floor, float dt_min, float dt_max, float max_rotation, bool quaternion, Tensor? lengths",
    outputs="dt, log_decay, gamma, kappa, angular_rate",
    differentiable=5,
    fake=_fake,
    definition=_definition,
    portable={"": recompute_all(_definition, outputs=5, differentiable=5)},
)
