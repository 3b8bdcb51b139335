"""Mamba-1 in both directions, as Vim's version of mamba_ssm adds it to the official block.

`bimamba_type="v1"` scans the same convolved inputs a second time, from the last token to the first, with decay rates of
its own; `"v2"` has its own convolution, projections, rates and skip weights for that. The outputs of both directions
are added before the last projection, and with `if_divide_out` halved.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anymamba.compat.selective_scan_interface import bimamba_inner_fn, mamba_inner_fn_no_out_proj
from anymamba.core.linear import apply_linear

BimambaType = Literal["none", "v1", "v2"]
_TYPES = ("none", "v1", "v2")


def add_backward_parameters(block: Any, bimamba_type: BimambaType, init_layer_scale: float | None) -> None:
    """Give a Mamba-1 block the parameters of the second direction and of a scale of its output, with Vim's names."""
    if bimamba_type not in _TYPES:
        raise ValueError(f"Mamba: bimamba_type must be one of {', '.join(_TYPES)}, got {bimamba_type!r}")
    block.gamma = None
    if init_layer_scale is not None:
        block.gamma = nn.Parameter(torch.full((block.d_model,), float(init_layer_scale), device=block.D.device))
    if bimamba_type == "none":
        return
    block.A_b_log = nn.Parameter(block.A_log.detach().clone())
    block.A_b_log._no_weight_decay = True
    if bimamba_type == "v2":
        factory = {"device": block.dt_proj.weight.device, "dtype": block.dt_proj.weight.dtype}
        block.conv1d_b = copy.deepcopy(block.conv1d)
        for parameter in block.conv1d_b.parameters():
            nn.init.uniform_(parameter, -(block.d_conv**-0.5), block.d_conv**-0.5)
        block.x_proj_b = nn.Linear(block.d_inner, block.dt_rank + 2 * block.d_state, bias=False, **factory)
        block.dt_proj_b = nn.Linear(block.dt_rank, block.d_inner, **factory)
        block.D_b = nn.Parameter(block.D.detach().clone())
        block.D_b._no_weight_decay = True


def run_both_directions(block: Any, hidden_states: Tensor) -> Tensor:
    """Map (b, t, d) to (b, t, d) with a block that has the parameters of both directions."""
    xz = apply_linear(block.in_proj, hidden_states).transpose(1, 2)
    rates, rates_back = -torch.exp(block.A_log), -torch.exp(block.A_b_log)
    if block.bimamba_type == "v1":
        return bimamba_inner_fn(
            xz,
            block.conv1d.weight,
            block.conv1d.bias,
            block.x_proj.weight,
            block.dt_proj.weight,
            block.out_proj.weight,
            block.out_proj.bias,
            rates,
            rates_back,
            D=block.D,
            delta_bias=block.dt_proj.bias,
        )
    y = _run_direction(xz, block.conv1d, block.x_proj, block.dt_proj, rates, block.D)
    parts = (block.conv1d_b, block.x_proj_b, block.dt_proj_b)
    y = y + _run_direction(xz.flip(-1), *parts, rates_back, block.D_b).flip(-1)
    return apply_linear(block.out_proj, (y / 2 if block.if_divide_out else y).transpose(1, 2))


def _run_direction(xz: Tensor, conv: Any, x_proj: Any, dt_proj: Any, rates: Tensor, skip: Tensor) -> Tensor:
    weights = (conv.weight, conv.bias, x_proj.weight, dt_proj.weight)
    return mamba_inner_fn_no_out_proj(xz, *weights, rates, D=skip, delta_bias=dt_proj.bias)
