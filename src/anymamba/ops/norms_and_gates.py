"""Root-mean-square norms, gated or not, and Mamba-3's gate over MIMO ranks.

With `rho = (mean_group(u²) + eps)^(-1/2)`, the mean taken over groups of channels:

- gate first (Mamba-2): `u = x silu(z)`, `y = weight u rho(u)`
- norm first (Mamba-3), and without a gate: `y = weight x rho(x) silu(z)`

The gate over ranks is

    o[p] = Σ_r out[h, r, p] y[r, p] silu(z[p] gate[h, r, p])

Without weights, and with one rank, it is the gate of SISO.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anymamba.core.checks import check_annotated_shapes, check_dtypes, check_parameter
from anymamba.core.dtypes import state_dtype
from anymamba.core.operators import Operator, allocate_like
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
        x: Any number of rows.
        weight: Weight of each channel.
        z: Gates, in the shape and dtype of `x`.
        group_size: Channels that are normalized together. Default: all.
        norm_before_gate: Whether the norm comes before the gate.
        eps: Added to the mean square.

    Raises:
        ValueError: Shapes or devices do not match.
        TypeError: x and z have different dtypes.
    """
    if z is not None and x.shape != z.shape:
        raise ValueError(f"rms_norm: z must have the shape of x, {tuple(x.shape)}, got {tuple(z.shape)}")
    check_dtypes("rms_norm", "x", x, activations={"z": z}, states={})
    check_parameter("rms_norm", "weight", weight, x)
    group_size = x.shape[-1] if group_size is None else group_size
    if group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(f"rms_norm: group_size must divide the {x.shape[-1]} channels, got {group_size}")
    y: Tensor = _norm_operator(x, z, weight, group_size, norm_before_gate or z is None, eps)
    return y


def _norm_definition(
    x: Tensor, z: Tensor | None, weight: Tensor, group_size: int, norm_before_gate: bool, eps: float
) -> Tensor:
    acc_dtype = state_dtype(x.dtype)
    gate = None if z is None else F.silu(z.to(acc_dtype))
    u = x.to(acc_dtype) if norm_before_gate or gate is None else x.to(acc_dtype) * gate
    grouped = u.unflatten(-1, (-1, group_size))
    rho = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    y = (grouped * rho).flatten(-2) * weight.to(acc_dtype)
    return (y * gate if norm_before_gate and gate is not None else y).to(x.dtype)


_norm_operator = Operator(
    "rms_norm",
    inputs="Tensor x, Tensor? z, Tensor weight, int group_size, bool norm_before_gate, float eps",
    outputs="y",
    differentiable=3,
    fake=lambda x, *_: allocate_like(x)[0],
    definition=_norm_definition,
    portable={"": recompute_row_blocks(_norm_definition, rows={0: 1, 1: 1}, result=1, parameters=range(2, 3))},
)


@check_annotated_shapes
def rank_gate(
    y: Float[Tensor, "b t r h p"],
    z: Float[Tensor, "b t h p"],
    gate: Float[Tensor, "h r p"] | None = None,
    out: Float[Tensor, "h r p"] | None = None,
) -> Float[Tensor, "b t h p"]:
    """Gate each rank of `y` by its own view of `z`, and sum the ranks.

    Raises:
        ValueError: Only one of the weights is given, or shapes or devices do not match.
        TypeError: y and z have different dtypes.
    """
    if (gate is None) != (out is None):
        raise ValueError("rank_gate: gate and out must be given both or neither, got one")
    check_dtypes("rank_gate", "y", y, activations={"z": z}, states={})
    for name, weight in (("gate", gate), ("out", out)):
        check_parameter("rank_gate", name, weight, y)
    o: Tensor = _gate_operator(y, z, gate, out)
    return o


def _gate_definition(y: Tensor, z: Tensor, gate: Tensor | None, out: Tensor | None) -> Tensor:
    acc_dtype = state_dtype(y.dtype)
    z_by_rank = z.to(acc_dtype).unsqueeze(-3)
    if gate is not None:
        z_by_rank = z_by_rank * gate.to(acc_dtype).transpose(0, 1)
    gated = y.to(acc_dtype) * F.silu(z_by_rank)
    return (gated if out is None else gated * out.to(acc_dtype).transpose(0, 1)).sum(-3).to(z.dtype)


_gate_operator = Operator(
    "rank_gate",
    inputs="Tensor y, Tensor z, Tensor? gate, Tensor? out",
    outputs="o",
    differentiable=4,
    fake=lambda y, z, *_: allocate_like(z)[0],
    definition=_gate_definition,
    portable={"": recompute_row_blocks(_gate_definition, rows={0: 3, 1: 2}, result=2, parameters=range(2, 4))},
)
