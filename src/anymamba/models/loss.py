"""The cross-entropy of targets under a head, without holding the logits of all tokens at once.

    nats = Σ_t (logsumexp_v(l_t) - l_t[target_t])       l = hidden weightᵀ
    dl_t = softmax(l_t) - e[target_t]                   dhidden = dl weight        dweight = dlᵀ hidden

Hidden states are processed a few rows at a time. The loss is one number, so its gradients are known up to a factor
while the logits of the rows are still in memory: they are computed in the forward pass, and the backward pass only
scales them.

Letters: m tokens, d d_model, v padded vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anymamba.core.dtypes import state_dtype
from anymamba.core.linear import apply_linear, linear
from anymamba.core.operators import has_no_hooks, is_eager_no_grad
from anymamba.quantization.quantize import QuantizedLinear

IGNORED_LABEL = -100
_MAX_LOGITS = 2**24  # held at once: 64 MiB in float32


def cross_entropy_sum(logits: Float[Tensor, "m v"], targets: Int[Tensor, " m"]) -> Float[Tensor, ""]:
    """Return the summed negative log-likelihood of targets, in float32 or wider; `IGNORED_LABEL` counts as 0."""
    logits_mv = logits.to(state_dtype(logits.dtype))
    return F.cross_entropy(logits_mv, targets.long(), ignore_index=IGNORED_LABEL, reduction="sum")


def chunked_cross_entropy(
    head: nn.Module, hidden: Float[Tensor, "m d"], targets: Int[Tensor, " m"]
) -> Float[Tensor, ""]:
    """Return `cross_entropy_sum(head(hidden), targets)`, with the logits of a few tokens at a time.

    A quantized head is called for a few tokens at a time; any module other than a plain `nn.Linear`, or one with hooks,
    is called for all.
    """
    if isinstance(head, QuantizedLinear):
        size = max(1, _MAX_LOGITS // head.out_features)
        parts = zip(hidden.split(size), targets.split(size), strict=True)
        return torch.stack([cross_entropy_sum(head(h_md), targets_m) for h_md, targets_m in parts]).sum()
    if type(head) is not nn.Linear or head.bias is not None or not has_no_hooks(head):
        return cross_entropy_sum(apply_linear(head, hidden), targets)
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    inputs, enabled = (hidden, head.weight, targets), torch.is_grad_enabled()
    needs_grad = (enabled and hidden.requires_grad, enabled and head.weight.requires_grad)
    nats: Tensor = (_forward if is_eager_no_grad(inputs) else _operator)(*inputs, *needs_grad)[0]
    return nats


def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, needs_dhidden: bool, needs_dweight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return nats, and its gradients with respect to hidden states and weight, empty where not needed."""
    # 1) Allocate the results. Leave out ignored labels on a CPU; other devices, which would have to report their number
    # to the host, compute and clear them.
    nats, dhidden, dweight = _fake(hidden, weight, targets, needs_dhidden, needs_dweight)
    is_target_m = targets != IGNORED_LABEL
    kept = is_target_m if hidden.is_cpu else slice(None)
    rows_md, ignored_m1 = hidden[kept], ~is_target_m[kept].unsqueeze(1)
    targets_m = targets[kept].long().masked_fill(ignored_m1.squeeze(1), 0)
    weight_vd, drows_md = weight.to(hidden.dtype), torch.empty_like(rows_md if needs_dhidden else dhidden)
    nats.zero_()
    dweight.zero_()
    # 2) Blocks of equal size, each with at most _MAX_LOGITS logits.
    parts = -(-len(rows_md) * weight.shape[0] // _MAX_LOGITS)
    size = -(-len(rows_md) // max(1, parts))
    for begin in range(0, len(rows_md), max(1, size)):
        # 3) The loss of a block.
        part, index_m1 = slice(begin, begin + size), targets_m[begin : begin + size].unsqueeze(1)
        logits_mv = linear(rows_md[part], weight_vd).to(nats.dtype)
        log_p_mv = torch.log_softmax(logits_mv, -1)
        del logits_mv
        nats -= log_p_mv.gather(1, index_m1).masked_fill_(ignored_m1[part], 0).sum()
        if not needs_dhidden and not needs_dweight:
            continue
        # 4) Its gradients: softmax(l) - e[target], in the memory of the logits.
        minus_one = log_p_mv.new_full((), -1.0).expand_as(index_m1)
        dl_mv = log_p_mv.exp_().scatter_add_(1, index_m1, minus_one).to(hidden.dtype)
        if not hidden.is_cpu:
            dl_mv.masked_fill_(ignored_m1[part], 0)
        if needs_dhidden:
            drows_md[part] = linear(dl_mv, weight_vd.T)
        if needs_dweight and parts == 1:
            dweight.copy_(linear(dl_mv.T, rows_md.T))
        elif needs_dweight and dweight.dtype == dl_mv.dtype:
            dweight.addmm_(dl_mv.T, rows_md[part])
        elif needs_dweight:
            dweight += dl_mv.T @ rows_md[part]
    if needs_dhidden:
        dhidden.zero_()[kept] = drows_md
    return nats, dhidden, dweight


def _fake(
    hidden: Tensor, weight: Tensor, targets: Tensor, needs_dhidden: bool, needs_dweight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty((), dtype=state_dtype(hidden.dtype)),
        torch.empty(hidden.shape if needs_dhidden else (0,), dtype=hidden.dtype, device=hidden.device),
        torch.empty(weight.shape if needs_dweight else (0,), dtype=weight.dtype, device=weight.device),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, dnats: Tensor | None, *second: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(x is not None for x in second):
        raise RuntimeError("anymamba::linear_nats has no second derivative: its backward is derived by hand.")
    if dnats is None:
        return None, None, None, None, None
    dhidden, dweight = ((x.to(dnats.dtype) * dnats).to(x.dtype) if x.numel() else None for x in ctx.saved_tensors)
    return dhidden, dweight, None, None, None


_operator = torch.library.custom_op(
    "anymamba::linear_nats",
    _forward,
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor targets, bool needs_dhidden, bool needs_dweight)"
    " -> (Tensor, Tensor, Tensor)",
)
_operator.register_fake(_fake)
_operator.register_autograd(_backward, setup_context=_setup_context)
