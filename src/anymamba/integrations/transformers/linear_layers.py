"""Projections of few rows: what a token of a model reads besides its mixers.

torch's own product of few rows reads a matrix more slowly than memory delivers it. So the large projections of an
accelerated model that belong to no mixer (those of attention, of MLPs and the head) run on the compiled kernels where
few rows go through them without gradients, and are torch's own everywhere else.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anymamba.core.linear import linear
from anymamba.kernels.compiled_step import StepSource, usable_step
from anymamba.kernels.step import OUTPUT, StepBuilder

# A matrix of fewer numbers stays in a cache of the processor, where torch's product is as fast.
SMALLEST = 1 << 18
# Up to how many rows the kernels are the faster ones; torch multiplies half-wide numbers without widening them.
MOST_ROWS = {torch.float32: 64, torch.bfloat16: 4, torch.float16: 4}


class Linear(nn.Linear):
    """torch's own, with a faster way for few rows."""

    def forward(self, input: Tensor) -> Tensor:
        """`weight input + bias`."""
        max_numel = MOST_ROWS.get(self.weight.dtype, 0) * self.in_features
        if not torch.compiler.is_compiling() and 0 < input.numel() <= max_numel:
            step = usable_step(self, (input,), self._step_source)
            result = None if step is None else step.run(input.reshape(-1, input.shape[-1]), ())
            if result is not None:
                return result[0].view(*input.shape[:-1], self.out_features)
        return linear(input, self.weight, self.bias)

    def _step_source(self) -> StepSource:
        dtype = self.weight.dtype
        return StepSource(self._describe_step, self.in_features, dtype, dtype, self.weight.device)

    def _describe_step(self, builder: StepBuilder) -> None:
        fields = builder.dense_weight(self, self.out_features, self.in_features)
        builder.matmul(0, self.in_features, self.out_features, fields, to=OUTPUT)


def exchange(model: nn.Module, left_alone: set[nn.Module]) -> None:
    """Give the large plain projections of a model the faster way, but for those that are `left_alone`."""
    for module in model.modules():
        if type(module) is nn.Linear and module not in left_alone and module.weight.numel() >= SMALLEST:
            module.__class__ = Linear


def change_back(model: nn.Module) -> None:
    """Undo `exchange`."""
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = nn.Linear  # type: ignore[assignment]


def count(model: nn.Module) -> int:
    """How many projections of a model have the faster way."""
    return sum(isinstance(module, Linear) for module in model.modules())
