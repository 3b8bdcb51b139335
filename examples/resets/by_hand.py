"""Hand-written weights that solve the reset tasks, as training could learn them.

Symbols are embedded with a root mean square of 1, which the norm leaves alone, and affinely independent, so that each
channel of the block's projection can take any three values on them. Then:

- majority: the first head's step size is tiny on a vote, which adds ±1 to a state that hardly decays, and large on R,
  which resets it. The second head is constant, and the gated norm keeps the direction of the two: the sign.
- rotor: R resets the state and writes (1, 0) into it; - and + write nothing and rotate it by ±2π/3. The two heads read
  its two coordinates.
- spinor: R writes the quaternion 1; i and j write nothing and multiply it from the left by themselves. The four heads
  read its four components.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anymamba import Mamba2, Mamba3
from examples.resets.model import VARIANTS, ResetModel

_IN_THE_PLANE = torch.tensor([[math.sqrt(2), 0.0], [0.0, math.sqrt(2)], [-1.0, -1.0]])
_RESET, _HOLD = 30.0, -30.0  # after a softplus
_VOTE, _TINY_STEP = 0.2, 1e-5
_ANGLE = {"rotor": math.atanh(2 / 3), "spinor": math.atanh(1 / 2)}  # a third of 2 half circles; half of 2


@torch.no_grad()
def by_hand(task: str) -> ResetModel:
    """Return the task's first variant with weights that solve it."""
    model = ResetModel(task, next(iter(VARIANTS[task])))
    for parameter in model.parameters():
        parameter.zero_()
    model.norm.weight.fill_(1)
    width = model.norm.weight.shape[0]
    model.embedding.weight.copy_((2 * torch.eye(4)[:3] if width == 4 else _IN_THE_PLANE).T)
    {"majority": _majority, "rotor": _rotor, "spinor": _spinor}[task](model)
    torch.nn.init.eye_(model.block.out_proj.weight)
    return model


def _majority(model: ResetModel) -> None:
    block = model.block
    assert isinstance(block, Mamba2)
    block.conv1d.weight.fill_(1)
    block.norm.weight.fill_(1)
    block.D.copy_(torch.tensor([0.0, 1.0]))
    large = 1 / math.sqrt(_VOTE * _TINY_STEP)  # B and C: a vote counts 1
    never, tiny = -30.0, math.log(math.expm1(_TINY_STEP))
    channels = [
        [5.0] * 3,  # z
        [5.0] * 3,
        [_before_silu(-_VOTE), _before_silu(_VOTE), 0.0],  # x
        [_before_silu(1.0)] * 3,
        [large] * 3,  # B
        [large] * 3,  # C
        [tiny, tiny, _RESET],  # dt
        [never] * 3,
    ]
    _project(model, torch.tensor(channels).T)
    model.head.weight.copy_(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))


def _rotor(model: ResetModel) -> None:
    angle = torch.tensor([[-_ANGLE["rotor"]], [_ANGLE["rotor"]], [0.0]])
    _write_at_reset(model, angle)
    angles = 2 * math.pi / 3 * torch.arange(3)
    # The second head reads the state as the query sees it, rotated back: minus the sine.
    model.head.weight.copy_(torch.stack([angles.cos(), -angles.sin()], dim=1))


def _spinor(model: ResetModel) -> None:
    axes = _ANGLE["spinor"] * torch.diag(torch.tensor([1.0, 1.0, 0.0]))
    _write_at_reset(model, axes.repeat(1, model.block.config.nheads))
    model.head.weight.copy_(torch.cat([torch.eye(4), -torch.eye(4)]))


def _write_at_reset(model: ResetModel, angles: Tensor) -> None:
    """Make R replace a Mamba-3 state by the first unit vector, and the others rotate it; head i reads coordinate i."""
    block = model.block
    assert isinstance(block, Mamba3)
    heads = block.config.nheads
    block.dt_bias.fill_(math.log(math.expm1(1.0)))
    block.B_bias[:, 0, 0] = 1
    block.C_bias[:, 0].copy_(torch.eye(heads))

    def each(first: float, second: float, reset: float, channels: int = heads) -> Tensor:
        return torch.tensor([[first], [second], [reset]]).expand(3, channels)

    keys = block.config.d_state
    parts = [
        each(5.0, 5.0, 5.0),  # z
        each(0.0, 0.0, 1.0),  # x
        each(0.0, 0.0, 0.0, 2 * keys),  # B and C are their biases
        each(0.0, 0.0, 0.0),  # dt is 1
        each(_HOLD, _HOLD, _RESET),  # A
        each(30.0, 30.0, 30.0),  # the weight of the token itself is 1, of its predecessor 0
        angles,
    ]
    _project(model, torch.cat(parts, dim=1))


def _project(model: ResetModel, channels: Tensor) -> None:
    """Set the block's projection so that its channels are (3, c) on the three symbols."""
    inputs = model.norm(model.embedding.weight.T).double()
    solution = torch.linalg.pinv(torch.cat([inputs, torch.ones(3, 1)], dim=1)) @ channels.double()
    model.block.in_proj.weight.copy_(solution[:-1].T)
    model.block.in_proj.bias.copy_(solution[-1])


def _before_silu(value: float) -> float:
    """Return the larger x with silu(x) = value."""
    low, high = -1.27, abs(value) + 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if middle / (1 + math.exp(-middle)) < value else (low, middle)
    return low
