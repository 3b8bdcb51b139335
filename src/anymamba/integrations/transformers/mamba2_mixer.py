"""Mamba-2's mixers: Mamba2, Bamba, GraniteMoeHybrid, NemotronH, Zamba2 and FalconH1.

    z, xBC, dt = in_proj(u)                       xBC = silu(conv(xBC))           dt = clamp(softplus(dt + dt_bias))
    h_t = exp(dt_t A) h_{t-1} + dt_t x_t ⊗ B_t    y_t = h_t C_t + D x_t           out = out_proj(norm(y silu(z)))

FalconH1 scales u and its projection, and by default gates without a norm.

Letters: b batch, t time, i channels = h p, h heads, p head width, n state, g groups, v = i + 2 g n, w conv width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.core.hooks import has_no_hooks
from anymamba.core.linear import apply_linear
from anymamba.integrations.transformers.architectures import is_of_transformers
from anymamba.integrations.transformers.mixer import AcceleratedMixer, describe_norm, eps_of
from anymamba.integrations.transformers.mixer_step import Carried
from anymamba.integrations.transformers.packing import Layout
from anymamba.kernels.step import StepBuilder
from anymamba.ops.conv import causal_conv
from anymamba.ops.discretization import step_sizes
from anymamba.ops.norms_and_gates import rms_norm
from anymamba.scan.ssd import ssd


class AcceleratedMamba2(AcceleratedMixer):
    """The formulas at the top of this file."""

    num_heads: int
    head_dim: int
    n_groups: int
    conv_dim: int
    time_step_limit: tuple[float, float]
    dt_bias: nn.Parameter
    norm: nn.Module

    def mix(self, x: Tensor, start: Carried, layout: Layout) -> tuple[Tensor, Carried]:
        """From the input (b, t, d) to the output (b, t, d)."""
        z_bti, xbc_btv, dt_bth = self.project(x).split([self.intermediate_size, self.conv_dim, self.num_heads], dim=-1)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        options: dict[str, Any] = {"lengths": layout.lengths, "cu_seqlens": layout.cu_seqlens}
        xbc_btv, window = causal_conv(xbc_btv, start.window.to(xbc_btv.dtype), weight, bias, **options)
        dt_bth = step_sizes(dt_bth, self.dt_bias, dt_limit=self._limits(), lengths=layout.lengths)
        groups = (self.n_groups, self.ssm_state_size)
        shared = self.n_groups * self.ssm_state_size
        x_bti, b, c = xbc_btv.split([self.intermediate_size, shared, shared], dim=-1)
        y_bthp, state = ssd(
            x_bti.unflatten(-1, (self.num_heads, self.head_dim)),
            dt_bth,
            -torch.exp(self.A_log.to(dt_bth.dtype)),
            b.unflatten(-1, groups),
            c.unflatten(-1, groups),
            self.D,
            initial_state=start.state.to(dt_bth.dtype),
            cu_seqlens=layout.cu_seqlens,
        )
        return apply_linear(self.out_proj, self._gated(y_bthp.flatten(2), z_bti)), Carried(window, state)

    def _gated(self, y: Tensor, z: Tensor) -> Tensor:
        if not self._has_norm():
            return y * F.silu(z)
        norm = self.norm
        if not (has_no_hooks(norm) and is_of_transformers(type(norm))):
            normed: Tensor = norm(y, z)
            return normed.to(y.dtype)
        size, order = self._group_size(), self._norm_before_gate()
        weight = norm.weight
        assert isinstance(weight, Tensor)
        return rms_norm(y, weight, z, group_size=size, norm_before_gate=order, eps=eps_of(norm))

    def _has_norm(self) -> bool:
        switch = self.ARCHITECTURE.norm_switch
        return bool(getattr(self, switch)) if switch else True

    def _group_size(self) -> int:
        """Channels that are normalized together: transformers' own number, which depends on the version."""
        if self._anymamba.norm == "official" or isinstance(getattr(self.norm, "n_groups", None), int):
            return self.intermediate_size // self.n_groups
        return int(getattr(self.norm, "group_size", self.intermediate_size))

    def _norm_before_gate(self) -> bool:
        return bool(getattr(self.norm, "norm_before_gate", False))

    def _limits(self) -> tuple[float, float]:
        low, high = self.time_step_limit
        return float(low), float(high)

    def fresh_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A window of x, B and C, and a state for each head."""
        return (self.conv_dim, self.conv_kernel_size), (self.num_heads, self.head_dim, self.ssm_state_size)

    def projected_width(self) -> int:
        """z, xBC and dt."""
        return self.intermediate_size + self.conv_dim + self.num_heads

    def describe_core(self, builder: StepBuilder, projected: int) -> int:
        """Convolution, states, norm and gate."""
        builder.watch(self, "_anymamba", "time_step_limit", "mamba_rms_norm")
        i, low_high = self.intermediate_size, self._limits()
        xbc = projected + i
        act = self.describe_conv(builder, xbc, self.conv_dim)
        y = builder.slot(i)
        builder.phase(
            "mamba2",
            heads=self.num_heads,
            head_width=self.head_dim,
            groups=self.n_groups,
            state=self.ssm_state_size,
            skip_per_channel=False,
            dt_min=low_high[0],
            dt_max=low_high[1],
            dt=xbc + self.conv_dim,
            act=act,
            to=y,
            cache_state=builder.cache_tensor(
                self.num_heads, self.head_dim, self.ssm_state_size, dtype=builder.acc_dtype
            ),
            dt_bias=builder.parameter(self, "dt_bias", self.num_heads),
            a_log=builder.parameter(self, "A_log", self.num_heads),
            skip=builder.parameter(self, "D", self.num_heads),
        )
        if not self._has_norm():
            return builder.gate(y, projected, i, to=y)
        norm = describe_norm(builder, self, "norm")
        return builder.norm(
            y,
            norm,
            i,
            z=projected,
            to=y,
            eps=eps_of(norm),
            group_size=self._group_size(),
            norm_before_gate=self._norm_before_gate(),
        )
