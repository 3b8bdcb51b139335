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

from anymamba.core.layout import Padding
from anymamba.models.inputs import check_batch, check_input, flatten_packed_rows
from anymamba.models.stack.class_tokens import ClassTokens, OutputIndices, SequenceLayout, output_indices
from anymamba.models.stack.residual_gates import MultiGate
from anymamba.models.stack.stack_config import StackConfig

Run = Callable[[int, Tensor, bool], Tensor]  # pass, its input, whether the input is added to what is found
Place = Callable[[Tensor], Tensor]  # a stream (b, t, d) with the class tokens of a level


class LayerLoop(nn.Module):
    """Layers that are passed through one after another; a subclass defines what a pass computes.

    Attributes:
        config: of the stack.
        layers: its layers, each with its mixer.
        norm_f: after the last pass.
        gates: of Multi-Gate Residuals; empty if the residual is plain.
    """

    config: StackConfig
    layers: nn.ModuleList
    norm_f: nn.Module

    def _build_gates(self, factory: dict[str, Any]) -> None:
        """Create the gates."""
        c = self.config
        self._gate_of_pass = c.gates_of_passes() if c.streams else []
        count = max(self._gate_of_pass, default=-1) + 1
        if count:
            bias = c.initial_gate_bias()
            self.gates = nn.ModuleList(MultiGate(c.d_model, bias, **factory) for _ in range(count))

    def _build_class_tokens(self, factory: dict[str, Any]) -> None:
        """Create the class tokens; each layer has its own, however often it is passed through."""
        c = self.config
        if c.class_tokens:
            self.class_tokens = ClassTokens(c.class_tokens, c.d_model, **factory)
        self._group_of_pass = c.groups_of_passes()
        if any(c.layer_class_tokens):
            lists = enumerate(c.layer_class_tokens)
            made = {str(i): ClassTokens(positions, c.d_model, **factory) for i, positions in lists if positions}
            self.layer_class_tokens = nn.ModuleDict(made)

    def _level(self, v: int | None) -> ClassTokens | None:
        """The class tokens before a pass, or before all (None)."""
        found: Any = None
        if v is None:
            found = self.class_tokens if self.config.class_tokens else None
        elif any(self.config.layer_class_tokens) and (name := str(self._group_of_pass[v])) in self.layer_class_tokens:
            found = self.layer_class_tokens[name]
        return found

    def _count_levels(self, passes: int) -> int:
        """How many levels have class tokens: before all passes, and before each."""
        return sum(self._level(v) is not None for v in (None, *range(passes)))

    def output_indices(self, length: int) -> OutputIndices:
        """Where the outputs of a whole sequence of `length` tokens are: its own, and those of class tokens.

        Raises:
            ValueError: `length` is not a number of tokens.
        """
        return output_indices(length, self.config.class_tokens, self.config.class_tokens_of_passes())

    def _check(self, name: str, x: Any, cu_seqlens: Any, mask: Any) -> Padding | None:
        """Refuse inputs that no block could run over; returns how the rows are padded."""
        self._check_input(name, x, "b t d")
        return check_batch(f"{type(self).__name__}.{name}", x, cu_seqlens, mask)

    def _check_input(self, name: str, x: Any, letters: str) -> None:
        mixer: Any = self.layers[0].mixer
        check_input(f"{type(self).__name__}.{name}", x, letters, self.config.d_model, mixer.reference_tensor())

    def _flatten_packed_rows(self, name: str, x: Any, seq_idx: Any, bounds: Any, mask: Any) -> tuple[Tensor, Tensor]:
        """Rows of packed sequences as one row, and its boundaries.

        Raises:
            ValueError: class tokens would need room between the sequences.
        """
        where = f"{type(self).__name__}.{name}"
        if self.config.has_class_tokens():
            raise ValueError(
                f"{where}: with class tokens there are more outputs than inputs, for which rows of packed sequences "
                "(seq_idx) have no room; pack them into one row with cu_seqlens"
            )
        return flatten_packed_rows(where, x, seq_idx, bounds, mask)

    def _stream(self, x: Tensor) -> Tensor:
        """The residual stream that begins with `x`, float32 or wider if the config says so."""
        return x.float() if self.config.residual_in_fp32 and x.dtype != torch.float64 else x

    def _out(self, h: Tensor, dtype: torch.dtype) -> Tensor:
        y: Tensor = self.norm_f(h)
        return y if self.config.final_norm else y.to(dtype)

    def _walk(
        self, x: Tensor, passes: int, run: Run, wanted: Sequence[int] = (), levels: ClassTokenInserter | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Take all passes.

        Args:
            x: input of the first.
            passes: how many there are.
            run: computes one.
            wanted: passes whose results are asked for.
            levels: places class tokens before the passes, if there are any.

        Returns:
            The result of the last pass, and those of the wanted ones.
        """
        c, h, found = self.config, x, {}
        streams = [x] if c.streams else []
        cut = 0 if c.grad_horizon is None or not torch.is_grad_enabled() else passes - c.grad_horizon
        for v in range(passes):
            if v == cut and cut:
                gradient_only = x - x.detach()
                h, streams = h + gradient_only, [s + gradient_only for s in streams]
            without_graph: AbstractContextManager[Any] = torch.no_grad() if v < cut else nullcontext()
            place = None if levels is None else levels.before(v)
            if place is not None:
                x = place(x) if v < cut else x  # what stands in for the gradients of the prefix gets the rows too
                with without_graph:
                    is_one = len(streams) == 1 and streams[0] is h
                    h = place(h)
                    streams = [h] if is_one else [place(s) for s in streams]
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


class ClassTokenInserter:
    """The class tokens of a stack in one call: where they stand, and the cursors that follow from it.

    Attributes:
        flow: what reaches the next pass.
        cursors: after the call, in the order of the levels.
    """

    def __init__(self, stack: LayerLoop, where: str, flow: SequenceLayout, cursors: Sequence[Tensor]) -> None:
        """Begin before the stack; no cursors: a fresh start."""
        self._stack, self._where, self._old = stack, where, list(cursors)
        self.flow = flow
        self.cursors: list[Tensor] = []

    def before(self, v: int | None) -> Place | None:
        """Place the class tokens before a pass, or before all (None); None if there are none."""
        level = self._stack._level(v)
        if level is None:
            return None
        cursor = self._old[len(self.cursors)] if self._old else None
        arrangement, after = level.arrange(self._where, self.flow, cursor)
        self.flow = arrangement.flow
        self.cursors.append(after)
        return lambda x: arrangement.place(level.weight, x)
