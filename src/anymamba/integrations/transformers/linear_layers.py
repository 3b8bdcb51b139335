"""Large projections outside of mixers, which dominate a token together with the mixers.

The matmul of torch reads a matrix more slowly than memory delivers it when there are few rows. So the projections of
attention, of MLPs and the head run on the compiled kernels for few rows without gradients, and on torch otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anymamba.core.linear import linear
from anymamba.kernels.compiled_step import StepSource, usable_step
from anymamba.kernels.step_description import OUTPUT, StepBuilder

# A smaller matrix stays in a cache of the processor, where torch is as fast.
MIN_WEIGHT_NUMEL = 1 << 18
# Number of rows up to which the kernels are faster; torch has its own kernels for 16-bit numbers.
MAX_ROWS = {torch.float32: 64, torch.bfloat16: 4, torch.float16: 4}


class Linear(nn.Linear):
    """Linear layer of torch that runs few rows on the compiled kernels."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `weight input + bias`."""
        max_numel = MAX_ROWS.get(self.weight.dtype, 0) * self.in_features
        # A token of each row, in float32: its bits must not depend on the number of rows.
        is_decode = input.ndim == 3 and input.shape[1] == 1 and self.weight.dtype == torch.float32
        y = None
        if not torch.compiler.is_compiling() and input.numel() and (is_decode or input.numel() <= max_numel):
            y = self._run_few_rows(input)
        return linear(input, self.weight, self.bias) if y is None else y

    def _run_few_rows(self, x: Tensor) -> Tensor | None:
        """Return the result of the compiled kernels, or None if they do not cover the call."""
        step = usable_step(self, (x,), self._step_source)
        result = None if step is None else step.run(x.reshape(-1, x.shape[-1]), ())
        return None if result is None else result[0].view(*x.shape[:-1], self.out_features)

    def _step_source(self) -> StepSource:
        dtype = self.weight.dtype
        return StepSource(self._describe_step, self.in_features, dtype, dtype, self.weight.device)

    def _describe_step(self, builder: StepBuilder) -> None:
        fields = builder.dense_weight(self, self.out_features, self.in_features)
        builder.matmul(0, self.in_features, self.out_features, fields, to=OUTPUT)


def replace_linears(model: nn.Module, excluded: set[nn.Module]) -> None:
    """Change the class of the large plain linear layers of a model, except for the excluded ones."""
    for module in model.modules():
        if type(module) is nn.Linear and module not in excluded and module.weight.numel() >= MIN_WEIGHT_NUMEL:
            module.__class__ = Linear


def restore_linears(model: nn.Module) -> None:
    """Undo `replace_linears`."""
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = nn.Linear  # type: ignore[assignment]


def count_linears(model: nn.Module) -> int:
    """Return how many linear layers of a model were replaced."""
    return sum(isinstance(module, Linear) for module in model.modules())
