"""A stack that reads in both directions: every position sees its whole sequence.

Layers come in pairs, one for each direction; flip is over time, inside each sequence:

    f = block_2j(norm_2j(h))        g = flip(block_2j+1(norm_2j+1(flip(h))))        h <- h + merge_j(f, g)

The merge is their mean, or W [f; g] + c. There is no step and no cache, because the first output depends on the last
input.

Letters: b batch, t time, d d_model, z packed sequences, V passes (two per pair).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anymamba.core.layout import Padding, reversal_order, reverse_time
from anymamba.models.inputs import normalize_indices
from anymamba.models.stack.class_tokens import make_layout, zero_padding
from anymamba.models.stack.layer_loop import ClassTokenInserter, LayerLoop
from anymamba.models.stack.residual_layer import ResidualLayer, initialize_residual, make_norm
from anymamba.models.stack.stack_config import BidirectionalConfig, make_stack_config
from anymamba.scan import SsdPath


class BidirectionalStack(LayerLoop):
    """Pairs of layers of any family that read a sequence forwards and backwards.

    Args:
        config: `BidirectionalConfig`; its fields may be given as keywords instead.
        device: Device of the parameters.
        dtype: Dtype of the parameters (blocks keep some in float32, like the official ones).
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
        self.config = c = make_stack_config(type(self).__name__, BidirectionalConfig, config, fields)
        self.layers = nn.ModuleList(ResidualLayer(c, i, **factory) for i in range(c.n_layer))
        self.norm_f = make_norm(c, **factory) if c.final_norm else nn.Identity()
        if c.merge == "linear":
            self.merges = nn.ModuleList(nn.Linear(2 * c.d_model, c.d_model, **factory) for _ in range(c.n_layer // 2))
            for merge in self.merges:
                half = torch.eye(c.d_model) / 2
                merge.weight.data.copy_(torch.cat([half, half], dim=1))  # type: ignore[operator]
                nn.init.zeros_(merge.bias)  # type: ignore[arg-type]
        self._layer_of_pass = c.layer_order()
        self._pair_of_passes = c.pairs_of_passes()
        self._build_gates(factory)
        self._build_class_tokens(factory)
        initialize_residual(self, len(self._pair_of_passes))

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
            x: Inputs.
            path: Algorithm of the scan; the default one if not given.
            cu_seqlens: Boundaries (0, ..., t) of sequences packed into a batch of one.
            seq_idx: For several packed rows, an integer per token: a sequence ends where it changes, and with its row.
            mask: For padded batches, True for real tokens (b, t), padding anywhere in a row; or the lengths (b,) of
                rows that are padded at the end. Outputs at the padding are zero.

        Returns:
            y. With class tokens there are more outputs than inputs (`output_indices`), and those of padded rows are at
            the front.

        Raises:
            ValueError: A shape or device does not match.
            TypeError: A dtype does not match, or an argument is not a tensor.
        """
        if seq_idx is not None:
            row, cu_seqlens = self._flatten_packed_rows("forward", x, seq_idx, cu_seqlens, mask)
            return self._run("forward", row, (), path, cu_seqlens, None)[0].view_as(x)
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
        """Return the residual stream after some of the pairs of passes, before the last norm; -1 is the last pair.

        Raises:
            ValueError: There is no such pair.
        """
        requested = normalize_indices("BidirectionalStack: pairs", pairs, len(self._pair_of_passes))
        if seq_idx is not None:
            row, cu_seqlens = self._flatten_packed_rows("hidden_states", x, seq_idx, cu_seqlens, mask)
            hidden_states = self._run("hidden_states", row, requested, path, cu_seqlens, None)[1]
            return [h.view_as(x) for h in hidden_states]
        return self._run("hidden_states", x, requested, path, cu_seqlens, mask)[1]

    def _run(
        self, name: str, x: Any, requested: Sequence[int], path: SsdPath | None, cu_seqlens: Any, mask: Any
    ) -> tuple[Tensor, list[Tensor]]:
        # 1) Check the batch, and move the tokens of padded rows to the front.
        padding = self._check_sequences(name, x, cu_seqlens, mask)
        options: dict[str, Any] = {"path": path, "cu_seqlens": cu_seqlens}
        h = self._to_residual(x)
        if padding is not None:
            h, options["mask"] = padding.compact(h), padding.as_compact()
        # 2) Insert the class tokens before the stack.
        inserter = None
        paddings: dict[int, Padding | None] = {}
        if self.config.has_class_tokens():
            where = f"{type(self).__name__}.{name}"
            layout = make_layout(where, h, None, cu_seqlens, padding, is_whole=True)
            inserter = ClassTokenInserter(self, where, layout, ())
            insert = inserter.enter_level(None)
            h = h if insert is None else insert(h)
        lengths = None if padding is None else padding.lengths
        time_order = reversal_order(x.shape[1], cu_seqlens, lengths, x.device)

        # 3) Run the pairs. Class tokens change the lengths from pair to pair, and with them what to flip.
        def run_pair(u: int, h: Tensor, add_residual: bool) -> Tensor:
            nonlocal time_order
            if inserter is not None:
                options.update(inserter.layout.block_options())
                paddings[u] = padding = inserter.layout.padding
                lengths = None if padding is None else padding.lengths
                time_order = reversal_order(h.shape[1], inserter.layout.cu_seqlens, lengths, h.device)
            forward_btd = self._run_one_direction(2 * u, h, options)
            flipped_btd = self._run_one_direction(2 * u + 1, reverse_time(h, time_order), options)
            merged_btd = self._merge(u, forward_btd, reverse_time(flipped_btd, time_order))
            return h + merged_btd if add_residual else merged_btd.to(h.dtype)

        h, hidden_states = self._run_passes(h, len(self._pair_of_passes), run_pair, requested, inserter)
        # 4) The last norm, and the tokens of padded rows back in their positions.
        y = self._apply_final_norm(h, x.dtype)
        if inserter is not None:
            hidden_states = [zero_padding(s, paddings[u]) for s, u in zip(hidden_states, requested, strict=True)]
            return zero_padding(y, inserter.layout.padding), hidden_states
        if padding is not None:
            y, hidden_states = padding.restore(y), [padding.restore(s) for s in hidden_states]
        return y, hidden_states

    def _run_one_direction(self, v: int, h: Tensor, options: dict[str, Any]) -> Tensor:
        """Return what the layer of pass `v` adds to the residual stream, in one direction."""
        layer = self.layers[self._layer_of_pass[v]]
        if self.config.checkpointing and torch.is_grad_enabled():
            y: Tensor = checkpoint(layer, h, add_residual=False, use_reentrant=False, **options)[0]
        else:
            y = layer(h, add_residual=False, **options)[0]
        return y

    def _merge(self, u: int, forward_btd: Tensor, backward_btd: Tensor) -> Tensor:
        if self.config.merge == "mean":
            return (forward_btd + backward_btd) / 2
        merge: Any = self.merges[self._pair_of_passes[u]]
        y: Tensor = merge(torch.cat([forward_btd, backward_btd], dim=-1).to(merge.weight.dtype))
        return y
