"""What every block shares: its doors, and the checks at them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anymamba.blocks.padding import Padding
from anymamba.ground.states import SavedTree
from anymamba.kernels.cpu.program import OUTPUT, Decoder, Program
from anymamba.kernels.watch import NotCovered
from anymamba.scan import SsdPath
from anymamba.scan.checks import check_cu_seqlens, expect_like, expect_shape


class Part(NamedTuple):
    """Some rows of a projection that computes several things at once.

    Attributes:
        name: of what they compute.
        rows: how many they are.
        is_matrix: whether they map a vector to a vector; False for a few numbers a head that have nothing in common.
    """

    name: str
    rows: int
    is_matrix: bool = True


class Block(nn.Module):
    """A block around the scan; a family adds its parameters, `init_cache`, `prefill`, `step` and `seams`."""

    config: Any

    def __init__(self) -> None:
        """Start without parameters."""
        super().__init__()
        self._whole, self._core = Decoder(), Decoder()

    def seams(self) -> dict[str, tuple[Part, ...]]:
        """The parts of each projection that is several in one, from its first row to its last, by its name."""
        raise NotImplementedError

    @property
    def d_state(self) -> int:
        """State size n."""
        return int(self.config.d_state)

    @property
    def headdim(self) -> int:
        """Head width p."""
        return int(self.config.headdim)

    @property
    def rank(self) -> int:
        """MIMO rank r, 1 for SISO."""
        return int(self.config.rank)

    def forward(
        self,
        x: Float[Tensor, "b *t d"],
        cache: Any = None,
        *,
        path: SsdPath | None = None,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
        return_cache: bool = False,
    ) -> Any:
        """`prefill` without the new cache: (b, t, d) -> (b, t, d).

        Args:
            x: inputs.
            cache: where to go on from; a fresh start if not given.
            path: as for `prefill`, like the next two.
            cu_seqlens: boundaries of packed sequences.
            mask: of padded batches.
            return_cache: return y and the new cache; x may then be one token (b, d) too, for `step`. Models call their
                blocks so, for hooks and wrappers to see every call.
        """
        plain = path is None and cu_seqlens is None and mask is None
        if return_cache and x.ndim == 2 and plain:
            return self.step(x, cache)
        y, new = self.prefill(x, cache, path=path, cu_seqlens=cu_seqlens, mask=mask)
        return (y, new) if return_cache else y

    def prefill(
        self,
        x: Float[Tensor, "b t d"],
        cache: Any = None,
        *,
        path: SsdPath | None = None,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], Any]:
        """Run the block over a sequence of any length, from any cache to a new one."""
        raise NotImplementedError

    def step(self, x: Float[Tensor, "b d"], cache: Any = None) -> tuple[Float[Tensor, "b d"], Any]:
        """Run the block over one token."""
        raise NotImplementedError

    def record(self, program: Program, x: int, *, to: int, add: bool = False) -> None:
        """Record `step` for the compiled kernels.

        Args:
            program: where to.
            x: slot of the input, (b, d).
            to: slot of the output, (b, d).
            add: add to what is in that slot.

        Raises:
            NotCovered: the kernels cannot do what this block does.
        """
        width, inner = self.config.d_model, self.config.d_inner
        projected = program.linear(x, self, "in_proj", width, self._projected_width())
        program.linear(self._record_core(program, projected), self, "out_proj", inner, width, to=to, add=add)

    def _projected_width(self) -> int:
        return sum(part.rows for part in self.seams()["in_proj"])

    def _record_core(self, program: Program, projected: int) -> int:
        """Record what lies between the projections, from one slot to another."""
        raise NotImplementedError

    def _step_whole(self, x: Tensor, cache: Any) -> tuple[Tensor, Any] | None:
        """`step` in one call to the compiled kernels; None where they do not cover it."""
        like = self._like()
        if x.ndim != 2 or x.shape[1] != self.config.d_model or x.dtype != like.dtype:
            return None
        if torch.is_autocast_enabled("cpu") or not isinstance(cache, SavedTree | None):
            return None
        cache = self.init_cache(x.shape[0]) if cache is None else cache

        def record(program: Program) -> None:
            program.watch.module(self, type(self))
            self.record(program, 0, to=OUTPUT)

        done = self._whole.run(like.dtype, record, x, cache.leaves())
        return done and (done[0], cache.with_tensors(done[1]))

    def _step_core(self, projected: Tensor, cache: Any) -> tuple[Tensor, Any] | None:
        """The same between the projections, where those are not ours to read: (b, projected) -> (b, i)."""

        def record(program: Program) -> None:
            program.watch.module(self, type(self))
            if program.input_width != self._projected_width():
                raise NotCovered
            program.write(self._record_core(program, 0), self.config.d_inner)

        done = self._core.run(projected.dtype, record, projected, cache.leaves())
        return done and (done[0], cache.with_tensors(done[1]))

    def init_cache(self, batch_size: int, dtype: torch.dtype | None = None) -> Any:
        """The cache of a fresh start."""
        raise NotImplementedError

    def _like(self) -> Tensor:
        """A parameter that has the dtype and device of the activations."""
        raise NotImplementedError

    def _path(self, path: SsdPath | None) -> SsdPath:
        """`path`, with the config's chunk length where it has none."""
        path = SsdPath.or_default(path)
        if path.chunk_len is not None:
            return path
        return SsdPath(path.algorithm, self.config.chunk_size, path.pathway)

    def _check_input(self, method: str, x: Tensor, letters: str) -> list[int]:
        """Raise unless `x` fits; its sizes without the last."""
        sizes = {"d": self.config.d_model}
        where = f"{type(self).__name__}.{method}"
        expect_shape(where, "x", x, letters, sizes)
        if sizes.get("t") == 0:
            raise ValueError(f"{where}: the sequence must have at least one step, got t = 0")
        like = self._like()
        autocast = torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)
        expect_like(where, "x", x, x.dtype if autocast else like.dtype, like.device)
        return list(x.shape[:-1])

    def _enter(self, x: Tensor, cu_seqlens: Tensor | None, mask: Tensor | None) -> tuple[Tensor, int, Padding | None]:
        """Check what `prefill` was given: x with its padding at the end, the rows of its cache, and the padding."""
        b, t = self._check_input("prefill", x, "b t d")
        where = f"{type(self).__name__}.prefill"
        if cu_seqlens is not None:
            if mask is not None:
                raise ValueError(f"{where}: mask and cu_seqlens exclude each other, got both")
            check_cu_seqlens(where, cu_seqlens, b, t, x.device)
            return x, cu_seqlens.shape[0] - 1, None
        if mask is None:
            return x, b, None
        padding = Padding.of(where, mask, b, t, x.device)
        return padding.compact(x), b, padding
