"""Multi-Gate Residuals: several residual streams instead of one, each with a gate for writing and a weight for reading.

There are up to n streams s_i (b, t, d); the first is the input of the stack. A pass computes F. While there are fewer
than n streams, F is appended as a new one; afterwards

    s_i <- (1 - β_i) s_i + β_i F        β_i = σ(w_β · ŝ_i + b_i)        ŝ_i = s_i / (√d rms(s_i))
    h = Σ_i α_i s_i                     α = softmax_i(w_α · ŝ_i)        rms(s) = √(mean(s²) + eps)

and h is the input of the next pass. All of it is pointwise in time, so nothing is cached.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

EPS = 1e-5


class MultiGate(nn.Module):
    """Gates of a pass.

    Attributes:
        write_weight: Vector w_β, (d,), initially zero.
        read_weight: Vector w_α, (d,), initially zero, which reads the mean of the streams.
        bias: Biases b, (n,).
    """

    def __init__(
        self, d_model: int, bias: list[float], *, device: torch.device | str | None = None, dtype: torch.dtype | None
    ) -> None:
        """Create the parameters for as many streams as there are biases."""
        super().__init__()
        self.write_weight = nn.Parameter(torch.zeros(d_model, device=device, dtype=dtype))
        self.read_weight = nn.Parameter(torch.zeros(d_model, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.tensor(bias, device=device, dtype=dtype))
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


def default_gate_bias(where: str, passes: int, streams: int) -> float:
    """Return the initial bias of the paper, -ln(√(L / 21) (e³ + 1) - n) with L = passes - (n - 1).

    Raises:
        ValueError: It is undefined, because the argument of the logarithm is not positive.
    """
    updates = passes - (streams - 1)
    argument = math.sqrt(max(0, updates) / 21) * (math.exp(3) + 1) - streams
    if argument <= 0:
        raise ValueError(
            f"{where}: the default gate_bias is undefined for {streams} streams and {passes} passes, because it needs "
            "√((passes - streams + 1) / 21) (e³ + 1) > streams; use fewer streams, or set gate_bias"
        )
    return -math.log(argument)
