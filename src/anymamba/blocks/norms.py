"""Root-mean-square norms with a gate.

With `rho = (mean_group(u²) + eps)^(-1/2)`, the mean taken over groups of channels:

- gate first (Mamba-2): `u = x silu(z)`, `y = weight u rho(u)`
- norm first (Mamba-3): `y = weight x rho(x) silu(z)`

The backward keeps the inputs only. With `g = dL/d(u rho) `: `du = rho (g - u rho² mean_group(g u))`.

Letters: m rows (batch and time fused), i channels, q groups of f channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anymamba.kernels import library
from anymamba.kernels.cpu.norm import norm_backward, norm_forward, rms_norm_backward, rms_norm_forward
from anymamba.operators import cache_blocks, define_operator, silu_backward
from anymamba.scan.numerics import state_dtype


class GatedRMSNorm(nn.Module):
    """RMS norm over groups of channels, gated by `silu(z)`; its weight covers all channels."""

    def __init__(
        self,
        channels: int,
        *,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the weight, all ones; one group of all channels unless `group_size` says otherwise."""
        super().__init__()
        if channels % (group_size or channels):
            raise ValueError(f"GatedRMSNorm: group_size must divide the {channels} channels, got {group_size}")
        self.group_size = group_size or channels
        self.norm_before_gate = norm_before_gate
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "*batch i"], z: Float[Tensor, "*batch i"]) -> Float[Tensor, "*batch i"]:
        """Norm and gate `x` (..., i) by `z` (..., i); the arithmetic is float32 or wider."""
        _expect_channels("GatedRMSNorm", x, self.weight)
        if x.shape != z.shape:
            raise ValueError(f"GatedRMSNorm: z must have the shape of x, {tuple(x.shape)}, got {tuple(z.shape)}")
        if x.dtype != z.dtype:
            raise TypeError(f"GatedRMSNorm: z must have the dtype of x, {x.dtype}, got {z.dtype}")
        operator = _operator if library.missing(x.device, x.dtype) else _fused
        y: Tensor = operator(x, z, self.weight, self.group_size, self.norm_before_gate, self.eps)
        return y

    def extra_repr(self) -> str:
        """Sizes for `print(block)`."""
        return f"{self.weight.shape[0]}, group_size={self.group_size}, norm_before_gate={self.norm_before_gate}"


class RMSNorm(nn.Module):
    """`y = weight x / sqrt(mean(x²) + eps)` over the last axis, in float32 or wider."""

    def __init__(
        self,
        channels: int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the weight, all ones."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "*batch i"]) -> Float[Tensor, "*batch i"]:
        """Norm `x` (..., i)."""
        _expect_channels("RMSNorm", x, self.weight)
        if not library.missing(x.device, x.dtype):
            y: Tensor = _rms_fused(x, self.weight, self.eps)
            return y
        # torch's own rms_norm takes two to three times as long on a CPU.
        wide_x = x.to(state_dtype(x.dtype))
        unit = wide_x * _rho(wide_x, self.eps)
        return (unit * self.weight.to(unit.dtype)).to(x.dtype)


def _expect_channels(where: str, x: Tensor, weight: Tensor) -> None:
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(f"{where}: x must have {weight.shape[0]} channels, got {tuple(x.shape)}")


def _by_group(x_mi: Tensor, group_size: int) -> Tensor:
    return x_mi.reshape(x_mi.shape[0], x_mi.shape[1] // group_size, group_size)


def _forward(x: Tensor, z: Tensor, weight: Tensor, group_size: int, norm_before_gate: bool, eps: float) -> Tensor:
    dtype, i = state_dtype(x.dtype), x.shape[-1]
    x_mi, z_mi, y_mi = (
        x.reshape(-1, i),
        z.reshape(-1, i),
        torch.empty(x.numel() // i, i, dtype=x.dtype, device=x.device),
    )
    weight_qf = weight.to(dtype).reshape(-1, group_size)
    for start, stop in cache_blocks(x, x_mi.shape[0], i):
        u_mi, gate_mi = x_mi[start:stop].to(dtype), F.silu(z_mi[start:stop].to(dtype))
        u_mqf = _by_group(u_mi if norm_before_gate else u_mi * gate_mi, group_size)
        y_mqf = u_mqf * _rho(u_mqf, eps) * weight_qf
        y_mi[start:stop] = y_mqf.reshape(-1, i) * gate_mi if norm_before_gate else y_mqf.reshape(-1, i)
    return y_mi.reshape(x.shape)


def _backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, group_size: int, norm_before_gate: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, i = state_dtype(x.dtype), x.shape[-1]
    x_mi, z_mi, dy_mi = x.reshape(-1, i), z.reshape(-1, i), dy.reshape(-1, i)
    dx_mi, dz_mi = (torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in (x_mi, z_mi))
    weight_wide, dweight = weight.to(dtype), torch.zeros(i, dtype=dtype, device=x.device)
    for start, stop in cache_blocks(x, x_mi.shape[0], i):
        xs_mi, zs_mi, dys_mi = (s[start:stop].to(dtype) for s in (x_mi, z_mi, dy_mi))
        gate_mi = F.silu(zs_mi)
        u_mi = xs_mi if norm_before_gate else xs_mi * gate_mi
        rho_mq1 = _rho(_by_group(u_mi, group_size), eps)
        unit_mi = (_by_group(u_mi, group_size) * rho_mq1).reshape(-1, i)
        dunit_mi = dys_mi * gate_mi if norm_before_gate else dys_mi
        dweight += (dunit_mi * unit_mi).sum(0)
        dunit_mi = dunit_mi * weight_wide
        mean_mq1 = _by_group(dunit_mi * unit_mi, group_size).mean(-1, keepdim=True)
        radial_mi = (_by_group(unit_mi, group_size) * mean_mq1).reshape(-1, i)
        du_mqf = rho_mq1 * _by_group(dunit_mi - radial_mi, group_size)
        du_mi = du_mqf.reshape(-1, i)
        dx_mi[start:stop] = du_mi if norm_before_gate else du_mi * gate_mi
        dgate_mi = dys_mi * unit_mi * weight_wide if norm_before_gate else du_mi * xs_mi
        dz_mi[start:stop] = silu_backward(dgate_mi, zs_mi)
    return dx_mi.reshape(x.shape), dz_mi.reshape(z.shape), dweight.to(weight.dtype)


def _rho(u_mqf: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(u_mqf.square().mean(-1, keepdim=True) + eps)


def _fake(x: Tensor, z: Tensor, weight: Tensor, group_size: int, norm_before_gate: bool, eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_INPUTS = "Tensor x, Tensor z, Tensor weight, int group_size, bool norm_before_gate, float eps"
_operator = define_operator(
    "gated_rms_norm",
    inputs=_INPUTS,
    outputs=1,
    differentiable=3,
    forward=_forward,
    backward=_backward,
    fake=_fake,
)
_fused = define_operator(
    "gated_rms_norm_fused",
    inputs=_INPUTS,
    outputs=1,
    differentiable=3,
    forward=norm_forward,
    backward=norm_backward,
    fake=_fake,
)
_rms_fused = define_operator(
    "rms_norm_fused",
    inputs="Tensor x, Tensor weight, float eps",
    outputs=1,
    differentiable=2,
    forward=rms_norm_forward,
    backward=rms_norm_backward,
    fake=lambda x, weight, eps: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)
