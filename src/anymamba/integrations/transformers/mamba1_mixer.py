"""Mamba-1's mixers: Mamba, FalconMamba and Jamba.

    x, z = in_proj(u)        x = silu(conv(x))        d, B, C = x_proj(x)        Δ = softplus(dt_proj(d))
    h_t[i, n] = exp(Δ_t[i] A[i, n]) h_{t-1}[i, n] + Δ_t[i] x_t[i] B_t[n]        y_t = h_t C_t + D x_t
    out = out_proj(y silu(z))

FalconMamba and Jamba norm d, B and C, the one without weights.

Letters: b batch, t time, i channels, n state, r rank of dt, w conv width.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anymamba.core.dtypes import state_dtype
from anymamba.core.hooks import has_no_hooks
from anymamba.core.linear import apply_linear, linear
from anymamba.integrations.transformers.mixer import AcceleratedMixer, describe_norm, eps_of, inner_norm
from anymamba.integrations.transformers.mixer_step import Carried
from anymamba.integrations.transformers.packing import Layout
from anymamba.kernels.step import StepBuilder
from anymamba.ops.conv import causal_conv
from anymamba.scan import selective_scan

_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


class AcceleratedMamba1(AcceleratedMixer):
    """The formulas at the top of this file."""

    PROJECTIONS: ClassVar[tuple[str, ...]] = ("in_proj", "out_proj")

    time_step_rank: int
    x_proj: nn.Module
    dt_proj: nn.Module

    def mix(self, x: Tensor, start: Carried, layout: Layout) -> tuple[Tensor, Carried]:
        """From the input (b, t, d) to the output (b, t, d)."""
        x_bti, z_bti = self.project(x).chunk(2, dim=-1)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        options: dict[str, Any] = {"lengths": layout.lengths, "cu_seqlens": layout.cu_seqlens}
        x_bti, window = causal_conv(x_bti, start.window.to(x_bti.dtype), weight, bias, **options)
        dt_bti, b_btn, c_btn = self._selected(x_bti)
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
        return apply_linear(self.out_proj, y_bti), Carried(window, state)

    def _selected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b, t, i) -> dt before its softplus (b, t, i) in the dtype of the state, B (b, t, n), C (b, t, n)."""
        n, kind = self.ssm_state_size, self.ARCHITECTURE.inner_norms
        parts: list[Tensor] = list(apply_linear(self.x_proj, x).split([self.time_step_rank, n, n], dim=-1))
        if kind != "none":
            norms = (getattr(self, name) for name in _NORMS)
            parts = [inner_norm(norm, part, kind == "weighted") for norm, part in zip(norms, parts, strict=True)]
        low, b, c = parts
        return self._step_sizes(low), b, c

    def _step_sizes(self, low: Tensor) -> Tensor:
        """`dt_proj`. The bias is most of the sum, and in bfloat16 it would have two digits; adapters add their own."""
        module = self.dt_proj
        wide = state_dtype(low.dtype)
        if type(module) is not nn.Linear or not has_no_hooks(module):
            return module(low).to(wide)
        y = linear(low, module.weight).to(wide)
        return y if module.bias is None else y + module.bias.to(wide)

    def fresh_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A window and a state a channel."""
        return (self.intermediate_size, self.conv_kernel_size), (self.intermediate_size, self.ssm_state_size)

    def projected_width(self) -> int:
        """x and z."""
        return 2 * self.intermediate_size

    def describe_core(self, builder: StepBuilder, projected: int) -> int:
        """Convolution, inner projections and norms, states and gate."""
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
