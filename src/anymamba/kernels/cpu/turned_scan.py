"""Forward and backward of Mamba-3's recurrence by the compiled scan (contract: `blocks/turned_scan.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from anymamba.kernels.cpu.scan import Call


def _call(
    x: Tensor,
    k: Tensor,
    q: Tensor,
    k_bias: Tensor,
    q_bias: Tensor,
    rate: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    kappa: Tensor,
    skip: Tensor,
    value_weight: Tensor | None,
    start: Tensor,
    interleaved: bool,
    chunk_len: int,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Call:
    """A call with all inputs but the initial state filled in."""
    # One row of values for all ranks, each with its own weights: a stride of zero.
    v_btrhp = x.unsqueeze(2).expand(-1, -1, k.shape[2], -1, -1)
    call = Call(v_btrhp, k, q, log_decay, chunk_len, cu_seqlens)
    call.scale_and_skip(None, skip)
    call.args.pairs, call.args.interleaved = rate.shape[-1], interleaved
    dense = {"k_bias": k_bias, "q_bias": q_bias, "rate": rate, "dt": dt, "gamma": gamma, "kappa": kappa, "start": start}
    if value_weight is not None:
        dense["value_weight"] = value_weight
    for name, tensor in dense.items():
        call.dense(name, tensor.to(call.wide).contiguous())
    if lengths is not None:
        call.dense("lengths", lengths.to(torch.int64).clamp(0, x.shape[1]).contiguous())
    return call


def turned_scan_forward(
    x: Tensor,
    k: Tensor,
    q: Tensor,
    k_bias: Tensor,
    q_bias: Tensor,
    rate: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    kappa: Tensor,
    skip: Tensor,
    value_weight: Tensor | None,
    initial_state: Tensor,
    start: Tensor,
    interleaved: bool,
    chunk_len: int,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (b, t, r, h, p), the final states, the last keys (z, r, h, n) and the last angles (z, h, s)."""
    (b, t, h, p), (r, n), sequences = x.shape, (k.shape[2], k.shape[4]), initial_state.shape[0]
    y = torch.empty((b, t, r, h, p), dtype=x.dtype)
    last_k = torch.empty((sequences, r, h, n), dtype=x.dtype)
    final_state, turned = torch.empty(initial_state.shape, dtype=dt.dtype), torch.empty(start.shape, dtype=dt.dtype)
    if sequences:
        inputs = (x, k, q, k_bias, q_bias, rate, dt, log_decay, gamma, kappa, skip, value_weight, start)
        _call(*inputs, interleaved, chunk_len, lengths, cu_seqlens).run(
            "anymamba_scan_forward",
            initial_state=initial_state.contiguous(),
            y=y,
            final_state=final_state,
            last_k=last_k,
            turned=turned,
        )
    return y, final_state, last_k, turned


def turned_scan_backward(
    dy: Tensor,
    dfinal_state: Tensor,
    dlast_k: Tensor,
    dturned: Tensor,
    x: Tensor,
    k: Tensor,
    q: Tensor,
    k_bias: Tensor,
    q_bias: Tensor,
    rate: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    kappa: Tensor,
    skip: Tensor,
    value_weight: Tensor | None,
    initial_state: Tensor,
    start: Tensor,
    interleaved: bool,
    chunk_len: int,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:
    """The gradients of the inputs from x to start, those of parameters summed over the sequences."""
    sequences, wide = initial_state.shape[0], dt.dtype
    make = torch.empty if sequences else torch.zeros
    named = {"v": x, "k": k, "q": q, "rate": rate, "dt": dt, "log_decay": log_decay, "gamma": gamma, "kappa": kappa}
    grads = {name: make(tensor.shape, dtype=tensor.dtype) for name, tensor in named.items()}
    states = {"initial_state": initial_state, "start": start}
    grads |= {name: make(tensor.shape, dtype=wide) for name, tensor in states.items()}
    parameters = {"k_bias": k_bias, "q_bias": q_bias}
    if value_weight is not None:
        parameters["value_weight"] = value_weight
    grads |= {name: make((sequences, *tensor.shape), dtype=wide) for name, tensor in parameters.items()}
    grads["skip"] = make((sequences, *x.shape[2:]), dtype=wide)
    if sequences:
        inputs = (x, k, q, k_bias, q_bias, rate, dt, log_decay, gamma, kappa, skip, value_weight, start)
        call = _call(*inputs, interleaved, chunk_len, lengths, cu_seqlens)
        call.strided("dy", dy)
        call.run(
            "anymamba_scan_backward",
            initial_state=initial_state.contiguous(),
            dfinal_state=dfinal_state.contiguous(),
            dlast_k=dlast_k.contiguous(),
            dturned=dturned.contiguous(),
            **{f"d{name}": grad for name, grad in grads.items()},
        )
    summed = {name: grads[name].sum(0).to(tensor.dtype) for name, tensor in parameters.items()}
    return (
        grads["v"],
        grads["k"],
        grads["q"],
        summed["k_bias"],
        summed["q_bias"],
        grads["rate"],
        grads["dt"],
        grads["log_decay"],
        grads["gamma"],
        grads["kappa"],
        grads["skip"].sum((0, 2)).to(skip.dtype),
        summed.get("value_weight", dy.new_empty(0)),
        grads["initial_state"],
        grads["start"],
    )
