"""A model for signals: vectors in, vectors out, one for each step.

    y = output(stack(input(x)))        input, output: linear, with bias

Letters: b batch, t time, c input_size, o output_size, z packed sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anymamba.blocks.base import prefill_with_states_at
from anymamba.core.checks import check_shape, check_tensor
from anymamba.models.cache import StackCache, check_stack_cache
from anymamba.models.fingerprint import HasFingerprint
from anymamba.models.inputs import flatten_packed_rows
from anymamba.models.sequence.classifier import SequenceClassifier
from anymamba.models.sequence.sequence_model import SequenceConfig, SequenceModel
from anymamba.models.stack.class_tokens import (
    ClassTokens,
    OutputIndices,
    SequenceLayout,
    no_tokens,
    output_indices,
    sequence_layout,
)
from anymamba.models.stack.layer_loop import ClassTokenInserter


class SequenceRegressor(SequenceClassifier):
    """Some numbers for each sequence of tokens or vectors; the loss is their mean squared error."""

    MODEL_TYPE: ClassVar[str] = "anymamba_regressor"

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean squared error.

        Raises:
            TypeError: labels that are not a tensor.
            ValueError: labels of another shape.
        """
        check_tensor("SequenceRegressor", "labels", labels)
        if labels.shape != logits.shape:
            found = tuple(labels.shape)
            raise ValueError(f"SequenceRegressor: labels must have shape {tuple(logits.shape)}, got {found}")
        return F.mse_loss(logits, labels.to(logits.dtype))


class LatentModel(SequenceModel, HasFingerprint):
    """A stack between two projections, for continuous inputs and outputs: forecasts, filters, control.

    model = LatentModel(input_size=3, output_size=1, stack={"d_model": 64, "n_layer": 2})
    """

    MODEL_TYPE: ClassVar[str] = "anymamba_latent"
    TAKES_CLASS_TOKENS: ClassVar[bool] = True

    def check_config(self, config: SequenceConfig) -> None:
        """Refuse a config for tokens.

        Raises:
            ValueError: it is one.
        """
        if config.input_size is None:
            raise ValueError(f"LatentModel: input_size must be given, got vocab_size = {config.vocab_size}")

    def build_head(self, config: SequenceConfig, factory: dict[str, Any]) -> None:
        """The output projection, and the class tokens before the input projection."""
        self.output = nn.Linear(config.d_model, config.output_size, **factory)
        if config.class_tokens:
            self.class_tokens = ClassTokens(config.class_tokens, config.input_size or 0, **factory)
        self._has_class_tokens = config.has_class_tokens()  # which builds the config of the stack: once is enough

    def forward(
        self,
        x: Float[Tensor, "b t c"],
        *,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        seq_idx: Int[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b t1 o"]:
        """An output for each step; `cu_seqlens`, `seq_idx` and `mask` as for a block.

        Outputs at the padding mean nothing. With class tokens there are more outputs (`output_indices`), and those of
        padded rows are at the front.
        """
        if seq_idx is not None:
            rows, bounds = self._flatten_packed_rows("forward", x, seq_idx, cu_seqlens, mask)
            return self(rows, cu_seqlens=bounds).view(*x.shape[:2], -1)
        if not self._has_class_tokens:
            y: Tensor = self.output(self.encode(x, cu_seqlens=cu_seqlens, mask=mask)[0])
            return y
        x, flow, _ = self._enter("forward", x, None, None, cu_seqlens, mask, whole=True)
        return self.output(self.backbone(self.input(x), cu_seqlens=flow.bounds, mask=flow.padding))

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
        """Outputs, and the cache to continue from; arguments as for `Stack.prefill`.

        Raises:
            TypeError: the stack is bidirectional.
        """
        stack = self._causal("prefill")
        if seq_idx is not None:
            rows, bounds = self._flatten_packed_rows("prefill", x, seq_idx, cu_seqlens, mask)
            y, new = self.prefill(rows, cache, cu_seqlens=bounds)
            return y.view(*x.shape[:2], -1), new
        if self._has_class_tokens:
            return self._continue("prefill", x, cache, length, cu_seqlens, mask)[:2]
        inputs, padding = self.embed_inputs(x, cu_seqlens, mask)
        y, new = stack.prefill(inputs, cache, cu_seqlens=cu_seqlens, mask=padding)
        return self.output(y), new

    def states_at(
        self,
        x: Float[Tensor, "b t c"],
        positions: Sequence[int] | Int[Tensor, " n"],
        cache: StackCache | None = None,
        *,
        length: int | Int[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, "b t1 o"], list[StackCache]]:
        """`prefill` with the caches after its first p steps, for every p of `positions` (1 to t, in any order).

        Raises:
            TypeError: a position is not a whole number, or the stack is bidirectional.
            ValueError: there is no such position.
        """
        where = "LatentModel.states_at"
        check_shape(where, "x", x, "b t c", {"c": self.config.input_size or 0})

        def prefill(part: Tensor, before: Any) -> tuple[Tensor, StackCache]:
            return self.prefill(part, before, length=length)

        return prefill_with_states_at(where, prefill, x, positions, cache)

    def init_cache(self, batch_size: int) -> StackCache:
        """The cache of a fresh start.

        Raises:
            TypeError: the stack is bidirectional.
        """
        inner: StackCache = self._causal("init_cache").init_cache(batch_size)
        own = [torch.zeros(batch_size, 2, dtype=torch.int64)] if self.config.class_tokens else []
        return inner._replace(cursors=(*own, *inner.cursors))

    def step(
        self,
        x: Float[Tensor, "b c"],
        cache: StackCache | None = None,
        *,
        length: int | Int[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, "b o"], StackCache]:
        """The output of one step, or of the last class token that runs with it, and the cache to continue from."""
        stack = self._causal("step")
        check_shape("LatentModel.step", "x", x, "b c", {"c": self.config.input_size or 0})
        if self._has_class_tokens:
            y, new, flow = self._continue("step", x.unsqueeze(1), cache, length)
            return flow.last(y), new
        y, new = stack.step(self.embed_inputs(x)[0], cache)
        return self.output(y), new

    def prime(
        self, batch_size: int, cache: StackCache | None = None, *, length: int | Int[Tensor, " b"] | None = None
    ) -> tuple[Float[Tensor, "b o"] | None, StackCache]:
        """Run the class tokens that wait for the next step, without it, as `Stack.prime` does."""
        x = no_tokens("LatentModel.prime", batch_size, self.config.input_size or 0, self._reference_tensor)
        y, new, flow = self._continue("prime", x, cache, length, priming=True)
        return (flow.last(y) if y.shape[1] else None), new

    def output_indices(self, length: int) -> OutputIndices:
        """Where the outputs of a whole sequence are: those of its steps, and of class tokens."""
        stack = self.config.stack_config()
        return output_indices(length, stack.class_tokens, stack.class_tokens_of_passes(), self.config.class_tokens)

    def step_infinite(self, x: Float[Tensor, "b c"]) -> Float[Tensor, "b o"]:
        """The stationary output under an input that repeats forever."""
        y: Tensor = self.output(self._causal("step_infinite").step_infinite(self.embed_inputs(x)[0]))
        return y

    def _enter(
        self,
        name: str,
        x: Tensor,
        cache: StackCache | None,
        length: int | Tensor | None,
        bounds: Tensor | None,
        mask: Tensor | None,
        *,
        whole: bool = False,
        priming: bool = False,
    ) -> tuple[Tensor, SequenceLayout, tuple[Tensor, ...]]:
        """Inputs with the class tokens of their level, what they are, and the level's cursor, if it has one."""
        where = f"LatentModel.{name}"
        padding = None
        if not priming:
            x, padding = self.checked_numbers(x, bounds, mask)
            x = x if padding is None else padding.compact(x)
        flow = sequence_layout(where, x, length, bounds, padding, whole=whole)._replace(priming=priming)
        if not self.config.class_tokens:
            return x, flow, ()
        arrangement, after = self.class_tokens.arrange(where, flow, None if cache is None else cache.cursors[0])
        return arrangement.place(self.class_tokens.weight, x), arrangement.flow, (after,)

    def _continue(
        self,
        name: str,
        x: Tensor,
        cache: StackCache | None,
        length: int | Tensor | None,
        bounds: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        priming: bool = False,
    ) -> tuple[Tensor, StackCache, SequenceLayout]:
        """Outputs, the new cache, and how they lie; with class tokens at any level."""
        stack = self._causal(name)
        if cache is not None:
            levels = bool(self.config.class_tokens) + stack._count_levels(stack.n_passes)
            check_stack_cache(f"LatentModel.{name}", cache, StackCache, stack.n_passes, levels)
        x, flow, own = self._enter(name, x, cache, length, bounds, mask, priming=priming)
        inner = None if cache is None else cache._replace(cursors=cache.cursors[len(own) :])
        places = ClassTokenInserter(stack, f"LatentModel.{name}", flow, () if inner is None else inner.cursors)
        y, new, _ = stack._run(self.input(x), inner, None, levels=places)
        return self.output(y), new._replace(cursors=(*own, *new.cursors)), places.flow

    def _flatten_packed_rows(self, name: str, x: Tensor, seq_idx: Any, bounds: Any, mask: Any) -> tuple[Tensor, Tensor]:
        if self._has_class_tokens:
            raise ValueError(
                f"LatentModel.{name}: rows packed with seq_idx have no room for class tokens; use cu_seqlens"
            )
        return flatten_packed_rows(f"LatentModel.{name}", x, seq_idx, bounds, mask)

    def _causal(self, name: str) -> Any:
        if self.config.bidirectional:
            raise TypeError(f"LatentModel.{name}: a bidirectional model reads whole sequences and has no steps")
        return self.backbone
