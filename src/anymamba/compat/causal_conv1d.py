"""The functions of `causal_conv1d`, with the official names, arguments and layouts.

Letters: b batch, d channels, l time, w width of the convolution, s length of a state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.compat.seq_idx import Packing, in_one_row
from anymamba.ops.conv import causal_conv


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | str | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Compute the causal depthwise convolution of a sequence.

    Args:
        x: Inputs, (b, d, l).
        weight: Weights, (d, w).
        bias: Bias, (d,), or None.
        seq_idx: Sequence that each token of a row belongs to, (b, l); a negative number is padding, whose outputs are
            zero. It cannot be combined with states. A string is taken as the activation, which was fourth in
            causal_conv1d 1.0.
        initial_states: Inputs before the first, (b, d, w - 1).
        return_final_states: Whether to also return the last inputs, (b, d, w - 1).
        final_states_out: Tensor to write them to.
        activation: Activation after the convolution: "silu", "swish" or None.

    Raises:
        ValueError: Another activation, or `seq_idx` with states.
    """
    if isinstance(seq_idx, str):
        seq_idx, activation = None, seq_idx
    _check_activation("causal_conv1d_fn", activation)
    w = weight.shape[1]
    if seq_idx is not None and (initial_states is not None or return_final_states):
        raise ValueError("causal_conv1d_fn: seq_idx cannot be combined with initial_states or return_final_states")
    before = x.new_zeros(*x.shape[:2], w - 1) if initial_states is None else initial_states.to(x.dtype)
    if seq_idx is None:
        y, window = _convolve(x, before, weight, bias, activation)
        if not return_final_states:
            return y
        if final_states_out is not None:
            with torch.no_grad():
                window = final_states_out.copy_(window)
        return y, window
    b, _, t = x.shape
    packing = Packing.of("causal_conv1d_fn", seq_idx, b, t)
    y_1td = _convolve_packed(in_one_row(x.transpose(1, 2)), packing.cu_seqlens, weight, bias, activation)
    y = y_1td.squeeze(0).unflatten(0, (b, t)).transpose(1, 2)
    return y.masked_fill((seq_idx < 0).unsqueeze(1), 0)


def _check_activation(where: str, activation: str | None) -> None:
    if activation not in (None, "silu", "swish"):
        raise ValueError(f'{where}: activation must be None, "silu" or "swish", got {activation!r}')


def _convolve(
    x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Return the outputs (b, d, l) of inputs that follow `before` (b, d, w - 1), and the last w - 1 inputs."""
    w = weight.shape[1]
    if activation is None:
        all_bdx = torch.cat([before, x], dim=2)
        parameters = (weight.to(x.dtype).unsqueeze(1), None if bias is None else bias.to(x.dtype))
        return F.conv1d(all_bdx, *parameters, groups=x.shape[1]), all_bdx[:, :, all_bdx.shape[2] - w + 1 :]
    y_btd, window = causal_conv(x.transpose(1, 2), F.pad(before, (1, 0)), weight, bias)
    return y_btd.transpose(1, 2), window[:, :, 1:]


def _convolve_packed(
    x: Tensor, cu_seqlens: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Convolve sequences packed into one row, (1, t, d) -> (1, t, d), each from zeros."""
    if activation is not None:
        windows = x.new_zeros(cu_seqlens.shape[0] - 1, *weight.shape)
        return causal_conv(x, windows, weight, bias, cu_seqlens=cu_seqlens)[0]
    before = x.new_zeros(1, weight.shape[0], weight.shape[1] - 1)
    sequences = x.transpose(1, 2).split(cu_seqlens.diff().tolist(), dim=2)
    outputs = [_convolve(sequence, before, weight, bias, None)[0] for sequence in sequences]
    return torch.cat(outputs, dim=2).transpose(1, 2)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Convolve one or several tokens, from a state that is changed in place.

    Args:
        x: Inputs, (b, d) or (b, d, l).
        conv_state: Last inputs, (b, d, s) with s at least w - 1, newest last.
        weight: Weights, (d, w).
        bias: Bias, (d,), or None.
        activation: Activation after the convolution: "silu" or True, "swish", or None or False.
        cache_seqlens: Number of inputs of each row so far, (b,). If it is given, the state is a ring buffer, in which
            the next input is stored at this number modulo s.
        conv_state_indices: Row of the state that each row continues from, (b,).

    Raises:
        ValueError: Another activation, or a state that is too short.
    """
    if isinstance(activation, bool):
        activation = "silu" if activation else None
    _check_activation("causal_conv1d_update", activation)
    w, size = weight.shape[1], conv_state.shape[2]
    if size < w - 1:
        raise ValueError(f"causal_conv1d_update: conv_state must hold at least w - 1 = {w - 1} inputs, got {size}")
    x_bdl = x.unsqueeze(2) if x.ndim == 2 else x
    state = conv_state if conv_state_indices is None else conv_state[conv_state_indices.long()]
    d, steps = x_bdl.shape[1:]
    if cache_seqlens is None:
        before = state[:, :, size - w + 1 :]
        new = torch.cat([state, x_bdl.to(state.dtype)], dim=2)[:, :, steps:]
    else:
        taps = torch.arange(1 - w, 0, device=x.device) + cache_seqlens.long().unsqueeze(1)
        before = state.gather(2, (taps % size).unsqueeze(1).expand(-1, d, -1))
        slots = torch.arange(steps, device=x.device) + cache_seqlens.long().unsqueeze(1)
        new = state.scatter(2, (slots % size).unsqueeze(1).expand(-1, d, -1), x_bdl.to(state.dtype))
    y, _ = _convolve(x_bdl, before.to(x.dtype), weight, bias, activation)
    with torch.no_grad():
        if conv_state_indices is None:
            conv_state.copy_(new)
        else:
            conv_state[conv_state_indices.long()] = new
    return y.squeeze(2) if x.ndim == 2 else y


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """Return the last inputs of each packed sequence, (t, d) -> (sequences, d, state_len), zeros before its first."""
    back = torch.arange(-state_len, 0, device=x.device)
    index = cu_seqlens[1:].long().unsqueeze(1) + back
    is_real = index >= cu_seqlens[:-1].long().unsqueeze(1)
    states = x[index.clamp(min=0)].masked_fill(~is_real.unsqueeze(-1), 0)
    return states.transpose(1, 2)
