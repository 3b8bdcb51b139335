"""The official residual layer and gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.compat.norms import RMSNorm, layer_norm_fn
from anymamba.core.linear import apply_linear


class GatedMLP(nn.Module):
    """Gated MLP `fc2(y activation(gate))` with `[y, gate] = fc1(x)`."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.silu,
        bias: bool = False,
        multiple_of: int = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create two projections. The inner width is 8/3 of the outer one if not given, rounded up to a multiple."""
        super().__init__()
        hidden = int(8 * in_features / 3) if hidden_features is None else hidden_features
        width = -(-hidden // multiple_of) * multiple_of
        out = in_features if out_features is None else out_features
        self.fc1 = nn.Linear(in_features, 2 * width, bias=bias, device=device, dtype=dtype)
        self.activation = activation
        self.fc2 = nn.Linear(width, out, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        y, gate = apply_linear(self.fc1, x).chunk(2, dim=-1)
        return apply_linear(self.fc2, y * self.activation(gate))


class Block(nn.Module):
    """Residual layer: add to the residual stream, normalize, mix; the same with an MLP, unless that is `nn.Identity`.

    The output and the residual stream are returned separately; the next layer adds them.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[..., Any],
        mlp_cls: Callable[..., Any],
        norm_cls: Callable[..., Any] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        """Create the parts, each from its class and `dim`."""
        super().__init__()
        self.residual_in_fp32 = residual_in_fp32
        self.fused_add_norm = fused_add_norm
        self.norm = norm_cls(dim)
        self.mixer = mixer_cls(dim)
        self.mlp = None
        if mlp_cls is not nn.Identity:
            self.norm2 = norm_cls(dim)
            self.mlp = mlp_cls(dim)
        if fused_add_norm and not isinstance(self.norm, nn.LayerNorm | RMSNorm):
            raise TypeError(f"Block: fused_add_norm needs LayerNorm or RMSNorm, got {type(self.norm).__name__}")

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None = None, inference_params: Any = None, **mixer_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the output (b, t, d) and the residual stream, from those of the previous layer."""
        hidden_states, residual = self._add_and_norm(self.norm, hidden_states, residual)
        hidden_states = self.mixer(hidden_states, inference_params=inference_params, **mixer_kwargs)
        if self.mlp is not None:
            hidden_states, residual = self._add_and_norm(self.norm2, hidden_states, residual)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual

    def _add_and_norm(self, norm: Any, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.fused_add_norm:
            both: tuple[Tensor, Tensor] = fused_add_and_norm(norm, hidden, residual, True, self.residual_in_fp32)
            return both
        residual = hidden if residual is None else hidden + residual
        normed = norm(residual.to(norm.weight.dtype))
        return normed, residual.float() if self.residual_in_fp32 and residual.dtype != torch.float64 else residual

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """Return the states of an empty cache of the mixer."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)


class FormerBlock(Block):
    """Residual layer without an MLP, with the constructor of the first versions."""

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[..., Any],
        norm_cls: Callable[..., Any] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        """Create the parts, each from its class and `dim`."""
        super().__init__(dim, mixer_cls, nn.Identity, norm_cls, fused_add_norm, residual_in_fp32)


def fused_add_and_norm(norm: Any, hidden: Tensor, residual: Tensor | None, prenorm: bool, in_fp32: bool) -> Any:
    """Return `layer_norm_fn` with the parameters of a norm, in the dtype of its weight."""
    return layer_norm_fn(
        hidden.to(norm.weight.dtype),
        norm.weight,
        norm.bias,
        residual=residual,
        prenorm=prenorm,
        residual_in_fp32=in_fp32,
        eps=norm.eps,
        is_rms_norm=isinstance(norm, RMSNorm),
    )
