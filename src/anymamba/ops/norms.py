"""Root-mean-square norms, gated or not.

With `rho = (mean_group(u²) + eps)^(-1/2)`, the mean taken over groups of channels:

- gate first (Mamba-2): `u = x silu(z)`, `y = weight u rho(u)`
- norm first (Mamba-3), and without a gate: `y = weight x rho(x) silu(z)`
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anymamba.core.checks import check_annotated_shapes, check_dtypes, check_parameter
from anymamba.core.dtypes import state_dtype
from anymamba.core.operators import Operator
from anymamba.core.recompute import recompute_row_blocks


@check_annotated_shapes
def rms_norm(
    x: Float[Tensor, "*batch i"],
    weight: Float[Tensor, " i"],
    z: Float[Tensor, "*batch i"] | None = None,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    eps: float = 1e-5,
) -> Float[Tensor, "*batch i"]:
    """Normalize `x` over groups of channels, and gate it by `silu(z)` if `z` is given; float32 or wider inside.

    Args:
        x: any number of rows.
        weight: of each channel.
        z: gates, in the shape and dtype of `x`.
        group_size: channels that are normalized together; all if not given.
        norm_before_gate: the order of the two.
        eps: added to the mean square.

    Raises:
        ValueError: shapes or devices that do not fit.
        TypeError: x and z are of different dtypes.
    """
    if z is not None and x.shape != z.shape:
        raise ValueError(f"rms_norm: z must have the shape of x, {tuple(x.shape)}, got {tuple(z.shape)}")
    check_dtypes("rms_norm", "x", x, activations={"z": z}, states={})
    check_parameter("rms_norm", "weight", weight, x)
    group_size = x.shape[-1] if group_size is None else group_size
    if group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(f"rms_norm: group_size must divide the {x.shape[-1]} channels, got {group_size}")
    y: Tensor = _operator(x, z, weight, group_size, norm_before_gate or z is None, eps)
    return y


def _definition(x: Tensor, z: Tensor | None, weight: Tensor, group_size: int, norm_first: bool, eps: float) -> Tensor:
    wide = state_dtype(x.dtype)
    gate = None if z is None else F.silu(z.to(wide))
    u = x.to(wide) if norm_first or gate is None else x.to(wide) * gate
    grouped = u.unflatten(-1, (-1, group_size))
    rho = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    y = (grouped * rho).flatten(-2) * weight.to(wide)
    return (y * gate if norm_first and gate is not None else y).to(x.dtype)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_operator = Operator(
    "rms_norm",
    inputs="Tensor x, Tensor? z, Tensor weight, int group_size, bool norm_before_gate, float eps",
    outputs="y",
    differentiable=3,
    fake=_fake,
    definition=_definition,
    portable={"": recompute_row_blocks(_definition, rows={0: 1, 1: 1}, result=1, parameters=range(2, 3))},
)
