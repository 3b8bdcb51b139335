"""The official norms: gated ones (`layernorm_gated`), and those fused with a residual add (`layer_norm`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.core.dtypes import state_dtype
from anymamba.ops.norms_and_gates import rms_norm


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """Normalize x (..., d) over groups of channels, and gate it by `silu(z)` before or after.

    Args:
        x: Inputs.
        weight: Weight, (d,).
        bias: Bias, (d,), or None; added before a gate that follows.
        z: Gates in the shape of x, or None.
        eps: Number added to the variance or mean square.
        group_size: Number of channels that are normalized together; all if not given.
        norm_before_gate: Whether the norm comes before the gate.
        is_rms_norm: Whether to normalize without subtracting the mean.
    """
    z = None if z is None else z.to(x.dtype)
    if is_rms_norm and bias is None:
        return rms_norm(x, weight, z, group_size=group_size, norm_before_gate=norm_before_gate, eps=eps)
    acc_dtype = state_dtype(x.dtype)
    gate = None if z is None else F.silu(z.to(acc_dtype))
    u = x.to(acc_dtype) if gate is None or norm_before_gate else x.to(acc_dtype) * gate
    if is_rms_norm:
        y = rms_norm(u, weight, group_size=group_size, eps=eps)
    else:
        grouped = u.unflatten(-1, (-1, group_size or u.shape[-1]))
        y = F.layer_norm(grouped, grouped.shape[-1:], eps=eps).flatten(-2) * weight.to(acc_dtype)
    y = y if bias is None else y + bias.to(acc_dtype)
    return (y * gate if norm_before_gate and gate is not None else y).to(x.dtype)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """Return `layernorm_fn` without subtracting the mean."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
) -> Tensor:
    """Return `rmsnorm_fn`, which computes in float32 or wider, as with `upcast`."""
    return rmsnorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate)


class GatedLayerNorm(nn.Module):
    """Module of `layernorm_fn`, with its parameters."""

    IS_RMS = False

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the weight, all ones, and unless it is an RMS norm the bias, all zeros."""
        super().__init__()
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.bias = None if self.IS_RMS else nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize `x` and gate it by `z`, if given."""
        options = (self.eps, self.group_size, self.norm_before_gate, self.IS_RMS)
        return layernorm_fn(x, self.weight, self.bias, z, *options)


class RMSNormGated(GatedLayerNorm):
    """Module of `rmsnorm_fn`, with its parameter."""

    IS_RMS = True


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Normalize x + x1 + residual, and return that sum, too, if `prenorm`.

    Args:
        x: Inputs, (..., d).
        weight: Weight, (d,).
        bias: Bias, (d,), or None.
        residual: Residual to add, or None.
        x1: Second input to add, or None.
        weight1: Weight of a second norm of the same sum, or None.
        bias1: Bias of the second norm.
        eps: Number added to the variance or mean square.
        dropout_p: Probability that an entry of x, or of x1, is dropped.
        rowscale: Factors of x, one per row.
        prenorm: Whether to also return the sum.
        residual_in_fp32: Whether to return the sum in float32 if there was no residual.
        is_rms_norm: Whether to normalize without subtracting the mean.
        return_dropout_mask: Option that is not supported.

    Raises:
        NotImplementedError: `return_dropout_mask` was given.
    """
    if return_dropout_mask:
        raise NotImplementedError("mamba_ssm.ops.triton.layer_norm.layer_norm_fn with return_dropout_mask")
    acc_dtype = state_dtype(x.dtype)
    total = x.to(acc_dtype) if rowscale is None else x.to(acc_dtype) * rowscale.to(acc_dtype).unsqueeze(-1)
    total = F.dropout(total, dropout_p) if dropout_p else total
    if x1 is not None:
        total = total + (F.dropout(x1.to(acc_dtype), dropout_p) if dropout_p else x1.to(acc_dtype))
    if residual is not None:
        total = total + residual.to(acc_dtype)
    sum_dtype = residual.dtype if residual is not None else acc_dtype if residual_in_fp32 else x.dtype
    norms = [(weight, bias)] if weight1 is None else [(weight, bias), (weight1, bias1)]
    results = [layernorm_fn(total, w.to(acc_dtype), b, eps=eps, is_rms_norm=is_rms_norm).to(x.dtype) for w, b in norms]
    if prenorm:
        results.append(total.to(sum_dtype))
    return results[0] if len(results) == 1 else tuple(results)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Return `layer_norm_fn` without subtracting the mean."""
    options = (eps, dropout_p, rowscale, prenorm, residual_in_fp32, True, return_dropout_mask)
    return layer_norm_fn(x, weight, bias, residual, x1, weight1, bias1, *options)


class RMSNorm(nn.Module):
    """Module of `rms_norm_fn`, with its parameter."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the weight, all ones."""
        super().__init__()
        self.eps = eps
        self.dropout_p = dropout_p
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.bias = None

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        """Normalize x + residual, and return that sum, too, if `prenorm`."""
        return rms_norm_fn(
            x,
            self.weight,
            self.bias,
            residual=residual,
            eps=self.eps,
            dropout_p=self.dropout_p if self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
        )
