"""`Block`: the entry points that every family shares, with their checks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anymamba.blocks.block_inputs import check_batch, check_input, flatten_packed_rows, prefill_with_states_at
from anymamba.blocks.layers import ProjectionPart
from anymamba.core import anomaly
from anymamba.core.checks import check_dtype_and_device, check_memory, check_mutually_exclusive
from anymamba.core.context_parallel import SequencePart
from anymamba.core.dtypes import is_autocast, state_dtype
from anymamba.core.layout import Padding
from anymamba.core.operators import check_onnx_exporter, is_tracing
from anymamba.core.weight_formats import QuantizedWeight
from anymamba.kernels.compiled_step import StepSource, usable_step
from anymamba.kernels.step_description import OUTPUT, StepBuilder
from anymamba.scan import SsdPath

# Default of a cache that was not given. An empty tuple is what the exporter of torch.jit can pass on.
_NO_CACHE: Any = ()


class Block(nn.Module):
    """A block around a scan. A family adds its parameters, `CONFIG`, `CACHE`, `cache_shapes` and `mix`.

    If it has compiled kernels for a token, it also adds `describe_core` and `projection_parts`.

    Attributes:
        config: Config of the family.
        CONFIG: Class of the config.
        CACHE: Class of the cache.
        MIRRORED_FIELDS: Fields and properties of the config that are also attributes of the block, as officially.
    """

    CONFIG: ClassVar[Any]
    CACHE: ClassVar[Any]
    MIRRORED_FIELDS: ClassVar[tuple[str, ...]] = ("d_model",)

    # Sizes of every scan (`ScanDims`); a family without heads or ranks keeps the defaults.
    d_model: int
    d_inner: int
    d_state: int
    headdim: int = 1
    rank: int = 1
    init_states: Tensor  # state of an empty cache, with `learnable_init_states` in the config

    def __init__(self, config: Any) -> None:
        """Mirror the sizes; the family adds the parameters."""
        super().__init__()
        self.config = config
        for name in self.MIRRORED_FIELDS:
            setattr(self, name, getattr(config, name))

    def forward(
        self,
        x: Float[Tensor, "b *t d"],
        cache: Any = _NO_CACHE,
        *positional: Any,
        path: SsdPath | None = None,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        seq_idx: Int[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | Padding | None = None,
        context: SequencePart | None = None,
        return_cache: bool | None = None,
    ) -> Any:
        """Run `prefill` and return y without the new cache. To get both, call `prefill`.

        Args:
            x: Inputs.
            cache: Cache that the rows continue from. Default: an empty cache.
            path: Algorithm of the scan (see `prefill`).
            cu_seqlens: Boundaries of packed sequences (see `prefill`).
            seq_idx: Sequence numbers of packed rows (see `prefill`).
            mask: Real tokens of padded batches (see `prefill`).
            context: Part of a sequence that several ranks share (see `prefill`).
            return_cache: Return y and the new cache; x may then also be one token (b, d), for `step`. Models call their
                blocks this way, so that hooks and wrappers see every call. It must be given if `cache` is: the rows of
                a single result could be mistaken for `y, cache`.

        Raises:
            TypeError: `cache` is given without `return_cache`.
        """
        self._check_positions("forward", positional)
        if isinstance(cache, tuple) and not cache:
            cache = None
        elif return_cache is None:
            raise TypeError(
                f"{type(self).__name__}.forward: return_cache must be given with a cache: True returns (y, cache), as "
                "prefill(x, cache) does, and False returns y"
            )
        if return_cache and isinstance(x, Tensor) and x.ndim == 2:
            return self.step(x, cache)
        y, new = self.prefill(x, cache, path=path, cu_seqlens=cu_seqlens, seq_idx=seq_idx, mask=mask, context=context)
        return (y, new) if return_cache else y

    def prefill(
        self,
        x: Float[Tensor, "b t d"],
        cache: Any = None,
        *positional: Any,
        path: SsdPath | None = None,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        seq_idx: Int[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | Padding | None = None,
        context: SequencePart | None = None,
    ) -> tuple[Float[Tensor, "b t d"], Any]:
        """Run the block over a sequence of any length, from any cache to a new one.

        Args:
            x: Inputs.
            cache: Cache that the rows (or packed sequences) continue from; it is not changed. Default: an empty cache.
            path: Algorithm of the scan, its chunk length and pathway. Default: the fastest, with the config's
                `chunk_size`.
            cu_seqlens: Boundaries (0, ..., t) of sequences packed into a batch of one; one cache row per sequence.
            seq_idx: Sequence number of every token of several packed rows: a sequence ends where the number changes,
                and at the end of its row. One cache row per sequence, in the order of the rows.
            mask: True for the real tokens of a padded batch (b, t), with padding anywhere in a row; or the lengths (b,)
                of rows that are padded at the end. Outputs at the padding are zero.
            context: Part of a sequence that this rank holds (`anymamba.core.context_parallel`).

        Returns:
            y, and the cache after the last real token of each row.

        Raises:
            ValueError: Shapes or devices do not match.
            TypeError: Dtypes do not match, or an argument is not a tensor.
        """
        where = f"{type(self).__name__}.prefill"
        self._check_positions("prefill", positional)
        self._check_input(where, x, "b t d")
        b, t, _ = x.shape
        if context is not None:
            check_mutually_exclusive(where, "context", seq_idx=seq_idx, mask=mask)
            if t < (min_len := getattr(self.config, "d_conv", 1)):  # the next part starts from a window of this one
                raise ValueError(f"{where}: each rank's part of a sequence must have {min_len} tokens or more, got {t}")
        if seq_idx is not None:
            row, bounds = flatten_packed_rows(where, x, seq_idx, cu_seqlens, mask)
            y, new = self.prefill(row, cache, path=path, cu_seqlens=bounds)
            return y.view(b, t, -1), new
        padding = check_batch(where, x, cu_seqlens, mask)
        if padding is not None:
            x = padding.compact(x)
        rows = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
        cache = self._check_cache(where, cache, rows, x)
        return self._run(where, x, cache, path, padding, cu_seqlens, context)

    def states_at(
        self,
        x: Float[Tensor, "b t d"],
        positions: Sequence[int] | Int[Tensor, " n"],
        cache: Any = None,
        *,
        path: SsdPath | None = None,
    ) -> tuple[Float[Tensor, "b t d"], list[Any]]:
        """Run `prefill` and return the caches after the first p tokens for every p of `positions` (1 to t, any order).

        Raises:
            TypeError: A position is not an integer.
            ValueError: A position is not between 1 and t.
        """
        where = f"{type(self).__name__}.states_at"
        self._check_input(where, x, "b t d")
        return prefill_with_states_at(where, partial(self.prefill, path=path), x, positions, cache)

    def step(self, x: Float[Tensor, "b d"], cache: Any = None) -> tuple[Float[Tensor, "b d"], Any]:
        """Run the block over one token: a sequence of one step.

        Without gradients (`torch.no_grad()`) it is one call to the compiled kernels, where they cover the block.

        Args:
            x: Inputs of one token.
            cache: Cache that the rows continue from; it is not changed. Default: an empty cache.

        Returns:
            y, and the new cache.
        """
        # A compiled step checks what it is given, so it comes before the checks.
        step = usable_step(self, (x, *cache)) if isinstance(cache, self.CACHE) else None
        if step is not None and (result := step.run(x, cache)) is not None:
            return result[0], self.CACHE(*result[1])
        where = f"{type(self).__name__}.step"
        self._check_input(where, x, "b d")
        cache = self._check_cache(where, cache, x.shape[0], x)
        step = usable_step(self, (x, *cache), self._step_source)
        if step is not None and (result := step.run(x, cache)) is not None:
            return result[0], self.CACHE(*result[1])
        y, new = self._run(where, x.unsqueeze(1), cache, None, None, None)
        return y.squeeze(1), new

    def step_infinite(self, x: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """Return the stationary output for a token that repeats forever, in closed form and without a cache.

        Raises:
            NotImplementedError: The family has no closed form.
        """
        raise NotImplementedError(f"{type(self).__name__} has no closed form for a token that repeats forever")

    def mix(
        self,
        x: Float[Tensor, "b t d"],
        cache: Any,
        *,
        path: SsdPath,
        lengths: Int[Tensor, " b"] | None,
        cu_seqlens: Int[Tensor, " z1"] | None,
        context: SequencePart | None = None,
    ) -> tuple[Float[Tensor, "b t d"], Any]:
        """Compute `prefill` of the family on checked inputs, whose rows are padded after their `lengths`."""
        raise NotImplementedError

    def cache_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each field of the cache, without the batch, and without the time of what grows."""
        raise NotImplementedError

    def init_cache(self, batch_size: int, dtype: torch.dtype | None = None) -> Any:
        """Return an empty cache: zeros, or the learnable initial state if the block has one.

        Args:
            batch_size: Number of rows or packed sequences.
            dtype: Dtype of the activations. Default: that of the parameters.
        """
        like = self.reference_tensor()
        dtype, device = dtype or like.dtype, like.device  # not `new_zeros`: a weight may be sharded
        kind = self.CACHE
        fields = {
            name: torch.zeros(
                (batch_size, *((0,) if name in kind.GROWING_FIELDS else ()), *shape),
                dtype=self._field_dtype(name, dtype),
                device="cpu" if name in kind.CPU_FIELDS else device,
            )
            for name, shape in self.cache_shapes().items()
        }
        if getattr(self.config, "learnable_init_states", False):
            fields["ssm"] = self.init_states.to(fields["ssm"].dtype).repeat(batch_size, 1, 1, 1)
        return self.CACHE(**fields)

    def projection_parts(self) -> dict[str, tuple[ProjectionPart, ...]]:
        """Return the parts of each fused projection, from its first row to its last, by the projection's name."""
        return {}

    def describe_step(self, builder: StepBuilder, x: int, *, to: int, add: bool = False, factor: float = 1.0) -> None:
        """Describe `step` from slot `x` (b, d), times `factor`, to slot `to` (b, d), or add its result to that slot.

        Raises:
            NotCoveredError: The family has no compiled step, or the block was modified.
        """
        if type(self).describe_core is Block.describe_core:
            builder.reject(f"{type(self).__name__} has no compiled step")
        width = sum(part.rows for part in self.projection_parts()["in_proj"])
        projected = builder.linear(x, self, "in_proj", self.d_model, width)
        inner = self.describe_core(builder, projected)
        builder.linear(inner, self, "out_proj", self.d_inner, self.d_model, to=to, add=add, factor=factor)

    def describe_core(self, builder: StepBuilder, projected: int) -> int:
        """Describe the computation between the projections, from slot `projected`; return the slot of its result."""
        raise NotImplementedError

    def _step_source(self) -> StepSource:
        weight = self.reference_tensor()

        def describe(builder: StepBuilder) -> None:
            self.describe_step(builder, 0, to=OUTPUT)

        return StepSource(describe, self.d_model, weight.dtype, weight.dtype, weight.device)

    def reference_tensor(self) -> Tensor:
        """Return a tensor that has the dtype and device of the activations; no parameter may have it, if quantized."""
        module = next((module for module in self.modules() if isinstance(module, QuantizedWeight)), None)
        return next(self.parameters()) if module is None else module.reference_tensor()

    def _field_dtype(self, field: str, dtype: torch.dtype) -> torch.dtype:
        if field in self.CACHE.CPU_FIELDS:
            return torch.int64
        return state_dtype(dtype) if field in self.CACHE.FP32_FIELDS else dtype

    def _check_input(self, where: str, x: Any, letters: str) -> None:
        check_input(where, x, letters, self.d_model, self.reference_tensor())
        if not is_tracing():
            self._check_memory(where)

    def _run(
        self,
        where: str,
        x: Tensor,
        cache: Any,
        path: SsdPath | None,
        padding: Padding | None,
        cu_seqlens: Tensor | None,
        context: SequencePart | None = None,
    ) -> tuple[Tensor, Any]:
        """Run `mix` on checked inputs."""
        path = SsdPath.or_default(path)
        if path.chunk_len is None:
            path = SsdPath(path.algorithm, getattr(self.config, "chunk_size", None), path.pathway)
        lengths = None if padding is None else padding.lengths
        checks_values = anomaly.is_check_finite_on() and not is_tracing()
        fields = tuple(f"cache.{name}" for name in cache._fields)
        with anomaly.named_location(where):
            if checks_values:
                anomaly.check_tensors_finite("input", ("x", *fields), (x, *cache))
            kwargs = {} if context is None else {"context": context}  # not for families without support for it
            y, new = self.mix(x, cache, path=path, lengths=lengths, cu_seqlens=cu_seqlens, **kwargs)
            if checks_values:
                anomaly.check_tensors_finite("result", ("y", *fields), (y, *new))
        return (y if padding is None else padding.restore(y)), new

    def _check_positions(self, method: str, positional: tuple[Any, ...]) -> None:
        """Raise if options are given by position, as a path is in burn-mamba."""
        check_onnx_exporter()  # it gives every option by position
        if positional:
            raise TypeError(
                f"{type(self).__name__}.{method}: options after the cache must be given by name, such as "
                f"path={positional[0]!r}"
            )

    def _check_memory(self, where: str) -> None:
        """Raise unless the parameters of the block, and of the modules that it made itself, have memory.

        A foreign module, or one with a hook, may get its parameters when it is called, as sharded ones do.
        """
        for name, parameter in self._parameters.items():
            check_memory(where, f"the parameter {name}", parameter)
        for child_name, child in self.named_children():
            if type(child).__module__.startswith(("anymamba.", "torch.nn.modules.")) and not child._forward_pre_hooks:
                for name, parameter in child._parameters.items():
                    check_memory(where, f"the parameter {child_name}.{name}", parameter)

    def _check_cache(self, where: str, cache: Any, rows: int, x: Tensor) -> Any:
        """Return the checked cache, or an empty one."""
        if cache is None:
            return self.init_cache(rows, torch.get_autocast_dtype(x.device.type) if is_autocast(x.device) else x.dtype)
        if not isinstance(cache, self.CACHE):
            raise TypeError(f"{where}: cache must be a {self.CACHE.__name__}, got {type(cache).__name__}")
        kind = self.CACHE
        for name, shape in self.cache_shapes().items():
            field = getattr(cache, name)
            steps = tuple(field.shape[1:2]) if name in kind.GROWING_FIELDS and isinstance(field, Tensor) else ()
            if not isinstance(field, Tensor) or field.shape != (rows, *steps, *shape):
                actual = tuple(field.shape) if isinstance(field, Tensor) else type(field).__name__
                raise ValueError(f"{where}: cache.{name} must have shape {(rows, *steps, *shape)}, got {actual}")
            # Under autocast, activations have the dtype that the projection gives, which the operators check.
            has_any_dtype = is_autocast(x.device) and name not in kind.FP32_FIELDS | kind.CPU_FIELDS
            dtype = field.dtype if has_any_dtype else self._field_dtype(name, x.dtype)
            device = torch.device("cpu") if name in kind.CPU_FIELDS else x.device
            check_dtype_and_device(where, f"cache.{name}", field, dtype, device)
        if kind.GROWING_FIELDS and not is_tracing() and (problem := cache.describe_wrong_lengths()):
            raise ValueError(f"{where}: cache.{problem}")
        return cache
