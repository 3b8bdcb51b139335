"""Parts of a stack: norms, the gated MLP, a block with its residual connection, and Multi-Gate Residuals.

    r <- r + mixer(norm(r))        r <- r + mlp(norm2(r))

What is added may be multiplied by a number (`residual_multiplier`). The residual stream r is float32 or wider, also for
parameters of half precision.

Multi-Gate Residuals have up to n streams s_i (b, t, d) instead of one, each with a gate for writing and a weight for
reading; the first is the input of the stack. A pass computes F. While there are fewer than n streams, F is appended as
a new one; afterwards

    s_i <- (1 - β_i) s_i + β_i F        β_i = σ(w_β · ŝ_i + b_i)        ŝ_i = s_i / (√d rms(s_i))
    h = Σ_i α_i s_i                     α = softmax_i(w_α · ŝ_i)        rms(s) = √(mean(s²) + eps)

and h is the input of the next pass. All of it is pointwise in time, so nothing is cached.

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
    from anymamba.kernels.step_description import StepBuilder

EPS = 1e-5  # of the gates


class RMSNorm(layers.RMSNorm):
    """Norm `y = weight x / √(mean(x²) + eps)` over the last axis, in the dtype of x, rounded to that of the weight."""

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Normalize `x` (..., d)."""
        return super().forward(x).to(self.weight.dtype)


class LayerNorm(nn.LayerNorm):
    """Norm `y = weight (x - mean(x)) / √(var(x) + eps) + bias`, in the dtype of x, rounded to that of the weight."""

    def __init__(self, width: int, *, eps: float = 1e-5, **factory: Any) -> None:
        """Create the weight, all ones, and the bias, all zeros."""
        super().__init__(width, eps=eps, **factory)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Normalize `x` (..., d)."""
        y = F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)
        return y.to(self.weight.dtype)


class GatedMLP(nn.Module):
    """MLP `fc2(y silu(g))` with `[y, g] = fc1(x)`: the value comes first, as in the official MLP, or the gate."""

    def __init__(
        self, d_model: int, width: int, *, bias: bool = False, gate_first: bool = False, **factory: Any
    ) -> None:
        """Create two projections."""
        super().__init__()
        self.gate_first = gate_first
        self.fc1 = nn.Linear(d_model, 2 * width, bias=bias, **factory)
        self.fc2 = nn.Linear(width, d_model, bias=bias, **factory)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Map (..., d) to (..., d)."""
        first, second = apply_linear(self.fc1, x).chunk(2, dim=-1)
        y, gate = (second, first) if self.gate_first else (first, second)
        return apply_linear(self.fc2, y * F.silu(gate))

    def describe_step(self, builder: StepBuilder, x: int, d_model: int, *, to: int, factor: float = 1.0) -> None:
        """Describe `forward` of one token, from slot `x`, added to slot `to` times `factor`."""
        width = self.fc2.in_features
        both = builder.linear(x, self, "fc1", d_model, 2 * width)
        y, gate = (both + width, both) if builder.attribute(self, "gate_first") else (both, both + width)
        inner = builder.gate(y, gate, width)
        builder.linear(inner, self, "fc2", width, d_model, to=to, add=True, factor=factor)

    def projection_parts(self) -> dict[str, tuple[ProjectionPart, ...]]:
        """Return the parts of the output of `fc1`."""
        names = ("gate", "value") if self.gate_first else ("value", "gate")
        return {"fc1": tuple(ProjectionPart(name, self.fc2.in_features) for name in names)}


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
        self.multiplier = config.residual_multiplier
        self.mixer = config.family(index)(config.block_config(index), **factory)
        self.norm = make_norm(config, **factory)
        self.mlp: GatedMLP | None = None
        if config.mlp_width:
            self.norm2 = make_norm(config, **factory)
            options = config.mlp_config()
            names = {"bias": options.bias, "gate_first": options.gate_first}
            self.mlp = GatedMLP(config.d_model, config.mlp_width, **names, **factory)

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
        hidden = self._scale(self._drop(hidden))
        if self.mlp is None:
            return residual + hidden if add_residual else hidden.to(residual.dtype)
        stream = residual + hidden
        mlp_output = self._scale(self._drop(self.mlp(self.norm2(stream))))
        return stream + mlp_output if add_residual else hidden.to(residual.dtype) + mlp_output

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout and self.training else x

    def _scale(self, x: Tensor) -> Tensor:
        return x if self.multiplier == 1 else x * self.multiplier

    def describe_step(self, builder: StepBuilder, residual: int, *, add_residual: bool = True) -> None:
        """Describe one token: the result is added to slot `residual`, or replaces it."""
        width, mixer = builder.input_width, builder.submodule(self, "mixer", type(self.mixer))
        if not add_residual and self.mlp is not None:
            builder.reject("a layer with an MLP whose residual is ignored has no compiled step")
        factor = builder.attribute(self, "multiplier")
        hidden = builder.norm(residual, builder.submodule(self, "norm", RMSNorm), width)
        mixer.describe_step(builder, hidden, to=residual, add=add_residual, factor=factor)
        builder.release(hidden)
        if self.mlp is not None:
            hidden = builder.norm(residual, builder.submodule(self, "norm2", RMSNorm), width)
            builder.submodule(self, "mlp", GatedMLP).describe_step(builder, hidden, width, to=residual, factor=factor)
            builder.release(hidden)


def make_norm(config: StackConfig, **factory: Any) -> RMSNorm | LayerNorm:
    """Return the norm that the config names."""
    kind = RMSNorm if config.rms_norm else LayerNorm
    return kind(config.d_model, eps=config.norm_eps, **factory)


def initialize_residual(model: nn.Module, passes: int) -> None:
    """Divide the projections into the residual stream by √passes, and set the biases of projections to zero."""
    for name, parameter in model.named_parameters():
        if name.endswith(("out_proj.weight", "fc2.weight")):
            bound = 1 / math.sqrt(parameter.shape[1] * passes)
            nn.init.uniform_(parameter, -bound, bound)
        elif name.endswith(("in_proj.bias", "out_proj.bias")):
            nn.init.zeros_(parameter)


class MultiGate(nn.Module):
    """Gates of a pass.

    Attributes:
        write_weight: Vector w_β, (d,), initially zero.
        read_weight: Vector w_α, (d,), initially zero, which reads the mean of the streams.
        bias: Biases b, (n,).
    """

    def __init__(self, d_model: int, bias: list[float], **factory: Any) -> None:
        """Create the parameters for as many streams as there are biases."""
        super().__init__()
        self.write_weight = nn.Parameter(torch.zeros(d_model, **factory))
        self.read_weight = nn.Parameter(torch.zeros(d_model, **factory))
        self.bias = nn.Parameter(torch.tensor(bias, **factory))
        for parameter in (self.write_weight, self.read_weight, self.bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def forward(
        self, streams: list[Float[Tensor, "b *t d"]], f: Float[Tensor, "b *t d"]
    ) -> tuple[list[Float[Tensor, "b *t d"]], Float[Tensor, "b *t d"]]:
        """Write the result of a pass to the streams, and read the input of the next pass from them.

        Args:
            streams: Streams before the pass.
            f: Result of the pass.

        Returns:
            The new streams, and their weighted mean.
        """
        if len(streams) < len(self.bias):
            streams = [*streams, f]
        else:
            weight = self.write_weight.to(f.dtype)
            biases = self.bias.to(f.dtype)
            gates = [torch.sigmoid(_score(s, weight) + b) for s, b in zip(streams, biases, strict=True)]
            streams = [torch.lerp(s, f, beta) for s, beta in zip(streams, gates, strict=True)]
        if len(streams) == 1:
            return streams, streams[0]
        weight = self.read_weight.to(f.dtype)
        alpha = torch.softmax(torch.stack([_score(s, weight) for s in streams]), dim=0)
        return streams, sum(a * s for a, s in zip(alpha, streams, strict=True))


def _score(s: Tensor, weight: Tensor) -> Tensor:
    """Return w · s / (√d rms(s)), (b, ..., d) -> (b, ..., 1)."""
    scale = torch.rsqrt(s.square().mean(-1, keepdim=True) + EPS) / math.sqrt(s.shape[-1])
    return (s * weight).sum(-1, keepdim=True) * scale
