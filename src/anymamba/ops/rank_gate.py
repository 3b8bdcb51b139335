"""Mamba-3's gate over MIMO ranks.

    o[p] = Σ_r out[h, r, p] y[r, p] silu(z[p] gate[h, r, p])

Without weights, and with one rank, it is the gate of SISO.
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
def rank_gate(
    y: Float[Tensor, "b t r h p"],
    z: Float[Tensor, "b t h p"],
    gate: Float[Tensor, "h r p"] | None = None,
    out: Float[Tensor, "h r p"] | None = None,
) -> Float[Tensor, "b t h p"]:
    """Gate each rank of `y` by its own view of `z`, and sum the ranks.

    Raises:
        ValueError: only one of the weights is given, or shapes and devices that do not fit.
        TypeError: y and z are of different dtypes.
    """
    if (gate is None) != (out is None):
        raise ValueError("rank_gate: gate and out must be given both or neither, got one")
    check_dtypes("rank_gate", "y", y, activations={"z": z}, states={})
    for name, weight in (("gate", gate), ("out", out)):
        check_parameter("rank_gate", name, weight, y)
    o: Tensor = _operator(y, z, gate, out)
    return o


def _definition(y: Tensor, z: Tensor, gate: Tensor | None, out: Tensor | None) -> Tensor:
    wide = state_dtype(y.dtype)
    seen = z.to(wide).unsqueeze(-3)
    opened = F.silu(seen if gate is None else seen * gate.to(wide).transpose(0, 1))
    weighted = y.to(wide) * opened
    return (weighted if out is None else weighted * out.to(wide).transpose(0, 1)).sum(-3).to(z.dtype)


def _fake(y: Tensor, z: Tensor, *_: Any) -> Tensor:
    return torch.empty(z.shape, dtype=z.dtype, device=z.device)


_operator = Operator(
    "rank_gate",
    inputs="Tensor y, Tensor z, Tensor? gate, Tensor? out",
    outputs="o",
    differentiable=4,
    fake=_fake,
    definition=_definition,
    portable={"": recompute_row_blocks(_definition, rows={0: 3, 1: 2}, result=2, parameters=range(2, 4))},
)
