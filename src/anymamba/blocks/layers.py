"""Modules around the operators, with the official parameter names, parts of projections, and initial step sizes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anymamba.ops.conv import causal_conv
from anymamba.ops.norms_and_gates import rms_norm


class ProjectionPart(NamedTuple):
    """Rows of a fused projection that form one part of its output.

    Attributes:
        name: Name of the part.
        rows: Number of rows.
        is_matrix: True if they map a vector to a vector, False for a few unrelated numbers per head.
    """

    name: str
    rows: int
    is_matrix: bool = True


class CausalConv(nn.Module):
    """A depthwise causal convolution over time, followed by SiLU or not: weight (v, 1, w), bias (v)."""

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        bias: bool = True,
        silu: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the parameters, uniform in ±1/√width."""
        super().__init__()
        self.silu = silu
        self.weight = nn.Parameter(torch.empty(channels, 1, width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        bound = 1 / math.sqrt(width)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        x: Float[Tensor, "b t v"],
        window: Float[Tensor, "z v w"],
        *,
        lengths: Int[Tensor, " b"] | None = None,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
    ) -> tuple[Float[Tensor, "b t v"], Float[Tensor, "z v w"]]:
        """Convolve a sequence that continues from `window` (`anymamba.ops.conv.causal_conv` has the contract)."""
        weight, packing = self.weight.squeeze(1), {"lengths": lengths, "cu_seqlens": cu_seqlens}
        return causal_conv(x, window, weight, self.bias, **packing, silu=self.silu)

    def stationary(self, x: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        """Return the steady-state output for a constant input `x`."""
        channels, _, width = self.weight.shape
        window = x.new_zeros(x.shape[0], channels, width)
        return self(x.unsqueeze(1).repeat(1, width, 1), window)[0][:, -1]


class RMSNorm(nn.Module):
    """`y = weight x / √(mean(x²) + eps)` over the last axis, in float32 or wider."""

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
        """Normalize `x`."""
        return rms_norm(x, self.weight, eps=self.eps)


class GatedRMSNorm(nn.Module):
    """An RMS norm over groups of channels, gated by `silu(z)`; its weight covers all channels."""

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
        """Create the weight, all ones. Without `group_size` all channels are one group."""
        super().__init__()
        if channels % (group_size or channels):
            raise ValueError(f"GatedRMSNorm: group_size must divide the {channels} channels, got {group_size}")
        self.group_size = group_size or channels
        self.norm_before_gate = norm_before_gate
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "*batch i"], z: Float[Tensor, "*batch i"]) -> Float[Tensor, "*batch i"]:
        """Normalize `x` and gate it by `z`, in float32 or wider."""
        norm_first = self.norm_before_gate
        return rms_norm(x, self.weight, z, group_size=self.group_size, norm_before_gate=norm_first, eps=self.eps)

    def extra_repr(self) -> str:
        """Return the sizes that `print(block)` shows."""
        return f"{self.weight.shape[0]}, group_size={self.group_size}, norm_before_gate={self.norm_before_gate}"


def initial_dt_bias(
    heads: int,
    dt_min: int | float,
    dt_max: int | float,
    floor: int | float,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, " h"]:
    """Return the bias whose softplus is log-uniform in (dt_min, dt_max), at least `floor`: `dt + log(1 - exp(-dt))`."""
    uniform_h = torch.rand(heads, device=device, dtype=torch.float32)
    dt_h = torch.exp(uniform_h * (math.log(dt_max) - math.log(dt_min)) + math.log(dt_min)).clamp(min=floor)
    return (dt_h + torch.log(-torch.expm1(-dt_h))).to(dtype or torch.get_default_dtype())
