"""The loop over the passes of a stack: what connects them, and how far back gradients reach.

    h <- h + F_v(h)     or, where a residual is ignored,  h <- F_v(h)     or Multi-Gate Residuals (`residual_layer.py`)

With a horizon of K, passes before the last K keep no graph. At the cut, h <- h + (x - stop(x)): the value is the same,
and what computed the input x of the stack still receives the gradient that reaches the cut. Memory then does not grow
with the number of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anymamba.blocks.block_inputs import check_batch, check_input, flatten_packed_rows
from anymamba.core.layout import Padding
from anymamba.models.stack.class_tokens import (
    ClassTokens,
    OutputIndices,
    SequenceLayout,
    find_output_indices,
    zero_padding,
)
from anymamba.models.stack.residual_layer import MultiGate, ResidualLayer, make_norm
from anymamba.models.stack.stack_config import StackConfig

RunPass = Callable[[int, Tensor, bool], Tensor]  # (pass, input, whether to add the input to the result) -> result
Insert = Callable[[Tensor], Tensor]  # a residual stream (b, t, d) -> the same with the class tokens of a level


class LayerLoop(nn.Module):
    """Layers that are passed through one after another; a subclass defines what one pass computes.

    Attributes:
        config: Config of the stack.
        layers: Residual layers, one per set of weights.
        norm_f: Norm after the last pass.
        gates: Gates of Multi-Gate Residuals; absent if the residual is plain.
    """

    config: StackConfig
    layers: nn.ModuleList
    norm_f: nn.Module

    def _build_layers(self, config: StackConfig, factory: dict[str, Any]) -> None:
        """Create the layers, and the norm after the last pass."""
        self.config = config
        self.layers = nn.ModuleList(ResidualLayer(config, i, **factory) for i in range(config.n_layer))
        self.norm_f = make_norm(config, **factory) if config.final_norm else nn.Identity()

    def _build_connections(self, factory: dict[str, Any]) -> None:
        """Create the gates and the class tokens; each layer has its own, however often it is passed through."""
        c = self.config
        self._gate_of_pass = c.gates_of_passes() if c.streams else []
        if count := max(self._gate_of_pass, default=-1) + 1:
            bias = c.initial_gate_bias()
            self.gates = nn.ModuleList(MultiGate(c.d_model, bias, **factory) for _ in range(count))
        if c.class_tokens:
            self.class_tokens = ClassTokens(c.class_tokens, c.d_model, **factory)
        self._group_of_pass = c.groups_of_passes()
        if any(c.layer_class_tokens):
            groups = {str(i): positions for i, positions in enumerate(c.layer_class_tokens) if positions}
            levels = {name: ClassTokens(positions, c.d_model, **factory) for name, positions in groups.items()}
            self.layer_class_tokens = nn.ModuleDict(levels)

    def _level_before(self, v: int | None) -> ClassTokens | None:
        """Return the class tokens before a pass, or before all passes (None), if there are any."""
        level: Any = None
        if v is None:
            level = self.class_tokens if self.config.class_tokens else None
        elif any(self.config.layer_class_tokens) and (name := str(self._group_of_pass[v])) in self.layer_class_tokens:
            level = self.layer_class_tokens[name]
        return level

    def _count_levels(self, n_passes: int) -> int:
        """Return how many levels have class tokens: the one before all passes, and one before each pass."""
        return sum(self._level_before(v) is not None for v in (None, *range(n_passes)))

    def output_indices(self, length: int) -> OutputIndices:
        """Return where the outputs of a whole sequence are: those of its `length` tokens, and those of class tokens."""
        return find_output_indices(length, self.config.class_tokens, self.config.class_tokens_of_passes())

    def _check_sequences(self, name: str, x: Any, cu_seqlens: Any, mask: Any) -> Padding | None:
        """Raise for inputs that no block can run over; return how the rows are padded."""
        self._check_input(name, x, "b t d")
        return check_batch(f"{type(self).__name__}.{name}", x, cu_seqlens, mask)

    def _check_input(self, name: str, x: Any, letters: str) -> None:
        mixer: Any = self.layers[0].mixer
        check_input(f"{type(self).__name__}.{name}", x, letters, self.config.d_model, mixer.reference_tensor())

    def _flatten_packed_rows(
        self, name: str, x: Any, seq_idx: Any, cu_seqlens: Any, mask: Any
    ) -> tuple[Tensor, Tensor]:
        """Return rows of packed sequences as one row, and its boundaries; class tokens would not fit into the rows."""
        where = f"{type(self).__name__}.{name}"
        check_no_class_tokens(where, self.config.has_class_tokens())
        return flatten_packed_rows(where, x, seq_idx, cu_seqlens, mask)

    def _to_residual(self, x: Tensor) -> Tensor:
        """Return the residual stream that begins with `x`, in float32 or wider if the config requires it."""
        return x.float() if self.config.residual_in_fp32 and x.dtype != torch.float64 else x

    def _layer(self, index: int) -> Callable[..., tuple[Tensor, Any]]:
        """Return a layer, which keeps only its inputs for the backward pass if the config asks for checkpointing."""
        layer = self.layers[index]
        if self.config.checkpointing and torch.is_grad_enabled():
            return partial(checkpoint, layer, use_reentrant=False)
        return layer

    def _run_passes(
        self,
        x: Tensor,
        n_passes: int,
        run_pass: RunPass,
        requested: Sequence[int] = (),
        inserter: ClassTokenInserter | None = None,
        padding: Padding | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all passes and the last norm on inputs (b, t, d) or (b, d).

        Args:
            x: Inputs.
            n_passes: Number of passes.
            run_pass: Function that computes one pass.
            requested: Passes after which the residual stream is also returned.
            inserter: Inserter of class tokens, if there are any.
            padding: Padding of the rows. A pass gets the tokens of each row at its front.

        Returns:
            The outputs, and the residual stream after the requested passes.
        """
        c, dtype = self.config, x.dtype
        # 1) Begin the residual stream, with the tokens of padded rows at the front, and insert class tokens.
        x = self._to_residual(x)
        if c.input_multiplier != 1:
            x = x * c.input_multiplier
        if padding is not None:
            x = padding.compact(x)
        if inserter is not None and (insert := inserter.enter_level(None)) is not None:
            x = insert(x)
        h, streams = x, [x] if c.streams else []
        hidden_states: dict[int, Tensor] = {}
        first_with_graph = 0
        if c.grad_horizon is not None and torch.is_grad_enabled():
            first_with_graph = n_passes - c.grad_horizon
        for v in range(n_passes):
            # 2) At the cut of the gradient horizon: add zero, with the gradient of the stack's input.
            if v == first_with_graph and v:
                gradient_of_x = x - x.detach()
                h = h + gradient_of_x
                streams = [s + gradient_of_x for s in streams]
            has_graph = v >= first_with_graph
            graph: AbstractContextManager[Any] = nullcontext() if has_graph else torch.no_grad()
            # 3) Insert class tokens into h and all gated streams, which are as long as h.
            insert = None if inserter is None else inserter.enter_level(v)
            if insert is not None:
                x = x if has_graph else insert(x)  # the gradient is added at the cut, where x must be as long as h
                with graph:
                    is_only_stream = len(streams) == 1 and streams[0] is h
                    h = insert(h)
                    streams = [h] if is_only_stream else [insert(s) for s in streams]
            # 4) Run the layer, and connect its result to the residual stream or streams.
            replaces_first = v == 0 and c.ignore_first_residual
            replaces_last = v == n_passes - 1 and c.ignore_last_residual
            with graph:
                if not c.streams:
                    h = run_pass(v, h, not (replaces_first or replaces_last))
                else:
                    f = run_pass(v, h, False)
                    streams, h = ([f], f) if replaces_first else self.gates[self._gate_of_pass[v]](streams, f)
                    h = f if replaces_last else h
            # 5) Keep what was asked for.
            if v in requested:
                hidden_states[v] = h if inserter is None else zero_padding(h, inserter.layout.padding)
        # 6) The last norm, and the tokens of padded rows back in their positions, unless class tokens are among them.
        y: Tensor = self.norm_f(h)
        if c.output_multiplier != 1:
            y = y * c.output_multiplier
        y = y if c.final_norm else y.to(dtype)
        if inserter is not None:
            y = zero_padding(y, inserter.layout.padding)
        elif padding is not None:
            y, hidden_states = padding.restore(y), {v: padding.restore(s) for v, s in hidden_states.items()}
        return y, [hidden_states[v] for v in requested]


def check_no_class_tokens(where: str, has_class_tokens: bool) -> None:
    """Raise `ValueError` for rows packed with `seq_idx` in a model with class tokens, for which they have no space."""
    if has_class_tokens:
        raise ValueError(
            f"{where}: class tokens make sequences longer, so rows packed with seq_idx cannot hold them; "
            "pack the sequences into one row with cu_seqlens"
        )


class ClassTokenInserter:
    """Class tokens of a stack in one call: level after level, their order and the cursors after the call.

    Attributes:
        layout: Layout that reaches the next level.
        cursors: Cursors after the call, in the order of the levels that were entered.
    """

    def __init__(self, stack: LayerLoop, where: str, layout: SequenceLayout, cursors: Sequence[Tensor]) -> None:
        """Begin before the stack; `cursors` come from the cache, and are empty without one."""
        self._stack = stack
        self._where = where
        self._cursors_before = list(cursors)
        self.layout = layout
        self.cursors: list[Tensor] = []

    def enter_level(self, v: int | None) -> Insert | None:
        """Return the function that inserts the class tokens before a pass, or before all (None); None without any."""
        level = self._stack._level_before(v)
        if level is None:
            return None
        cursor = self._cursors_before[len(self.cursors)] if self._cursors_before else None
        insertion, next_cursor = level.plan_insertion(self._where, self.layout, cursor)
        self.layout = insertion.layout
        self.cursors.append(next_cursor)
        return lambda x: insertion.insert(level.weight, x)
