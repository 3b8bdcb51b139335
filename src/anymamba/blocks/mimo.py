"""Mamba-3's gate over MIMO ranks, as one operator that keeps its inputs only.

    o[p] = Σ_r out[h, r, p] y[r, p] silu(z[p] gate[h, r, p])

Without weights, and with one rank, it is SISO's gate. The compiled kernels have it too.

Letters: b batch, t time, m = (b t) rows, r MIMO rank, h heads, p head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anymamba.kernels import library
from anymamba.kernels.cpu.gate import gate_backward, gate_forward
from anymamba.operators import cache_blocks, define_operator, silu_backward
from anymamba.scan.numerics import state_dtype


def gate_ranks(
    y: Float[Tensor, "b t r h p"],
    z: Float[Tensor, "b t h p"],
    gate: Float[Tensor, "h r p"] | None = None,
    out: Float[Tensor, "h r p"] | None = None,
) -> Float[Tensor, "b t h p"]:
    """Gate each rank of `y` by its own view of `z`, and sum the ranks.

    Raises:
        ValueError: only one of the weights is given.
        TypeError: y and z are of different dtypes.
    """
    if (gate is None) != (out is None):
        raise ValueError("gate_ranks: gate and out must be given both or neither, got one")
    if y.dtype != z.dtype:
        raise TypeError(f"gate_ranks: z must have the dtype of y, {y.dtype}, got {z.dtype}")
    operator = _operator if library.missing(y.device, y.dtype) else _fused
    o: Tensor = operator(y, z, gate, out)
    return o


def _by_rank(weight_hrp: Tensor | None, y: Tensor, dtype: torch.dtype) -> Tensor:
    if weight_hrp is None:
        return torch.ones(y.shape[2:], dtype=dtype, device=y.device)
    return weight_hrp.to(dtype).transpose(0, 1).contiguous()


def _forward(y: Tensor, z: Tensor, gate: Tensor | None, out: Tensor | None) -> Tensor:
    dtype = state_dtype(y.dtype)
    gate_rhp, out_rhp = _by_rank(gate, y, dtype), _by_rank(out, y, dtype)
    y_mrhp, z_mhp = y.flatten(0, 1), z.flatten(0, 1)
    o_mhp = torch.empty(z_mhp.shape, dtype=z.dtype, device=z.device)
    for start, stop in cache_blocks(y, y_mrhp.shape[0], gate_rhp.numel()):
        open_mrhp = F.silu(z_mhp[start:stop].to(dtype).unsqueeze(1) * gate_rhp, inplace=True).mul_(out_rhp)
        o_mhp[start:stop] = open_mrhp.mul_(y_mrhp[start:stop]).sum(1)
    return o_mhp.reshape(z.shape)


def _backward(
    do: Tensor, y: Tensor, z: Tensor, gate: Tensor | None, out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = state_dtype(y.dtype)
    gate_rhp, out_rhp = _by_rank(gate, y, dtype), _by_rank(out, y, dtype)
    dgate_rhp, dout_rhp = torch.zeros_like(gate_rhp), torch.zeros_like(out_rhp)
    y_mrhp, z_mhp, do_mhp = y.flatten(0, 1), z.flatten(0, 1), do.flatten(0, 1)
    dy_mrhp, dz_mhp = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (y_mrhp, z_mhp))
    for start, stop in cache_blocks(y, y_mrhp.shape[0], gate_rhp.numel()):
        ys_mrhp = y_mrhp[start:stop].to(dtype)
        zs_m1hp, dos_m1hp = (x[start:stop].to(dtype).unsqueeze(1) for x in (z_mhp, do_mhp))
        turned_mrhp = zs_m1hp * gate_rhp
        open_mrhp = F.silu(turned_mrhp)
        dout_rhp += (dos_m1hp * ys_mrhp * open_mrhp).sum(0)
        weighted_mrhp = dos_m1hp * out_rhp
        dy_mrhp[start:stop] = weighted_mrhp * open_mrhp
        dturned_mrhp = silu_backward(weighted_mrhp * ys_mrhp, turned_mrhp)
        dz_mhp[start:stop] = (dturned_mrhp * gate_rhp).sum(1)
        dgate_rhp += (dturned_mrhp * zs_m1hp).sum(0)
    dgate, dout = (
        y.new_empty(0) if weight is None else dweight_rhp.transpose(0, 1).to(weight.dtype).contiguous()
        for weight, dweight_rhp in ((gate, dgate_rhp), (out, dout_rhp))
    )
    return dy_mrhp.reshape(y.shape), dz_mhp.reshape(z.shape), dgate, dout


def _fake(y: Tensor, z: Tensor, gate: Tensor | None, out: Tensor | None) -> Tensor:
    return torch.empty(z.shape, dtype=z.dtype, device=z.device)


_INPUTS = "Tensor y, Tensor z, Tensor? gate, Tensor? out"
_operator = define_operator(
    "gate_ranks",
    inputs=_INPUTS,
    outputs=1,
    differentiable=4,
    forward=_forward,
    backward=_backward,
    fake=_fake,
)
_fused = define_operator(
    "gate_ranks_fused",
    inputs=_INPUTS,
    outputs=1,
    differentiable=4,
    forward=gate_forward,
    backward=gate_backward,
    fake=_fake,
)
