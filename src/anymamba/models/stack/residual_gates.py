"""Multi-Gate Residuals: several streams in place of one residual, each with a gate to write and a weight to be read.

Up to n streams s_i (b, t, d); the first is the input of the stack. A pass gives F. While there are fewer than n
streams, F is appended; then

    s_i <- (1 - β_i) s_i + β_i F        β_i = σ(w_β · ŝ_i + b_i)        ŝ_i = s_i / (√d rms(s_i))
    h = Σ_i α_i s_i                     α = softmax_i(w_α · ŝ_i)        rms(s) = √(mean(s²) + eps)

and h is the input of the next pass. All of it is point-wise in time: nothing is cached.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

EPS = 1e-5


class MultiGate(nn.Module):
    """The gates of a pass.

    Attributes:
        write_weight: w_β, (d,), zero at first.
        read_weight: w_α, (d,), zero at first: the mean of the streams.
        bias: b, (n,).
    """

    def __init__(
        self, d_model: int, bias: list[float], *, device: torch.device | str | None = None, dtype: torch.dtype | None
    ) -> None:
        """Create the parameters; there are as many streams as biases."""
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
            streams: before the pass.
            f: the result of the pass.

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
    """(b, ..., d) -> (b, ..., 1): w · s / (√d rms(s))."""
    scale = torch.rsqrt(s.square().mean(-1, keepdim=True) + EPS) / math.sqrt(s.shape[-1])
    return (s * weight).sum(-1, keepdim=True) * scale


def default_gate_bias(where: str, passes: int, streams: int) -> float:
    """The paper's initial bias, -ln(√(L / 21) (e³ + 1) - n) with L = passes - (n - 1).

    Raises:
        ValueError: it does not exist.
    """
    updates = passes - (streams - 1)
    inside = math.sqrt(max(0, updates) / 21) * (math.exp(3) + 1) - streams
    if inside <= 0:
        raise ValueError(
            f"{where}: the usual bias of the gates does not exist for {streams} streams and {passes} passes: "
            "√((passes - streams + 1) / 21) (e³ + 1) must be above streams; use fewer streams, or give gate_bias"
        )
    return -math.log(inside)
