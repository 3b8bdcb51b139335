"""Models that predict continuous values: for a whole sequence, or at each step of a signal.

    y = head(pool(stack(input(x))))        SequenceRegressor: one vector per sequence
    y = output(stack(input(x)))            LatentModel: one vector per step; input and output are linear, with bias

Letters: b batch, t time, c input_size, d d_model, o output_size, z sequences: rows, or packed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anymamba.blocks.block_inputs import flatten_packed_rows, prefill_with_states_at
from anymamba.core.checks import check_shape, check_tensor
from anymamba.models.cache import HasFingerprint, StackCache, check_stack_cache
from anymamba.models.sequence.classifier import SequenceClassifier
from anymamba.models.sequence.sequence_model import SequenceConfig, SequenceModel
from anymamba.models.stack.class_tokens import (
    ClassTokens,
    OutputIndices,
    SequenceLayout,
    empty_input,
    find_output_indices,
    make_layout,
)
from anymamba.models.stack.layer_loop import ClassTokenInserter, check_no_class_tokens


class SequenceRegressor(SequenceClassifier):
    """Regressor of sequences of tokens or vectors; the loss is the mean squared error."""

    MODEL_TYPE: ClassVar[str] = "anymamba_regressor"

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared error."""
        check_tensor("SequenceRegressor", "labels", labels)
        if labels.shape != logits.shape:
            received = tuple(labels.shape)
            raise ValueError(f"SequenceRegressor: labels must have shape {tuple(logits.shape)}, got {received}")
        return F.mse_loss(logits, labels.to(logits.dtype))


class LatentModel(SequenceModel, HasFingerprint):
    """Stack between two projections, for continuous inputs and outputs: forecasting, filtering, control.

    model = LatentModel(input_size=3, output_size=1, stack={"d_model": 64, "n_layer": 2})
    """

    MODEL_TYPE: ClassVar[str] = "anymamba_latent"
    SUPPORTS_CLASS_TOKENS: ClassVar[bool] = True

    def check_config(self, config: SequenceConfig) -> None:
        """Raise `ValueError` for a config for tokens."""
        if config.input_size is None:
            raise ValueError(f"LatentModel: input_size must be given, got vocab_size = {config.vocab_size}")

    def build_head(self, config: SequenceConfig, factory: dict[str, Any]) -> None:
        """Create the output projection, and the class tokens before the input projection."""
        self.output = nn.Linear(config.d_model, config.output_size, **factory)
        if config.class_tokens:
            self.class_tokens = ClassTokens(config.class_tokens, config.input_size or 0, **factory)
        self._has_class_tokens = config.has_class_tokens()  # cached, because asking builds the config of the stack

    def forward(
        self,
        x: Float[Tensor, "b t c"],
        *,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        seq_idx: Int[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b t1 o"]:
        """Return an output for each step.

        Outputs at the padding are undefined. With class tokens there are more outputs (`output_indices`), and those of
        padded rows are at the front.

        Args:
            x: Inputs.
            cu_seqlens: Boundaries (0, ..., t) of sequences packed into a batch of one.
            seq_idx: For several packed rows, an integer per step: a sequence ends where it changes, and with its row.
            mask: For padded batches, True for real steps (b, t), or the lengths (b,).
        """
        if seq_idx is not None:
            row, cu_seqlens = self._flatten_packed_rows("forward", x, seq_idx, cu_seqlens, mask)
            return self(row, cu_seqlens=cu_seqlens).view(*x.shape[:2], -1)
        if not self._has_class_tokens:
            y: Tensor = self.output(self.encode(x, cu_seqlens=cu_seqlens, mask=mask)[0])
            return y
        x, layout, _ = self._insert_inputs("forward", x, None, None, cu_seqlens, mask, is_whole=True)
        return self.output(self.backbone(self.input(x), cu_seqlens=layout.cu_seqlens, mask=layout.padding))

    def prefill(
        self,
        x: Float[Tensor, "b t c"],
        cache: StackCache | None = None,
        *,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        seq_idx: Int[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
        length: int | Int[Tensor, " z"] | None = None,
    ) -> tuple[Float[Tensor, "b t1 o"], StackCache]:
        """Return the outputs, and the cache to continue from; same arguments as `Stack.prefill`.

        Raises:
            TypeError: The stack is bidirectional.
        """
        stack = self._causal_stack("prefill")
        if seq_idx is not None:
            row, cu_seqlens = self._flatten_packed_rows("prefill", x, seq_idx, cu_seqlens, mask)
            y, new_cache = self.prefill(row, cache, cu_seqlens=cu_seqlens)
            return y.view(*x.shape[:2], -1), new_cache
        if self._has_class_tokens:
            return self._run("prefill", x, cache, length, cu_seqlens, mask)[:2]
        inputs, padding = self.embed_inputs(x, cu_seqlens, mask)
        y, new_cache = stack.prefill(inputs, cache, cu_seqlens=cu_seqlens, mask=padding)
        return self.output(y), new_cache

    def states_at(
        self,
        x: Float[Tensor, "b t c"],
        positions: Sequence[int] | Int[Tensor, " n"],
        cache: StackCache | None = None,
        *,
        length: int | Int[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, "b t1 o"], list[StackCache]]:
        """Run `prefill`, and also return the cache after the first p steps for every p of `positions`.

        Args:
            x: Inputs.
            positions: Numbers of steps, 1 to t, in any order.
            cache: Cache to continue from, as in `prefill`.
            length: Length of the whole sequences, for class tokens.

        Raises:
            TypeError: A position is not an integer, or the stack is bidirectional.
            ValueError: There is no such position.
        """
        where = "LatentModel.states_at"
        check_shape(where, "x", x, "b t c", {"c": self.config.input_size or 0})
        return prefill_with_states_at(where, partial(self.prefill, length=length), x, positions, cache)

    def init_cache(self, batch_size: int) -> StackCache:
        """Return the empty cache.

        Raises:
            TypeError: The stack is bidirectional.
        """
        cache: StackCache = self._causal_stack("init_cache").init_cache(batch_size)
        input_cursors = [torch.zeros(batch_size, 2, dtype=torch.int64)] if self.config.class_tokens else []
        return cache._replace(cursors=(*input_cursors, *cache.cursors))

    def step(
        self, x: Float[Tensor, "b c"], cache: StackCache | None = None, *, length: int | Int[Tensor, " b"] | None = None
    ) -> tuple[Float[Tensor, "b o"], StackCache]:
        """Return the output of one step, or of the last class token that runs with it, and the new cache."""
        stack = self._causal_stack("step")
        check_shape("LatentModel.step", "x", x, "b c", {"c": self.config.input_size or 0})
        if self._has_class_tokens:
            y, new_cache, layout = self._run("step", x.unsqueeze(1), cache, length)
            return layout.last_outputs(y), new_cache
        y, new_cache = stack.step(self.embed_inputs(x)[0], cache)
        return self.output(y), new_cache

    def prime(
        self, batch_size: int, cache: StackCache | None = None, *, length: int | Int[Tensor, " b"] | None = None
    ) -> tuple[Float[Tensor, "b o"] | None, StackCache]:
        """Run the class tokens before the next step, without that step, as `Stack.prime` does."""
        x = empty_input("LatentModel.prime", batch_size, self.config.input_size or 0, self._reference_tensor)
        y, new_cache, layout = self._run("prime", x, cache, length, priming=True)
        return (layout.last_outputs(y) if y.shape[1] else None), new_cache

    def output_indices(self, length: int) -> OutputIndices:
        """Return where the outputs of a whole sequence are: those of its steps, and those of class tokens."""
        stack = self.config.stack_config()
        return find_output_indices(length, stack.class_tokens, stack.class_tokens_of_passes(), self.config.class_tokens)

    def step_infinite(self, x: Float[Tensor, "b c"]) -> Float[Tensor, "b o"]:
        """Return the stationary output for an input that repeats forever."""
        y: Tensor = self.output(self._causal_stack("step_infinite").step_infinite(self.embed_inputs(x)[0]))
        return y

    def _insert_inputs(
        self,
        name: str,
        x: Tensor,
        cache: StackCache | None,
        length: int | Tensor | None,
        cu_seqlens: Tensor | None,
        mask: Tensor | None,
        *,
        is_whole: bool = False,
        priming: bool = False,
    ) -> tuple[Tensor, SequenceLayout, tuple[Tensor, ...]]:
        """Return inputs with their class tokens, their layout, and the cursor of that level, if it has class tokens."""
        where = f"LatentModel.{name}"
        padding = None
        if not priming:
            x, padding = self.check_vectors(x, cu_seqlens, mask)
            x = x if padding is None else padding.compact(x)
        layout = make_layout(where, x, length, cu_seqlens, padding, is_whole=is_whole, priming=priming)
        if not self.config.class_tokens:
            return x, layout, ()
        cursor = None if cache is None else cache.cursors[0]
        insertion, next_cursor = self.class_tokens.plan_insertion(where, layout, cursor)
        return insertion.insert(self.class_tokens.weight, x), insertion.layout, (next_cursor,)

    def _run(
        self,
        name: str,
        x: Tensor,
        cache: StackCache | None,
        length: int | Tensor | None,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        priming: bool = False,
    ) -> tuple[Tensor, StackCache, SequenceLayout]:
        """Run with class tokens at any level; return the outputs, the new cache, and the layout of the outputs."""
        stack = self._causal_stack(name)
        if cache is not None:
            levels = bool(self.config.class_tokens) + stack._count_levels(stack.n_passes)
            check_stack_cache(f"LatentModel.{name}", cache, StackCache, stack.n_passes, levels)
        # 1) The level before the input projection, whose cursor is the first of the cache.
        x, layout, input_cursors = self._insert_inputs(name, x, cache, length, cu_seqlens, mask, priming=priming)
        # 2) The stack, with the other cursors.
        stack_cache = None if cache is None else cache._replace(cursors=cache.cursors[len(input_cursors) :])
        stack_cursors = () if stack_cache is None else stack_cache.cursors
        inserter = ClassTokenInserter(stack, f"LatentModel.{name}", layout, stack_cursors)
        y, new_cache, _ = stack._run(self.input(x), stack_cache, None, inserter=inserter)
        # 3) All cursors go to the new cache.
        return self.output(y), new_cache._replace(cursors=(*input_cursors, *new_cache.cursors)), inserter.layout

    def _flatten_packed_rows(
        self, name: str, x: Tensor, seq_idx: Any, cu_seqlens: Any, mask: Any
    ) -> tuple[Tensor, Tensor]:
        where = f"LatentModel.{name}"
        check_no_class_tokens(where, self._has_class_tokens)
        return flatten_packed_rows(where, x, seq_idx, cu_seqlens, mask)

    def _causal_stack(self, name: str) -> Any:
        if self.config.bidirectional:
            raise TypeError(f"LatentModel.{name}: a bidirectional model reads whole sequences and has no steps")
        return self.backbone
