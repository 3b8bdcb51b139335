"""The optimiser: which parameters are decayed, and the learning rate of each step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from anymamba.training.config import OptimiserSection, ScheduleSection


def parameter_groups(model: nn.Module, config: OptimiserSection) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters by name: those that are decayed, and those that are not.

    Decayed are the weights of projections. Step sizes, decay rates, skips, norms, biases, convolutions, the weights of
    MIMO and initial states are not: they have a scale of their own. Embedding and head are, if the config says so.
    """
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    embeddings |= {id(p) for name, p in model.named_parameters() if name == "lm_head.weight"}
    decayed = (linear - embeddings) | (embeddings if config.decay_embeddings else set())
    named = dict(model.named_parameters())
    return (
        {name: p for name, p in named.items() if id(p) in decayed},
        {name: p for name, p in named.items() if id(p) not in decayed},
    )


def make_optimiser(model: nn.Module, config: OptimiserSection) -> torch.optim.AdamW:
    """AdamW over the two groups."""
    decayed, others = parameter_groups(model, config)
    return torch.optim.AdamW(
        [
            {"params": list(decayed.values()), "weight_decay": config.weight_decay},
            {"params": list(others.values()), "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


def learning_rate(step: int, largest: float, schedule: ScheduleSection) -> float:
    """The learning rate of step 0, 1, ..."""
    if step < schedule.warmup:
        return largest * (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return largest
    length = schedule.steps - schedule.warmup
    if schedule.kind == "wsd":
        length = min(length, round(schedule.decay * schedule.steps))
    done = 1 - (schedule.steps - step) / max(1, length)  # of the decay, from 0 to 1
    if done <= 0:
        return largest
    left = 1 - done if schedule.kind == "wsd" else (1 + math.cos(math.pi * done)) / 2
    return largest * (schedule.final + (1 - schedule.final) * left)


def optimiser_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by name: "backbone.norm_f.weight.exp_avg"."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimiser.state.get(parameter, {}).items()
    }


def restore_optimiser(model: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimiser_tensors`."""
    for name, parameter in model.named_parameters():
        state = {key[len(name) + 1 :]: x for key, x in tensors.items() if key.rpartition(".")[0] == name}
        if state:
            optimiser.state[parameter] = {
                key: x.clone() if key == "step" else x.to(parameter.device, copy=True) for key, x in state.items()
            }
