"""A stack of residual layers without an embedding: (b, t, d) in and out, with caches like a block's.

    h = x        h <- layer(h) for every pass        y = norm_f(h)

Letters: b batch, t time, d d_model, z packed sequences, V passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anymamba.blocks.base import prefill_with_states_at
from anymamba.core import anomaly
from anymamba.core.layout import Padding
from anymamba.models.cache import StackCache, check_stack_cache
from anymamba.models.fingerprint import HasFingerprint
from anymamba.models.inputs import normalize_indices
from anymamba.models.stack.class_tokens import no_tokens, sequence_layout, zeroed
from anymamba.models.stack.layer_loop import ClassTokenInserter, LayerLoop
from anymamba.models.stack.residual_layer import ResidualLayer, initialize_residual, make_norm
from anymamba.models.stack.stack_config import StackConfig, stack_config
from anymamba.scan import SsdPath


class Stack(LayerLoop, HasFingerprint):
    """Residual layers of any family, or of several, passed through in any order, with one cache per pass.

    Args:
        config: a `StackConfig`; its fields may be given as keywords instead.
        device: of the parameters.
        dtype: of the parameters (blocks keep some in float32, as officially).
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
        self._build(stack_config(type(self).__name__, StackConfig, config, fields), device=device, dtype=dtype)
        self.initialize()

    def _build(self, config: StackConfig, **factory: Any) -> None:
        """Create the parameters."""
        self.config = config
        self.layers = nn.ModuleList(ResidualLayer(config, i, **factory) for i in range(config.n_layer))
        self.norm_f = make_norm(config, **factory) if config.final_norm else nn.Identity()
        is_plain = config.n_virtual is None and isinstance(config.schedule, str)
        self._schedule = None if is_plain else config.layer_order()
        self._build_gates(factory)
        self._build_class_tokens(factory)

    def initialize(self) -> None:
        """Divide the projections into the residual stream by √passes; their biases are zero."""
        initialize_residual(self, self.n_passes)

    @property
    def _layer_of_pass(self) -> Sequence[int]:
        """The layer of each pass; without a schedule, all current layers in order."""
        return range(len(self.layers)) if self._schedule is None else self._schedule

    @property
    def n_passes(self) -> int:
        """V."""
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
        """`prefill` without the new cache; without an old one the sequences are whole, so their length is known."""
        whole = cache is None and length is None
        return self._prefill("forward", x, cache, path, cu_seqlens, seq_idx, mask, length, whole=whole)[0]

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
            x: inputs.
            cache: what the rows (or packed sequences) continue from; a fresh start if not given. It is not changed.
            path: the scan's algorithm; the default if not given.
            cu_seqlens: boundaries (0, ..., t) of sequences packed into a batch of one; one cache row per sequence.
            seq_idx: for several packed rows, a number for every token: a sequence ends where it changes, and with its
                row. One cache row per sequence, in the order of the rows.
            mask: for padded batches, True for real tokens (b, t), padding anywhere in a row; or the lengths (b,) of
                rows that are padded at the end. Outputs at the padding are zero.
            length: of the whole sequences of which this call is a part, one for all or (z,); it places class tokens in
                the middle and at the end.

        Returns:
            y, and the cache after the last real token of each row. With class tokens there are more outputs than
            inputs (`output_indices`), and those of padded rows are at the front.

        Raises:
            ValueError: shapes or devices that do not fit.
            TypeError: dtypes that do not fit, or something that is not a tensor.
        """
        return self._prefill("prefill", x, cache, path, cu_seqlens, seq_idx, mask, length)

    def _prefill(
        self,
        name: str,
        x: Any,
        cache: Any,
        path: Any,
        bounds: Any,
        seq_idx: Any,
        mask: Any,
        length: Any,
        whole: bool = False,
    ) -> tuple[Tensor, StackCache]:
        if seq_idx is not None:
            rows, bounds = self._flatten_packed_rows(name, x, seq_idx, bounds, mask)
            y, new, _ = self._run(rows, cache, None, path=path, cu_seqlens=bounds)
            return y.view_as(x), new
        padding = self._check(name, x, bounds, mask)
        levels = self._levels(name, x, cache, length, bounds, padding, whole=whole)
        y, new, _ = self._run(x, cache, padding, levels=levels, path=path, cu_seqlens=bounds)
        return y, new

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
        """The residual stream after some of the passes, before the last norm.

        Args:
            x: inputs.
            passes: 0 to V - 1, or counted from the end: -1 is the last.
            cache: as for `prefill`, like the rest.
            path: the scan's algorithm.
            cu_seqlens: boundaries of packed sequences.
            seq_idx: of several packed rows.
            mask: of padded batches.
            length: of the whole sequences; without it and without a cache, those of the call.
        """
        if seq_idx is not None:
            rows, bounds = self._flatten_packed_rows("hidden_states", x, seq_idx, cu_seqlens, mask)
            return [h.view_as(x) for h in self.hidden_states(rows, passes, cache, path=path, cu_seqlens=bounds)]
        padding = self._check("hidden_states", x, cu_seqlens, mask)
        whole = cache is None and length is None
        levels = self._levels("hidden_states", x, cache, length, cu_seqlens, padding, whole=whole)
        return self._run(x, cache, padding, self.wanted(passes), levels, path=path, cu_seqlens=cu_seqlens)[2]

    def states_at(
        self,
        x: Float[Tensor, "b t d"],
        positions: Sequence[int] | Int[Tensor, " n"],
        cache: StackCache | None = None,
        *,
        path: SsdPath | None = None,
        length: int | Int[Tensor, " z"] | None = None,
    ) -> tuple[Float[Tensor, "b t1 d"], list[StackCache]]:
        """`prefill` with the caches after its first p tokens, for every p of `positions` (1 to t, in any order).

        Raises:
            TypeError: a position is not a whole number.
            ValueError: there is no such position.
        """
        self._check_input("states_at", x, "b t d")

        def prefill(part: Tensor, before: Any) -> tuple[Tensor, StackCache]:
            return self.prefill(part, before, path=path, length=length)

        return prefill_with_states_at(f"{type(self).__name__}.states_at", prefill, x, positions, cache)

    def step(
        self,
        x: Float[Tensor, "b d"],
        cache: StackCache | None = None,
        *,
        length: int | Int[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, "b d"], StackCache]:
        """Run over one token: a sequence of one step.

        Args:
            x: inputs.
            cache: what the rows continue from; a fresh start if not given. It is not changed.
            length: of the whole sequences, for class tokens that are placed by it.

        Returns:
            y, and the new cache. If class tokens run with the token, y is the last output of the call.
        """
        self._check_input("step", x, "b d")
        levels = self._levels("step", x.unsqueeze(1), cache, length)
        if levels is None:
            y, new, _ = self._run(x, cache, None)
            return y, new
        y, new, _ = self._run(x.unsqueeze(1), cache, None, levels=levels)
        return levels.flow.last(y), new

    def prime(
        self, batch_size: int, cache: StackCache | None = None, *, length: int | Int[Tensor, " b"] | None = None
    ) -> tuple[Float[Tensor, "b d"] | None, StackCache]:
        """Run the class tokens that wait for the next token, without it; those at the end never do.

        Args:
            batch_size: rows.
            cache: what they continue from; a fresh start if not given. It is not changed.
            length: of the whole sequences, for class tokens that are placed by it.

        Returns:
            The output of the last of them, None if none waited; and the cache from which the next token continues.
        """
        mixer: Any = self.layers[0].mixer
        x = no_tokens(f"{type(self).__name__}.prime", batch_size, self.config.d_model, mixer.reference_tensor())
        levels = self._levels("prime", x, cache, length, priming=True)
        if levels is None:
            self._pass_caches(cache)
            return None, self.init_cache(batch_size) if cache is None else cache
        y, new, _ = self._run(x, cache, None, levels=levels)
        return (levels.flow.last(y) if y.shape[1] else None), new

    def step_infinite(self, x: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """The stationary output under a token that repeats forever, in closed form: each layer's input is constant.

        Raises:
            NotImplementedError: a family among the layers has no closed form.
        """
        self._check_input("step_infinite", x, "b d")

        def run(v: int, h: Tensor, added: bool) -> Tensor:
            layer: Any = self.layers[self._layer_of_pass[v]]
            found: Tensor = layer.step_infinite(h, added=added)
            return found

        return self._out(self._walk(self._stream(x), self.n_passes, run)[0], x.dtype)

    def init_cache(self, batch_size: int) -> StackCache:
        """The cache of a fresh start."""
        mixers: list[Any] = [self.layers[i].mixer for i in self._layer_of_pass]
        cursors = tuple(torch.zeros(batch_size, 2, dtype=torch.int64) for _ in range(self._count_levels(self.n_passes)))
        return self.CACHE(tuple(mixer.init_cache(batch_size) for mixer in mixers), cursors)

    def wanted(self, passes: Sequence[int], where: str = "Stack: passes") -> list[int]:
        """The numbers of passes, each counted from the first; `where` is named in errors.

        Raises:
            TypeError: not a list of whole numbers.
            ValueError: there is no such pass.
        """
        return normalize_indices(where, passes, self.n_passes)

    def _run(
        self,
        x: Tensor,
        cache: StackCache | None,
        padding: Padding | None,
        wanted: Sequence[int] = (),
        levels: ClassTokenInserter | None = None,
        **options: Any,
    ) -> tuple[Tensor, StackCache, list[Tensor]]:
        """All passes and the last norm, on checked inputs (b, t, d) or (b, d)."""
        old = self._pass_caches(cache)
        new: list[Any] = []
        paddings: dict[int, Padding | None] = {}
        dtype, residual = x.dtype, self._stream(x)
        if padding is not None:
            residual, options["mask"] = padding.compact(residual), padding.as_compact()
        if levels is not None and (place := levels.before(None)) is not None:
            residual = place(residual)

        def run(v: int, h: Tensor, added: bool) -> Tensor:
            index = self._layer_of_pass[v]
            layer: Any = self.layers[index]
            if levels is not None:
                options.update(levels.flow.options())
                paddings[v] = levels.flow.padding
                if not h.shape[1]:  # no token has come, and no class token waits
                    new.append(layer.mixer.init_cache(len(h)) if old[v] is None else old[v])
                    return h
            with anomaly.named_location(f"layers.{index}"):
                if self.config.checkpointing and torch.is_grad_enabled():
                    h, made = checkpoint(layer, h, old[v], added=added, use_reentrant=False, **options)
                else:
                    h, made = layer(h, old[v], added=added, **options)
            new.append(made)
            return h

        h, hidden = self._walk(residual, self.n_passes, run, wanted, levels)
        y = self._out(h, dtype)
        if levels is not None:
            hidden = [zeroed(s, paddings[v]) for s, v in zip(hidden, wanted, strict=True)]
            return zeroed(y, levels.flow.padding), self.CACHE(tuple(new), tuple(levels.cursors)), hidden
        if padding is not None:
            y, hidden = padding.restore(y), [padding.restore(x) for x in hidden]
        return y, self.CACHE(tuple(new)), hidden

    def _levels(
        self,
        name: str,
        x: Tensor,
        cache: Any,
        length: int | Tensor | None,
        bounds: Tensor | None = None,
        padding: Padding | None = None,
        *,
        whole: bool = False,
        priming: bool = False,
    ) -> ClassTokenInserter | None:
        """The class tokens of a call over (b, t, d); None if the stack has none."""
        if not self.config.has_class_tokens():
            return None
        self._pass_caches(cache)
        where = f"{type(self).__name__}.{name}"
        flow = sequence_layout(where, x, length, bounds, padding, whole=whole)._replace(priming=priming)
        return ClassTokenInserter(self, where, flow, () if cache is None else cache.cursors)

    def _pass_caches(self, cache: Any) -> tuple[Any, ...]:
        n = self.n_passes
        if cache is None:
            return (None,) * n
        return check_stack_cache(type(self).__name__, cache, self.CACHE, n, self._count_levels(n)).layers
