"""What connects the passes of a stack: residuals, plain or gated streams, and how far back gradients reach.

    h <- h + F_v(h)        or, where a residual is ignored,   h <- F_v(h)        or Multi-Gate Residuals (`gates.py`)

With a horizon of K, passes before the last K keep no graph, and at the cut h <- h + (x - stop(x)): what made the input
of the stack still gets the gradient that reaches the cut. Memory then does not grow with the number of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.models.gates import MultiGate
from anymamba.models.stack_config import StackConfig

Run = Callable[[int, Tensor, bool], Tensor]  # pass, its input, whether the input is added to what is found


class Passes(nn.Module):
    """Layers that are passed through one after another; a subclass says what a pass computes.

    Attributes:
        config: of the stack.
        gates: of Multi-Gate Residuals, empty where the residual is plain.
    """

    config: StackConfig

    def _build_gates(self, factory: dict[str, Any]) -> None:
        """Create the gates."""
        c = self.config
        self._gate_of_pass = c.gates_of_passes() if c.streams else []
        count = max(self._gate_of_pass, default=-1) + 1
        if count:
            bias = c.initial_gate_bias()
            self.gates = nn.ModuleList(MultiGate(c.d_model, bias, **factory) for _ in range(count))

    def _walk(self, x: Tensor, passes: int, run: Run, wanted: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Take all passes.

        Args:
            x: input of the first.
            passes: how many there are.
            run: computes one.
            wanted: passes whose results are asked for.

        Returns:
            The result of the last pass, and those of the wanted ones.
        """
        c, h, streams, found = self.config, x, [x], {}
        cut = 0 if c.grad_horizon is None or not torch.is_grad_enabled() else passes - c.grad_horizon
        for v in range(passes):
            if v == cut and cut:
                gradient_only = x - x.detach()
                h, streams = h + gradient_only, [s + gradient_only for s in streams]
            without_graph: AbstractContextManager[Any] = torch.no_grad() if v < cut else nullcontext()
            with without_graph:
                h, streams = self._take(v, v == passes - 1, h, streams, run)
            if v in wanted:
                found[v] = h
        return h, [found[v] for v in wanted]

    def _take(self, v: int, is_last: bool, h: Tensor, streams: list[Tensor], run: Run) -> tuple[Tensor, list[Tensor]]:
        """One pass: the input of the next, and the streams."""
        c = self.config
        no_first, no_last = v == 0 and c.ignore_first_residual, is_last and c.ignore_last_residual
        if not c.streams:
            return run(v, h, not (no_first or no_last)), streams
        f = run(v, h, False)
        if no_first:
            return f, [f]
        streams, h = self.gates[self._gate_of_pass[v]](streams, f)
        return (f if no_last else h), streams
