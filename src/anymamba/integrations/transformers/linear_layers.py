"""Projections of few rows: what a token of a model reads besides its mixers.

torch's own product of few rows reads a matrix more slowly than memory delivers it. So the large projections of an
accelerated model that belong to no mixer (those of attention, of MLPs and the head) run on the compiled kernels where
few rows go through them without gradients, and are torch's own everywhere else.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anymamba.core.linear import linear
from anymamba.integrations.transformers import mixer_step
from anymamba.kernels.cpu.compiled_step import Recording
from anymamba.kernels.cpu.step_program import MAX_ROWS, OUTPUT, Program

# A matrix of fewer numbers stays in a cache of the processor, where torch's product is as fast.
SMALLEST = 1 << 18
# Up to how many rows the kernels are the faster ones; torch multiplies half-wide numbers without widening them.
MOST_ROWS = {torch.float32: MAX_ROWS, torch.bfloat16: 4, torch.float16: 4}

_RECORDED: WeakKeyDictionary[nn.Module, Recording] = WeakKeyDictionary()


class Linear(nn.Linear):
    """torch's own, with a faster way for few rows."""

    def forward(self, input: Tensor) -> Tensor:
        """`weight input + bias`."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return linear(input, self.weight, self.bias)
        most = MOST_ROWS.get(self.weight.dtype, 0) * self.in_features
        y = self._few_rows(input) if 0 < input.numel() <= most and mixer_step.may_run((input,)) else None
        return linear(input, self.weight, self.bias) if y is None else y

    def _few_rows(self, x: Tensor) -> Tensor | None:
        found = _RECORDED.get(self)
        if found is None or not found.is_current():
            found = _RECORDED[self] = Recording(self._record, self.weight.dtype, self.in_features, self.weight.dtype)
        done = found.run(x.reshape(-1, x.shape[-1]), ())
        return None if done is None else done[0].view(*x.shape[:-1], self.out_features)

    def _record(self, program: Program) -> None:
        fields = program.plain_weight(self, self.out_features, self.in_features)
        program.project(0, self.in_features, self.out_features, fields, to=OUTPUT)


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
