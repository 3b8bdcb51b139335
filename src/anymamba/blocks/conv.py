"""The causal depthwise convolution of a block, with SiLU behind it and a window that carries it across calls.

    o_t = silu(bias + Σ_{k<w} weight_k s_{t-w+1+k})

Letters: b batch, t time, v channels, w width of the convolution, s sequences.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anymamba.kernels import library
from anymamba.kernels.cpu.conv import conv_backward, conv_forward
from anymamba.operators import cache_blocks, define_operator, silu_backward
from anymamba.scan.checks import expect_like, expect_shape
from anymamba.scan.numerics import state_dtype


class CausalConv(nn.Module):
    """Depthwise causal convolution over time, followed by SiLU.

    The parameters have the names and shapes of the official block's `conv1d`: weight (v, 1, w), bias (v).
    """

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the parameters, uniform in ±1/√width."""
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, 1, width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        bound = 1 / math.sqrt(width)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        x: Float[Tensor, "b t v"],
        window: Float[Tensor, "s v w"],
        *,
        lengths: Int[Tensor, " b"] | None = None,
        cu_seqlens: Int[Tensor, " s1"] | None = None,
    ) -> tuple[Float[Tensor, "b t v"], Float[Tensor, "s v w"]]:
        """Convolve a sequence that goes on from `window`.

        Args:
            x: inputs before the convolution, (b, t, v).
            window: the last w inputs before `x`, newest last, (b, v, w); one per sequence for packed input.
            lengths: how many leading steps of each row are real, (b,). All if not given.
            cu_seqlens: boundaries of packed sequences (batch 1), each of which starts from its own window.

        Returns:
            The outputs (b, t, v), and the windows behind the last real input.

        Raises:
            ValueError: shapes that do not fit.
            TypeError: the window has another dtype than `x`.
        """
        sizes = {"v": self.weight.shape[0], "w": self.weight.shape[2]}
        expect_shape("CausalConv", "x", x, "b t v", sizes)
        sizes["s"] = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        expect_shape("CausalConv", "window", window, "s v w", sizes)
        expect_like("CausalConv", "window", window, x.dtype, x.device)
        if not library.missing(x.device, x.dtype):
            out, new_window = _fused(x, window, self.weight.squeeze(1), self.bias, lengths, cu_seqlens)
            return out, new_window
        window_swv = window.transpose(1, 2)
        if cu_seqlens is not None:
            return self._packed(x, window_swv, cu_seqlens)
        s_bxv = torch.cat([window_swv, x], dim=1)
        return self._convolve(s_bxv), _window_at(s_bxv, lengths, self.width)

    def step(
        self, x: Float[Tensor, "b v"], window: Float[Tensor, "b v w"]
    ) -> tuple[Float[Tensor, "b v"], Float[Tensor, "b v w"]]:
        """Convolve one more input: the output (b, v), and the new window."""
        window = torch.cat([window[..., 1:], x.unsqueeze(-1)], dim=-1)
        dtype = state_dtype(x.dtype)
        out = (window.to(dtype) * self.weight.squeeze(1).to(dtype)).sum(-1)
        if self.bias is not None:
            out = out + self.bias.to(dtype)
        return F.silu(out).to(x.dtype), window

    def _convolve(self, s_bxv: Tensor) -> Tensor:
        out: Tensor = _operator(s_bxv, self.weight.squeeze(1), self.bias)
        return out

    def _packed(self, x_btv: Tensor, window_swv: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Lay every sequence behind its own window, one after another, and convolve the whole."""
        t, (sequences, w, _) = x_btv.shape[1], window_swv.shape
        device = x_btv.device
        cu_seqlens = cu_seqlens.long()
        starts, time, taps = cu_seqlens[:-1], torch.arange(t, device=device), torch.arange(w, device=device)
        row = torch.arange(sequences, device=device)
        token_slots_t = time + w * torch.searchsorted(starts, time, right=True)
        window_slots_sw = (starts + w * row).unsqueeze(1) + taps
        source = torch.empty(t + sequences * w, dtype=torch.long, device=device)
        source[token_slots_t] = time
        source[window_slots_sw.flatten()] = t + torch.arange(sequences * w, device=device)
        s_1xv = torch.cat([x_btv, window_swv.flatten(0, 1).unsqueeze(0)], dim=1).index_select(1, source)
        last_slots_sw = (cu_seqlens[1:] + w * row).unsqueeze(1) + taps
        new_window = s_1xv[0].index_select(0, last_slots_sw.flatten()).reshape(window_swv.shape)
        out_1tv = self._convolve(s_1xv).index_select(1, token_slots_t - w)
        return out_1tv, new_window.transpose(1, 2).contiguous()


def _window_at(s_bxv: Tensor, lengths: Tensor | None, w: int) -> Tensor:
    """The w inputs before the end of each row, (b, v, w), where `s_bxv` starts with the old window."""
    if lengths is None:
        return s_bxv[:, s_bxv.shape[1] - w :].transpose(1, 2).contiguous()
    index_bw = lengths.unsqueeze(1) + torch.arange(w, device=s_bxv.device)
    index_bwv = index_bw.unsqueeze(-1).expand(-1, -1, s_bxv.shape[2])
    return s_bxv.gather(1, index_bwv).transpose(1, 2).contiguous()


def _pre_activation(s_bxv: Tensor, weight_wv: Tensor, bias_v: Tensor | None, start: int, stop: int) -> Tensor:
    """The convolution for steps [start, stop). The first column of the window is history that no step reaches."""
    dtype = weight_wv.dtype
    pre_btv = s_bxv[:, start + 1 : stop + 1].to(dtype) * weight_wv[0]
    for k in range(1, weight_wv.shape[0]):
        pre_btv.addcmul_(s_bxv[:, start + k + 1 : stop + k + 1].to(dtype), weight_wv[k])
    return pre_btv if bias_v is None else pre_btv.add_(bias_v)


def _forward(s_bxv: Tensor, weight_vw: Tensor, bias_v: Tensor | None) -> Tensor:
    b, x, v = s_bxv.shape
    w, dtype = weight_vw.shape[1], state_dtype(s_bxv.dtype)
    weight_wv = weight_vw.t().to(dtype).contiguous()
    out = torch.empty(b, x - w, v, dtype=s_bxv.dtype, device=s_bxv.device)
    for start, stop in cache_blocks(out, x - w, b * v):
        pre_btv = _pre_activation(s_bxv, weight_wv, None if bias_v is None else bias_v.to(dtype), start, stop)
        out[:, start:stop] = F.silu(pre_btv, inplace=True)
    return out


def _backward(dout: Tensor, s_bxv: Tensor, weight_vw: Tensor, bias_v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    b, x, v = s_bxv.shape
    w, dtype = weight_vw.shape[1], state_dtype(s_bxv.dtype)
    weight_wv = weight_vw.t().to(dtype).contiguous()
    bias_wide_v = None if bias_v is None else bias_v.to(dtype)
    ds_bxv = torch.zeros(s_bxv.shape, dtype=dtype, device=s_bxv.device)
    dweight_wv, dbias_v = torch.zeros_like(weight_wv), torch.zeros_like(weight_wv[0])
    for start, stop in cache_blocks(dout, x - w, b * v):
        pre_btv = _pre_activation(s_bxv, weight_wv, bias_wide_v, start, stop)
        dpre_btv = silu_backward(dout[:, start:stop].to(dtype), pre_btv)
        dbias_v += dpre_btv.sum((0, 1))
        for k in range(w):
            ds_bxv[:, start + k + 1 : stop + k + 1].addcmul_(dpre_btv, weight_wv[k])
            dweight_wv[k] += (dpre_btv * s_bxv[:, start + k + 1 : stop + k + 1].to(dtype)).sum((0, 1))
    return ds_bxv.to(s_bxv.dtype), dweight_wv.t().to(weight_vw.dtype).contiguous(), dbias_v.to(weight_vw.dtype)


def _fake(s_bxv: Tensor, weight_vw: Tensor, bias_v: Tensor | None) -> Tensor:
    b, x, v = s_bxv.shape
    return torch.empty(b, x - weight_vw.shape[1], v, dtype=s_bxv.dtype, device=s_bxv.device)


_operator = define_operator(
    "causal_conv_silu",
    inputs="Tensor s, Tensor weight, Tensor? bias",
    outputs=1,
    differentiable=3,
    forward=_forward,
    backward=_backward,
    fake=_fake,
)


def _fake_fused(x: Tensor, window: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(
        window.shape, dtype=x.dtype, device=x.device
    )


# The same with its windows in one call to the compiled kernels.
_fused = define_operator(
    "causal_conv_silu_fused",
    inputs="Tensor x, Tensor window, Tensor weight, Tensor? bias, Tensor? lengths, Tensor? cu_seqlens",
    outputs=2,
    differentiable=4,
    forward=conv_forward,
    backward=conv_backward,
    fake=_fake_fused,
)
