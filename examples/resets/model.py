"""The smallest models that can solve the reset tasks: one block, of which only the state remembers.

    one-hot (3) -> Linear -> RMSNorm -> block -> Linear -> logits

No residual connection bypasses the block, and no convolution looks back (Mamba-2's has width 1), so that the head
sees the state and nothing else. Parameters of the models that solve the tasks:

| | majority (d = 2) | rotor (d = 2) | spinor (d = 4) |
|---|---|---|---|
| block | Mamba-2, 2 heads of 1, state 1 | Mamba-3, 2 heads of 1, state 2 | Mamba-3, 4 heads of 1, state 4 |
| embedding, weight and bias | 3·2 + 2 | 3·2 + 2 | 3·4 + 4 |
| norm | 2 | 2 | 4 |
| in_proj, weight and bias | 8 channels: 2·8 + 8 | 15 channels: 2·15 + 15 | 40 channels: 4·40 + 40 |
| convolution, weight and bias | 4 + 4 | | |
| dt_bias, D | 2 + 2 | 2 + 2 | 4 + 4 |
| A_log; gated norm | 2; 2 | | |
| B_bias, C_bias; B_norm, C_norm | | 4 + 4; 2 + 2 | 16 + 16; 4 + 4 |
| out_proj, weight and bias | 4 + 2 | 4 + 2 | 16 + 4 |
| head, weight and bias | 2·2 + 2 | 2·3 + 3 | 4·8 + 8 |
| all | 62 | 86 | 328 |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anymamba import Mamba2, Mamba3
from anymamba.blocks import RMSNorm
from examples.resets.streams import STREAMS

SYMBOLS = 3
_TINY = {"expand": 1, "headdim": 1, "bias": True}
# Step sizes begin near 1, where one token can reset the state, or rotate it by a third of a circle and more.
_VOTING = {**_TINY, "d_model": 2, "d_state": 1, "d_conv": 1, "dt_min": 0.1, "dt_max": 1}
# Decays have to approach 1, which a softplus makes fast.
_ROTATING = {**_TINY, "rope_fraction": 1, "dt_min": 0.5, "dt_max": 1, "a_activation": "softplus"}
_ROTOR = {**_ROTATING, "d_model": 2, "d_state": 2}
_SPINOR = {**_ROTATING, "d_model": 4, "d_state": 4, "rotation_range": 2}


@dataclass(frozen=True)
class Variant:
    """A block, with the channels of its projection that are held constant."""

    block: type[Mamba2] | type[Mamba3]
    fields: dict[str, Any]
    constant: tuple[int, ...] = ()


# The first variant of a task solves it, the others should fail.
VARIANTS: dict[str, dict[str, Variant]] = {
    "majority": {
        "Mamba-2": Variant(Mamba2, _VOTING),
        "fixed decay": Variant(Mamba2, _VOTING, (6, 7)),  # dt of the two heads
    },
    "rotor": {
        "Mamba-3": Variant(Mamba3, _ROTOR),
        "no rotation": Variant(Mamba3, {**_ROTOR, "rope_fraction": 0}),
        "fixed rotation": Variant(Mamba3, _ROTOR, (8, 9, 14)),  # dt of the two heads, and the angle
    },
    "spinor": {
        "quaternion": Variant(Mamba3, {**_SPINOR, "rotation": "quaternion"}),
        "complex": Variant(Mamba3, {**_SPINOR, "rotation": "complex"}),
    },
}


class PartlyConstant(nn.Linear):
    """A projection some of whose outputs are constant: their bias."""

    varying: Tensor

    def __init__(self, width: int, channels: int, constant: tuple[int, ...]) -> None:
        """Create the weights; those of the constant outputs stay unused."""
        super().__init__(width, channels)
        varying = torch.ones(channels, 1)
        varying[list(constant)] = 0
        self.register_buffer("varying", varying, persistent=False)

    def forward(self, input: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch c"]:
        """Project (..., d) to (..., c)."""
        return F.linear(input, self.weight * self.varying, self.bias)


class ResetModel(nn.Module):
    """A model of a variant of a task: embedding, norm, block and head.

    Args:
        task: Name of the task: majority, rotor or spinor.
        variant: Name of the variant, a key of `VARIANTS[task]`.
    """

    def __init__(self, task: str, variant: str) -> None:
        """Create the parameters."""
        super().__init__()
        chosen = VARIANTS[task][variant]
        width = chosen.fields["d_model"]
        self.embedding = nn.Linear(SYMBOLS, width)
        self.norm = RMSNorm(width)
        self.block = chosen.block(**chosen.fields)
        if chosen.constant:
            self.block.in_proj = PartlyConstant(width, self.block.in_proj.out_features, chosen.constant)
        self.head = nn.Linear(width, len(STREAMS[task].classes))

    def forward(self, symbols: Int[Tensor, "b t"]) -> Float[Tensor, "b t k"]:
        """Return the logits after each symbol."""
        one_hot = F.one_hot(symbols, SYMBOLS).to(self.head.weight.dtype)
        return self.head(self.block(self.norm(self.embedding(one_hot))))
