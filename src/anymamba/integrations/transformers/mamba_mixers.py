"""Mixers of transformers on this library's operators: one class for Mamba-1's, one for Mamba-2's.

Mamba, FalconMamba and Jamba (Mamba-1):

    x, z = in_proj(u)        x = silu(conv(x))        d, B, C = x_proj(x)        Δ = softplus(dt_proj(d))
    h_t[i, n] = exp(Δ_t[i] A[i, n]) h_{t-1}[i, n] + Δ_t[i] x_t[i] B_t[n]        y_t = h_t C_t + D x_t
    out = out_proj(y silu(z))

FalconMamba and Jamba normalize d, B and C, FalconMamba without weights.

Mamba2, Bamba, GraniteMoeHybrid, NemotronH, Zamba2 and FalconH1 (Mamba-2):

    z, xBC, dt = in_proj(u)                       xBC = silu(conv(xBC))           dt = clamp(softplus(dt + dt_bias))
    h_t = exp(dt_t A) h_{t-1} + dt_t x_t ⊗ B_t    y_t = h_t C_t + D x_t           out = out_proj(norm(y silu(z)))

FalconH1 scales u and its projection, and by default gates without a norm.

Letters: b batch, t time, i channels (h p), h heads, p head width, n state, g groups, r rank of dt, v = i + 2 g n.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.core.dtypes import state_dtype
from anymamba.core.linear import apply_linear, linear
from anymamba.core.operators import has_no_hooks
from anymamba.integrations.transformers.architectures import LayerState, is_of_transformers
from anymamba.integrations.transformers.mixer import AcceleratedMixer, apply_inner_norm, describe_norm, eps_of
from anymamba.integrations.transformers.packing import Layout
from anymamba.kernels.step_description import StepBuilder
from anymamba.ops.conv import causal_conv
from anymamba.ops.discretization import step_sizes
from anymamba.ops.norms_and_gates import rms_norm
from anymamba.scan import selective_scan
from anymamba.scan.ssd import ssd

_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


class AcceleratedMamba1(AcceleratedMixer):
    """Mixer of Mamba-1."""

    time_step_rank: int
    x_proj: nn.Module
    dt_proj: nn.Module

    def mix(self, x: Tensor, start: LayerState, layout: Layout) -> tuple[Tensor, LayerState]:
        """Compute the output (b, t, d) from the input (b, t, d), and the state after it."""
        x_bti, z_bti = self.project(x).chunk(2, dim=-1)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        options: dict[str, Any] = {"lengths": layout.lengths, "cu_seqlens": layout.cu_seqlens}
        x_bti, window = causal_conv(x_bti, start.window.to(x_bti.dtype), weight, bias, **options)
        dt_bti, b_btn, c_btn = self._project_dt_b_c(x_bti)
        if layout.lengths is not None:
            padded_bt = torch.arange(x_bti.shape[1], device=x.device) >= layout.lengths.unsqueeze(1)
            dt_bti = dt_bti.masked_fill(padded_bt.unsqueeze(-1), -math.inf)
        y_bti, state = selective_scan(
            x_bti,
            dt_bti,
            -torch.exp(self.A_log.to(dt_bti.dtype)),
            b_btn,
            c_btn,
            self.D,
            z_bti,
            initial_state=start.state.to(dt_bti.dtype),
            cu_seqlens=layout.cu_seqlens,
        )
        return apply_linear(self.out_proj, y_bti), LayerState(window, state)

    def _project_dt_b_c(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return dt before its softplus (b, t, i), in the dtype of the state, B (b, t, n) and C (b, t, n)."""
        n, kind = self.ssm_state_size, self.ARCHITECTURE.inner_norms
        parts: list[Tensor] = list(apply_linear(self.x_proj, x).split([self.time_step_rank, n, n], dim=-1))
        if kind != "none":
            norms = (getattr(self, name) for name in _NORMS)
            parts = [apply_inner_norm(norm, part, kind == "weighted") for norm, part in zip(norms, parts, strict=True)]
        low, b, c = parts
        return self._step_sizes(low), b, c

    def _step_sizes(self, low: Tensor) -> Tensor:
        """Apply `dt_proj`, adding its bias, which dominates the sum, in the dtype of the state."""
        module = self.dt_proj
        acc_dtype = state_dtype(low.dtype)
        if type(module) is not nn.Linear or not has_no_hooks(module):
            return module(low).to(acc_dtype)
        y = linear(low, module.weight).to(acc_dtype)
        return y if module.bias is None else y + module.bias.to(acc_dtype)

    def empty_state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of one window and one state per channel."""
        return (self.intermediate_size, self.conv_kernel_size), (self.intermediate_size, self.ssm_state_size)

    def projected_width(self) -> int:
        """Return the width of x and z."""
        return 2 * self.intermediate_size

    def describe_core(self, builder: StepBuilder, projected: int) -> int:
        """Describe the convolution, the inner projections and norms, the state update and the gate."""
        i, n, rank = self.intermediate_size, self.ssm_state_size, self.time_step_rank
        x = self.describe_conv(builder, projected, i)
        low = builder.linear(x, self, "x_proj", i, rank + 2 * n)
        b, c = low + rank, low + rank + n
        if self.ARCHITECTURE.inner_norms != "none":
            for name, slot, width in zip(_NORMS, (low, b, c), (rank, n, n), strict=True):
                self._describe_norm(builder, name, slot, width)
        y = builder.slot(i)
        builder.phase(
            "mamba1",
            channels=i,
            state=n,
            x=x,
            dt=builder.linear(low, self, "dt_proj", rank, i),
            z=projected + i,
            b=b,
            c=c,
            to=y,
            cache_state=builder.cache_tensor(i, n, dtype=builder.acc_dtype),
            a_log=builder.parameter(self, "A_log", i, n),
            skip=builder.parameter(self, "D", i),
        )
        return y

    def _describe_norm(self, builder: StepBuilder, name: str, slot: int, width: int) -> None:
        norm = describe_norm(builder, self, name)
        weighted = self.ARCHITECTURE.inner_norms == "weighted"
        builder.norm(slot, norm if weighted else None, width, to=slot, eps=eps_of(norm))


class AcceleratedMamba2(AcceleratedMixer):
    """Mixer of Mamba-2."""

    num_heads: int
    head_dim: int
    n_groups: int
    conv_dim: int
    time_step_limit: tuple[float, float]
    dt_bias: nn.Parameter
    norm: nn.Module

    def mix(self, x: Tensor, start: LayerState, layout: Layout) -> tuple[Tensor, LayerState]:
        """Compute the output (b, t, d) from the input (b, t, d), and the state after it."""
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
        return apply_linear(self.out_proj, self._apply_gate(y_bthp.flatten(2), z_bti)), LayerState(window, state)

    def _apply_gate(self, y: Tensor, z: Tensor) -> Tensor:
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

    def empty_state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a convolution window over x, B and C, and of one SSM state per head."""
        return (self.conv_dim, self.conv_kernel_size), (self.num_heads, self.head_dim, self.ssm_state_size)

    def projected_width(self) -> int:
        """Return the width of z, xBC and dt."""
        return self.intermediate_size + self.conv_dim + self.num_heads

    def describe_core(self, builder: StepBuilder, projected: int) -> int:
        """Describe the convolution, the state update, the norm and the gate."""
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
