"""The causal depthwise convolution of a block, followed by SiLU, with a window that carries it from call to call.

    o_t = silu(bias + Σ_{k<w} weight_k s_{t-w+1+k})        or the same without SiLU

Letters: b batch, t time, v channels, w width of the convolution, z sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.core.checks import check_annotated_shapes, check_dtypes, check_parameter
from anymamba.core.context_parallel import SequencePart
from anymamba.core.dtypes import state_dtype
from anymamba.core.layout import last_sequence_time
from anymamba.core.operators import Operator, allocate_like
from anymamba.core.recompute import recompute_all


@check_annotated_shapes
def causal_conv(
    x: Float[Tensor, "b t v"],
    window: Float[Tensor, "z v w"],
    weight: Float[Tensor, "v w"],
    bias: Float[Tensor, " v"] | None = None,
    *,
    lengths: Int[Tensor, " b"] | None = None,
    cu_seqlens: Int[Tensor, " z1"] | None = None,
    silu: bool = True,
) -> tuple[Float[Tensor, "b t v"], Float[Tensor, "z v w"]]:
    """Convolve a sequence that continues from `window`.

    Args:
        x: Inputs.
        window: Last w inputs before `x`, newest last, of each row or packed sequence, in the dtype of `x`.
        weight: Weights of each channel, oldest input first.
        bias: Bias of each channel. Default: none.
        lengths: Number of leading steps of each row that are real. Default: all.
        cu_seqlens: Boundaries of packed sequences (batch 1), each of which starts from its own window.
        silu: Whether SiLU follows. Without it, the convolution is torch's own code on every device.

    Returns:
        The outputs, and the windows after the last real input.

    Raises:
        ValueError: Shapes or devices do not match.
        TypeError: The window has another dtype than `x`.
    """
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if window.shape[0] != rows:
        raise ValueError(f"causal_conv: window must have shape {(rows, *window.shape[1:])}, got {tuple(window.shape)}")
    check_dtypes("causal_conv", "x", x, activations={"window": window}, states={})
    for name, parameter in (("weight", weight), ("bias", bias)):
        check_parameter("causal_conv", name, parameter, x)
    if not silu:
        return _definition(x, window, weight, bias, lengths, cu_seqlens, silu=False)
    out, new_window = _operator(x, window, weight, bias, lengths, cu_seqlens)
    return out, new_window


def exchange_conv_window(
    x: Float[Tensor, "b t v"],
    window: Float[Tensor, "z v w"],
    cu_seqlens: Int[Tensor, " z1"] | None,
    context: SequencePart,
) -> Float[Tensor, "z v w"]:
    """Return the windows that the sequences of a part start from, with the previous rank's where one continues."""
    w = window.shape[2]
    last_inputs_bvx = x[:, last_sequence_time(cu_seqlens)][:, -w:].transpose(1, 2)

    def append_inputs(initial: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([initial, inputs], 2)[:, :, -w:],)

    independent = last_inputs_bvx.shape[2] == w
    (initial_window,) = context.exchange_boundary_state(
        (window.to(x.dtype),), cu_seqlens, (last_inputs_bvx,), append_inputs, independent=independent
    )
    return initial_window


def _definition(
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool = True,
) -> tuple[Tensor, Tensor]:
    window_zwv, w = window.transpose(1, 2), window.shape[2]
    if cu_seqlens is not None:
        return _convolve_packed(x, window_zwv, weight, bias, cu_seqlens, silu)
    s_bxv = torch.cat([window_zwv, x], dim=1)
    if lengths is None:
        new_window_bwv = s_bxv[:, s_bxv.shape[1] - w :]
    else:
        index_bw = lengths.unsqueeze(1) + torch.arange(w, device=x.device)
        new_window_bwv = s_bxv.gather(1, index_bw.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    return _convolve(s_bxv, weight, bias, silu), new_window_bwv.transpose(1, 2).contiguous()


def _convolve(s_bxv: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Convolve all steps after the first w. The first of those w is history that no step reaches."""
    acc_dtype, w = state_dtype(s_bxv.dtype), weight.shape[1]
    steps, weight_wv = s_bxv.shape[1] - w, weight.to(acc_dtype).t().contiguous()
    pre_btv = s_bxv[:, 1 : steps + 1].to(acc_dtype) * weight_wv[0]
    for k in range(1, w):
        pre_btv = torch.addcmul(pre_btv, s_bxv[:, k + 1 : steps + k + 1].to(acc_dtype), weight_wv[k])
    pre_btv = pre_btv if bias is None else pre_btv + bias.to(acc_dtype)
    return (F.silu(pre_btv) if silu else pre_btv).to(s_bxv.dtype)


def _convolve_packed(
    x_1tv: Tensor, window_zwv: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """Put every sequence after its own window, one after another, and convolve all of them at once."""
    t, (sequences, w, _) = x_1tv.shape[1], window_zwv.shape
    device = x_1tv.device
    cu_seqlens = cu_seqlens.long()
    starts, time, taps = cu_seqlens[:-1], torch.arange(t, device=device), torch.arange(w, device=device)
    row = torch.arange(sequences, device=device)
    token_slots_t = time + w * torch.searchsorted(starts, time, right=True)
    window_slots_zw = (starts + w * row).unsqueeze(1) + taps
    source = torch.empty(t + sequences * w, dtype=torch.long, device=device)
    source[token_slots_t] = time
    source[window_slots_zw.flatten()] = t + torch.arange(sequences * w, device=device)
    s_1xv = torch.cat([x_1tv, window_zwv.flatten(0, 1).unsqueeze(0)], dim=1).index_select(1, source)
    last_slots_zw = (cu_seqlens[1:] + w * row).unsqueeze(1) + taps
    new_window = s_1xv[0].index_select(0, last_slots_zw.flatten()).reshape(window_zwv.shape)
    out_1tv = _convolve(s_1xv, weight, bias, silu).index_select(1, token_slots_t - w)
    return out_1tv, new_window.transpose(1, 2).contiguous()


_operator = Operator(
    "causal_conv",
    inputs="Tensor x, Tensor window, Tensor weight, Tensor? bias, Tensor? lengths, Tensor? cu_seqlens",
    outputs="out, window",
    differentiable=4,
    fake=lambda x, window, *_: allocate_like(x, window),
    definition=_definition,
    portable={"": recompute_all(_definition, outputs=2, differentiable=4)},
)
