"""A stack that reads in both directions: every position sees its whole sequence.

Layers come in pairs, one for each direction; flip is over time, inside each sequence:

    f = block_2j(norm_2j(h))        g = flip(block_2j+1(norm_2j+1(flip(h))))        h <- h + merge_j(f, g)

The merge is their mean, or W [f; g] + c. There is no step and no cache: the first output depends on the last input.

Letters: b batch, t time, d d_model, z packed sequences, V passes (two per pair).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anymamba.core.layout import Padding, reversal_order, reverse_time
from anymamba.models.inputs import normalize_indices
from anymamba.models.stack.class_tokens import sequence_layout, zeroed
from anymamba.models.stack.layer_loop import ClassTokenInserter, LayerLoop
from anymamba.models.stack.residual_layer import ResidualLayer, initialize_residual, make_norm
from anymamba.models.stack.stack_config import PAIR_SCHEDULES, StackConfig, stack_config
from anymamba.scan import SsdPath


@dataclass(frozen=True, kw_only=True)
class BidirectionalConfig(StackConfig):
    """Sizes and options of a bidirectional stack; layers and passes count both directions."""

    schedule: str | list[int] = "strided_cyclic"  # or another of `PAIR_SCHEDULES`, or the layer of each pass
    merge: Literal["mean", "linear"] = "mean"  # of the two directions

    SCHEDULES: ClassVar[dict[str, Any]] = PAIR_SCHEDULES
    GROUP: ClassVar[str] = "pair of layers"

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        super().__post_init__()
        where = type(self).__name__
        if self.n_layer % 2:
            raise ValueError(f"{where}: n_layer must be even, a layer for each direction of a pair, got {self.n_layer}")
        if len(self.layer_order()) % 2:
            found = len(self.layer_order())
            raise ValueError(f"{where}: the passes must be pairs, an even number of them, got {found}")
        if self.merge not in ("mean", "linear"):
            raise ValueError(f'{where}: merge must be "mean" or "linear", got {self.merge!r}')
        if self.d_intermediate:
            raise ValueError(f"{where}: layers have no MLP, so d_intermediate must be 0, got {self.d_intermediate}")

    def residual_passes(self) -> int:
        """Pairs of passes."""
        return len(self.layer_order()) // 2

    def pairs_of_passes(self) -> list[int]:
        """The real pair of each pair of passes, given by its forward layer: the one that has its merge and gates."""
        return [layer // 2 for layer in self.layer_order()[::2]]

    def layer_groups(self) -> int:
        """Real pairs."""
        return self.n_layer // 2

    def groups_of_passes(self) -> list[int]:
        """The real pair of each pair of passes."""
        return self.pairs_of_passes()

    def gates_of_passes(self) -> list[int]:
        """The gates that follow each pair of passes."""
        return list(range(self.residual_passes())) if self.gates_per == "pass" else self.pairs_of_passes()


class BidirectionalStack(LayerLoop):
    """Pairs of layers of any family that read a sequence forwards and backwards.

    Args:
        config: a `BidirectionalConfig`; its fields may be given as keywords instead.
        device: of the parameters.
        dtype: of the parameters (blocks keep some in float32, as officially).
    """

    config: BidirectionalConfig

    def __init__(
        self,
        config: BidirectionalConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        """Create and initialize the parameters; a learned merge begins as the mean."""
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = c = stack_config(type(self).__name__, BidirectionalConfig, config, fields)
        self.layers = nn.ModuleList(ResidualLayer(c, i, **factory) for i in range(c.n_layer))
        self.norm_f = make_norm(c, **factory) if c.final_norm else nn.Identity()
        if c.merge == "linear":
            self.merges = nn.ModuleList(nn.Linear(2 * c.d_model, c.d_model, **factory) for _ in range(c.n_layer // 2))
            for merge in self.merges:
                half = torch.eye(c.d_model) / 2
                merge.weight.data.copy_(torch.cat([half, half], dim=1))  # type: ignore[operator]
                nn.init.zeros_(merge.bias)  # type: ignore[arg-type]
        self._layers, self._pairs = c.layer_order(), c.pairs_of_passes()
        self._build_gates(factory)
        self._build_class_tokens(factory)
        initialize_residual(self, len(self._pairs))

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        *,
        path: SsdPath | None = None,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        seq_idx: Int[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | Padding | None = None,
    ) -> Float[Tensor, "b t1 d"]:
        """Run over whole sequences.

        Args:
            x: inputs.
            path: the scan's algorithm; the default if not given.
            cu_seqlens: boundaries (0, ..., t) of sequences packed into a batch of one.
            seq_idx: for several packed rows, a number for every token: a sequence ends where it changes, and with its
                row.
            mask: for padded batches, True for real tokens (b, t), padding anywhere in a row; or the lengths (b,) of
                rows that are padded at the end. Outputs at the padding are zero.

        Returns:
            y. With class tokens there are more outputs than inputs (`output_indices`), and those of padded rows are at
            the front.

        Raises:
            ValueError: shapes or devices that do not fit.
            TypeError: dtypes that do not fit, or something that is not a tensor.
        """
        if seq_idx is not None:
            rows, bounds = self._flatten_packed_rows("forward", x, seq_idx, cu_seqlens, mask)
            return self._run("forward", rows, (), path, bounds, None)[0].view_as(x)
        return self._run("forward", x, (), path, cu_seqlens, mask)[0]

    def hidden_states(
        self,
        x: Float[Tensor, "b t d"],
        pairs: Sequence[int],
        *,
        path: SsdPath | None = None,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        seq_idx: Int[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | Padding | None = None,
    ) -> list[Float[Tensor, "b t1 d"]]:
        """The residual stream after some of the pairs of passes, before the last norm; -1 is the last pair.

        Raises:
            ValueError: there is no such pair.
        """
        wanted = normalize_indices("BidirectionalStack: pairs", pairs, len(self._pairs))
        if seq_idx is not None:
            rows, bounds = self._flatten_packed_rows("hidden_states", x, seq_idx, cu_seqlens, mask)
            found = self._run("hidden_states", rows, wanted, path, bounds, None)[1]
            return [h.view_as(x) for h in found]
        return self._run("hidden_states", x, wanted, path, cu_seqlens, mask)[1]

    def _run(
        self, name: str, x: Any, wanted: Sequence[int], path: SsdPath | None, cu_seqlens: Any, mask: Any
    ) -> tuple[Tensor, list[Tensor]]:
        c, where = self.config, f"{type(self).__name__}.{name}"
        padding = self._check(name, x, cu_seqlens, mask)
        options: dict[str, Any] = {"path": path, "cu_seqlens": cu_seqlens}
        h = self._stream(x)
        if padding is not None:
            h, options["mask"] = padding.compact(h), padding.as_compact()
        levels = None
        paddings: dict[int, Padding | None] = {}
        if c.has_class_tokens():
            levels = ClassTokenInserter(
                self, where, sequence_layout(where, h, None, cu_seqlens, padding, whole=True), ()
            )
            place = levels.before(None)
            h = h if place is None else place(h)
        lengths = None if padding is None else padding.lengths
        order = reversal_order(x.shape[1], cu_seqlens, lengths, x.device)

        def run(u: int, h: Tensor, added: bool) -> Tensor:
            nonlocal order
            if levels is not None:
                options.update(levels.flow.options())
                paddings[u] = now = levels.flow.padding
                lengths = None if now is None else now.lengths
                order = reversal_order(h.shape[1], levels.flow.bounds, lengths, h.device)
            found = self._merged(u, self._one(2 * u, h, options), self._backward(2 * u + 1, h, order, options))
            return h + found if added else found.to(h.dtype)

        h, hidden = self._walk(h, len(self._pairs), run, wanted, levels)
        y = self._out(h, x.dtype)
        if levels is not None:
            return zeroed(y, levels.flow.padding), [zeroed(s, paddings[u]) for s, u in zip(hidden, wanted, strict=True)]
        if padding is not None:
            y, hidden = padding.restore(y), [padding.restore(s) for s in hidden]
        return y, hidden

    def _backward(self, v: int, h: Tensor, order: Tensor | None, options: dict[str, Any]) -> Tensor:
        return reverse_time(self._one(v, reverse_time(h, order), options), order)

    def _one(self, v: int, h: Tensor, options: dict[str, Any]) -> Tensor:
        """What the layer of pass `v` finds, in one direction."""
        layer = self.layers[self._layers[v]]
        if self.config.checkpointing and torch.is_grad_enabled():
            found: Tensor = checkpoint(layer, h, added=False, use_reentrant=False, **options)[0]
        else:
            found = layer(h, added=False, **options)[0]
        return found

    def _merged(self, u: int, f: Tensor, g: Tensor) -> Tensor:
        if self.config.merge == "mean":
            return (f + g) / 2
        merge: Any = self.merges[self._pairs[u]]
        found: Tensor = merge(torch.cat([f, g], dim=-1).to(merge.weight.dtype))
        return found
