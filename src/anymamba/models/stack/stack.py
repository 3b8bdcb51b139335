"""A stack of residual layers without an embedding: (b, t, d) in and out, with caches like those of a block.

    h = x        h <- layer(h) for every pass        y = norm_f(h)

Letters: b batch, t time, d d_model, z packed sequences, V passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anymamba.blocks.block_inputs import prefill_with_states_at
from anymamba.core import anomaly
from anymamba.core.layout import Padding
from anymamba.models.cache import HasFingerprint, StackCache, check_stack_cache
from anymamba.models.inputs import normalize_indices
from anymamba.models.stack.class_tokens import empty_input, make_layout
from anymamba.models.stack.layer_loop import ClassTokenInserter, LayerLoop
from anymamba.models.stack.residual_layer import initialize_residual
from anymamba.models.stack.stack_config import StackConfig, make_stack_config
from anymamba.scan import SsdPath


class Stack(LayerLoop, HasFingerprint):
    """Residual layers of one or several families, passed through in any order, with one cache per pass.

    Args:
        config: `StackConfig`; its fields may be given as keywords instead.
        device: Device of the parameters.
        dtype: Dtype of the parameters (blocks keep some in float32, like the official ones).
    """

    CACHE: type[StackCache] = StackCache

    def __init__(
        self,
        config: StackConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        """Create and initialize the parameters."""
        super().__init__()
        self._build(make_stack_config(type(self).__name__, StackConfig, config, fields), device=device, dtype=dtype)
        self.initialize()

    def _build(self, config: StackConfig, **factory: Any) -> None:
        """Create the parameters."""
        self._build_layers(config, factory)
        is_plain = config.n_virtual is None and isinstance(config.schedule, str)
        self._schedule = None if is_plain else config.layer_order()
        self._build_connections(factory)

    def initialize(self) -> None:
        """Divide the projections into the residual stream by √V, and set their biases to zero."""
        initialize_residual(self, self.n_passes)

    @property
    def _layer_of_pass(self) -> Sequence[int]:
        """Layer of each pass; without a schedule, all current layers in order."""
        return range(len(self.layers)) if self._schedule is None else self._schedule

    @property
    def n_passes(self) -> int:
        """Number of passes, V."""
        return len(self._layer_of_pass)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        cache: StackCache | None = None,
        *,
        path: SsdPath | None = None,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        seq_idx: Int[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | Padding | None = None,
        length: int | Int[Tensor, " z"] | None = None,
    ) -> Float[Tensor, "b t1 d"]:
        """Return the outputs of `prefill`. Without a cache the sequences are whole, so `length` is known."""
        return self._prefill("forward", x, cache, path, cu_seqlens, seq_idx, mask, length)[0]

    def prefill(
        self,
        x: Float[Tensor, "b t d"],
        cache: StackCache | None = None,
        *,
        path: SsdPath | None = None,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        seq_idx: Int[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | Padding | None = None,
        length: int | Int[Tensor, " z"] | None = None,
    ) -> tuple[Float[Tensor, "b t1 d"], StackCache]:
        """Run over a sequence of any length, from any cache to a new one.

        Args:
            x: Inputs.
            cache: Cache that the rows (or packed sequences) continue from; an empty one if not given. It is unchanged.
            path: Algorithm of the scan; the default one if not given.
            cu_seqlens: Boundaries (0, ..., t) of sequences packed into a batch of one; one cache row per sequence.
            seq_idx: For several packed rows, an integer per token: a sequence ends where it changes, and with its row.
                One cache row per sequence, in the order of the rows.
            mask: For padded batches, True for real tokens (b, t), padding anywhere in a row; or the lengths (b,) of
                rows that are padded at the end. Outputs at the padding are zero.
            length: Length of the whole sequences of which this call is a part, one for all or (z,); class tokens in the
                middle and at the end require it.

        Returns:
            y, and the cache after the last real token of each row. With class tokens there are more outputs than
            inputs (`output_indices`), and those of padded rows are at the front.

        Raises:
            ValueError: A shape or device does not match.
            TypeError: A dtype does not match, or an argument is not a tensor.
        """
        return self._prefill("prefill", x, cache, path, cu_seqlens, seq_idx, mask, length)[:2]

    def _prefill(
        self,
        name: str,
        x: Any,
        cache: Any,
        path: Any,
        cu_seqlens: Any,
        seq_idx: Any,
        mask: Any,
        length: Any,
        requested: Sequence[int] = (),
    ) -> tuple[Tensor, StackCache, list[Tensor]]:
        """Check the inputs of the function `name` and run it; results as those of `_run`."""
        if seq_idx is not None:
            row, cu_seqlens = self._flatten_packed_rows(name, x, seq_idx, cu_seqlens, mask)
            y, new_cache, hidden_states = self._prefill(name, row, cache, path, cu_seqlens, None, None, None, requested)
            return y.view_as(x), new_cache, [h.view_as(x) for h in hidden_states]
        padding = self._check_sequences(name, x, cu_seqlens, mask)
        is_whole = name != "prefill" and cache is None and length is None
        inserter = self._make_inserter(name, x, cache, length, cu_seqlens, padding, is_whole=is_whole)
        return self._run(x, cache, padding, requested, inserter, path=path, cu_seqlens=cu_seqlens)

    def hidden_states(
        self,
        x: Float[Tensor, "b t d"],
        passes: Sequence[int],
        cache: StackCache | None = None,
        *,
        path: SsdPath | None = None,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        seq_idx: Int[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | Padding | None = None,
        length: int | Int[Tensor, " z"] | None = None,
    ) -> list[Float[Tensor, "b t1 d"]]:
        """Return the residual stream after some of the passes, before the last norm.

        Args:
            x: Inputs.
            passes: Passes, 0 to V - 1, or counted from the end: -1 is the last.
            cache: Cache to continue from, as in `prefill`.
            path: Algorithm of the scan.
            cu_seqlens: Boundaries of packed sequences.
            seq_idx: Sequence of each token in several packed rows.
            mask: Mask or lengths of padded rows.
            length: Length of the whole sequences; without it and without a cache, those of the call are whole.
        """
        requested = self.pass_indices(passes)
        return self._prefill("hidden_states", x, cache, path, cu_seqlens, seq_idx, mask, length, requested)[2]

    def states_at(
        self,
        x: Float[Tensor, "b t d"],
        positions: Sequence[int] | Int[Tensor, " n"],
        cache: StackCache | None = None,
        *,
        path: SsdPath | None = None,
        length: int | Int[Tensor, " z"] | None = None,
    ) -> tuple[Float[Tensor, "b t1 d"], list[StackCache]]:
        """Run `prefill`, and also return the cache after the first p tokens for every p of `positions`.

        Args:
            x: Inputs.
            positions: Numbers of tokens, 1 to t, in any order.
            cache: Cache to continue from, as in `prefill`.
            path: Algorithm of the scan.
            length: Length of the whole sequences, for class tokens.

        Raises:
            TypeError: A position is not an integer.
            ValueError: There is no such position.
        """
        self._check_input("states_at", x, "b t d")
        prefill = partial(self.prefill, path=path, length=length)
        return prefill_with_states_at(f"{type(self).__name__}.states_at", prefill, x, positions, cache)

    def step(
        self, x: Float[Tensor, "b d"], cache: StackCache | None = None, *, length: int | Int[Tensor, " b"] | None = None
    ) -> tuple[Float[Tensor, "b d"], StackCache]:
        """Run over one token: a sequence of one step.

        Args:
            x: Inputs.
            cache: Cache that the rows continue from; an empty one if not given. It is unchanged.
            length: Length of the whole sequences, for class tokens in the middle and at the end.

        Returns:
            y, and the new cache. If class tokens run with the token, y is the last output of the call.
        """
        self._check_input("step", x, "b d")
        inserter = self._make_inserter("step", x.unsqueeze(1), cache, length)
        if inserter is None:
            y, new_cache, _ = self._run(x, cache, None)
            return y, new_cache
        y, new_cache, _ = self._run(x.unsqueeze(1), cache, None, inserter=inserter)
        return inserter.layout.last_outputs(y), new_cache

    def prime(
        self, batch_size: int, cache: StackCache | None = None, *, length: int | Int[Tensor, " b"] | None = None
    ) -> tuple[Float[Tensor, "b d"] | None, StackCache]:
        """Run the class tokens before the next token, without that token; those at the end never run so.

        Args:
            batch_size: Number of rows.
            cache: Cache that the rows continue from; an empty one if not given. It is unchanged.
            length: Length of the whole sequences, for class tokens in the middle.

        Returns:
            The output of the last of them, None if there were none; and the cache from which the next token continues.
        """
        mixer: Any = self.layers[0].mixer
        x = empty_input(f"{type(self).__name__}.prime", batch_size, self.config.d_model, mixer.reference_tensor())
        inserter = self._make_inserter("prime", x, cache, length, priming=True)
        if inserter is None:
            self._cache_of_pass(cache)
            return None, self.init_cache(batch_size) if cache is None else cache
        y, new_cache, _ = self._run(x, cache, None, inserter=inserter)
        return (inserter.layout.last_outputs(y) if y.shape[1] else None), new_cache

    def step_infinite(self, x: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """Return the output for a token that repeats forever, in closed form: the input of each layer is constant.

        Raises:
            NotImplementedError: A family among the layers has no closed form.
        """
        self._check_input("step_infinite", x, "b d")

        def run_pass(v: int, h: Tensor, add_residual: bool) -> Tensor:
            layer: Any = self.layers[self._layer_of_pass[v]]
            y: Tensor = layer.step_infinite(h, add_residual=add_residual)
            return y

        return self._run_passes(x, self.n_passes, run_pass)[0]

    def init_cache(self, batch_size: int) -> StackCache:
        """Return the empty cache."""
        mixers: list[Any] = [self.layers[i].mixer for i in self._layer_of_pass]
        cursors = tuple(torch.zeros(batch_size, 2, dtype=torch.int64) for _ in range(self._count_levels(self.n_passes)))
        return self.CACHE(tuple(mixer.init_cache(batch_size) for mixer in mixers), cursors)

    def pass_indices(self, passes: Sequence[int], where: str = "Stack: passes") -> list[int]:
        """Return the indices of passes, each counted from the first; `where` is the name in errors."""
        return normalize_indices(where, passes, self.n_passes)

    def _run(
        self,
        x: Tensor,
        cache: StackCache | None,
        padding: Padding | None,
        requested: Sequence[int] = (),
        inserter: ClassTokenInserter | None = None,
        **options: Any,
    ) -> tuple[Tensor, StackCache, list[Tensor]]:
        """Run all passes on checked inputs, each from its own cache (`_run_passes` has the arguments).

        Returns:
            The outputs, the new cache, and the residual stream after the requested passes.
        """
        old_caches = self._cache_of_pass(cache)
        new_caches: list[Any] = []
        if padding is not None:
            options["mask"] = padding.as_compact()

        def run_pass(v: int, h: Tensor, add_residual: bool) -> Tensor:
            index = self._layer_of_pass[v]
            if inserter is not None:
                options.update(inserter.layout.block_options())
                if not h.shape[1]:  # neither a token nor a class token
                    mixer: Any = self.layers[index].mixer
                    new_caches.append(mixer.init_cache(len(h)) if old_caches[v] is None else old_caches[v])
                    return h
            with anomaly.named_location(f"layers.{index}"):
                h, new_cache = self._layer(index)(h, old_caches[v], add_residual=add_residual, **options)
            new_caches.append(new_cache)
            return h

        y, hidden_states = self._run_passes(x, self.n_passes, run_pass, requested, inserter, padding)
        cursors = () if inserter is None else tuple(inserter.cursors)
        return y, self.CACHE(tuple(new_caches), cursors), hidden_states

    def _make_inserter(
        self,
        name: str,
        x: Tensor,
        cache: Any,
        length: int | Tensor | None,
        cu_seqlens: Tensor | None = None,
        padding: Padding | None = None,
        *,
        is_whole: bool = False,
        priming: bool = False,
    ) -> ClassTokenInserter | None:
        """Return the inserter of class tokens for a call over (b, t, d); None if the stack has none."""
        if not self.config.has_class_tokens():
            return None
        self._cache_of_pass(cache)
        where = f"{type(self).__name__}.{name}"
        layout = make_layout(where, x, length, cu_seqlens, padding, is_whole=is_whole, priming=priming)
        return ClassTokenInserter(self, where, layout, () if cache is None else cache.cursors)

    def _cache_of_pass(self, cache: Any) -> tuple[Any, ...]:
        """Return the block cache of each pass, None for an empty one; raise for a cache of another stack."""
        n_passes = self.n_passes
        if cache is None:
            return (None,) * n_passes
        return check_stack_cache(type(self).__name__, cache, self.CACHE, n_passes, self._count_levels(n_passes)).layers
