"""Parts of a stack: norms, the gated MLP, and a block with its residual connection.

    r <- r + mixer(norm(r))        r <- r + mlp(norm2(r))

The residual stream r is float32 or wider, whatever the parameters are.

Letters: b batch, t time, d d_model, f MLP width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anymamba.blocks import layers
from anymamba.blocks.layers import ProjectionPart
from anymamba.core.cache_tree import Tree
from anymamba.core.linear import apply_linear
from anymamba.models.stack.stack_config import StackConfig

if TYPE_CHECKING:
    from anymamba.kernels.step import StepBuilder


class RMSNorm(layers.RMSNorm):
    """Norm `y = weight x / √(mean(x²) + eps)` over the last axis, in the dtype of x, rounded to that of the weight."""

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Normalize `x` (..., d)."""
        return super().forward(x).to(self.weight.dtype)


class LayerNorm(nn.LayerNorm):
    """Norm `y = weight (x - mean(x)) / √(var(x) + eps) + bias`, in the dtype of x, rounded to that of the weight."""

    def __init__(
        self, width: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Create the weight, all ones, and the bias, all zeros."""
        super().__init__(width, eps=1e-5, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Normalize `x` (..., d)."""
        y = F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)
        return y.to(self.weight.dtype)


class GatedMLP(nn.Module):
    """MLP `fc2(y silu(g))` with `[y, g] = fc1(x)`: the value comes first, as in the official MLP."""

    def __init__(
        self, d_model: int, width: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Create two projections without bias."""
        super().__init__()
        self.fc1 = nn.Linear(d_model, 2 * width, bias=False, device=device, dtype=dtype)
        self.fc2 = nn.Linear(width, d_model, bias=False, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Map (..., d) to (..., d)."""
        y, gate = apply_linear(self.fc1, x).chunk(2, dim=-1)
        return apply_linear(self.fc2, y * F.silu(gate))

    def describe_step(self, builder: StepBuilder, x: int, d_model: int, *, to: int) -> None:
        """Describe `forward` of one token, from slot `x`, added to slot `to`."""
        width = self.fc2.in_features
        both = builder.linear(x, self, "fc1", d_model, 2 * width)
        builder.linear(builder.gate(both, both + width, width), self, "fc2", width, d_model, to=to, add=True)

    def projection_parts(self) -> dict[str, tuple[ProjectionPart, ...]]:
        """Return the parts of the output of `fc1`."""
        width = self.fc2.in_features
        return {"fc1": (ProjectionPart("value", width), ProjectionPart("gate", width))}


class ResidualLayer(nn.Module):
    """Block, and an MLP if the config has one, each after a norm and added to the residual stream."""

    def __init__(
        self,
        config: StackConfig,
        index: int = 0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the block of layer `index`, the norms and the MLP."""
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dropout = config.dropout
        self.mixer = config.family(index)(config.block_config(index), **factory)
        self.norm = make_norm(config, **factory)
        self.mlp: GatedMLP | None = None
        if config.mlp_width:
            self.norm2 = make_norm(config, **factory)
            self.mlp = GatedMLP(config.d_model, config.mlp_width, **factory)

    def forward(
        self, residual: Float[Tensor, "b *t d"], cache: Tree | None = None, *, add_residual: bool = True, **options: Any
    ) -> tuple[Float[Tensor, "b *t d"], Tree]:
        """Run over a sequence (b, t, d) or a token (b, d), from any cache to a new one.

        Args:
            residual: Residual stream.
            cache: Cache of the block.
            add_residual: Whether to return the stream after the layer, or only what the layer adds to it.
            options: Keyword arguments of the block.
        """
        hidden, cache = self.mixer(self.norm(residual), cache, return_cache=True, **options)
        return self._connect(residual, hidden, add_residual), cache

    def step_infinite(self, residual: Float[Tensor, "b d"], *, add_residual: bool = True) -> Float[Tensor, "b d"]:
        """Return the stationary result of `forward` for a token that repeats forever."""
        return self._connect(residual, self.mixer.step_infinite(self.norm(residual)), add_residual)

    def _connect(self, residual: Tensor, hidden: Tensor, add_residual: bool) -> Tensor:
        """Return the result of the layer from the output of its block: the residual connection, and the MLP."""
        hidden = self._drop(hidden)
        if self.mlp is None:
            return residual + hidden if add_residual else hidden.to(residual.dtype)
        stream = residual + hidden
        mlp_output = self._drop(self.mlp(self.norm2(stream)))
        return stream + mlp_output if add_residual else hidden.to(residual.dtype) + mlp_output

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout and self.training else x

    def describe_step(self, builder: StepBuilder, residual: int, *, add_residual: bool = True) -> None:
        """Describe one token: the result is added to slot `residual`, or replaces it."""
        width, mixer = builder.input_width, builder.submodule(self, "mixer", type(self.mixer))
        if not add_residual and self.mlp is not None:
            builder.reject("a layer with an MLP whose residual is ignored has no compiled step")
        hidden = builder.norm(residual, builder.submodule(self, "norm", RMSNorm), width)
        mixer.describe_step(builder, hidden, to=residual, add=add_residual)
        builder.release(hidden)
        if self.mlp is not None:
            hidden = builder.norm(residual, builder.submodule(self, "norm2", RMSNorm), width)
            builder.submodule(self, "mlp", GatedMLP).describe_step(builder, hidden, width, to=residual)
            builder.release(hidden)


def make_norm(config: StackConfig, **factory: Any) -> RMSNorm | LayerNorm:
    """Return the norm that the config names."""
    return RMSNorm(config.d_model, **factory) if config.rms_norm else LayerNorm(config.d_model, **factory)


def initialize_residual(model: nn.Module, passes: int) -> None:
    """Divide the projections into the residual stream by √passes, and set the biases of projections to zero."""
    for name, parameter in model.named_parameters():
        if name.endswith(("out_proj.weight", "fc2.weight")):
            bound = 1 / math.sqrt(parameter.shape[1] * passes)
            nn.init.uniform_(parameter, -bound, bound)
        elif name.endswith(("in_proj.bias", "out_proj.bias")):
            nn.init.zeros_(parameter)
