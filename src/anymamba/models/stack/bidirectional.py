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

from anymamba.core.layout import Padding, reversal_order, reverse_time
from anymamba.models.inputs import normalize_indices
from anymamba.models.stack.class_tokens import make_layout
from anymamba.models.stack.layer_loop import ClassTokenInserter, LayerLoop
from anymamba.models.stack.residual_layer import initialize_residual
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
        c = make_stack_config(type(self).__name__, BidirectionalConfig, config, fields)
        self._build_layers(c, factory)
        if c.merge == "linear":
            self.merges = nn.ModuleList(nn.Linear(2 * c.d_model, c.d_model, **factory) for _ in range(c.n_layer // 2))
            for merge in self.merges:
                half = torch.eye(c.d_model) / 2
                merge.weight.data.copy_(torch.cat([half, half], dim=1))  # type: ignore[operator]
                nn.init.zeros_(merge.bias)  # type: ignore[arg-type]
        self._layer_of_pass = c.layer_order()
        self._pair_of_passes = c.groups_of_passes()
        self._build_connections(factory)
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
        return self._run("forward", x, (), path, cu_seqlens, seq_idx, mask)[0]

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
        return self._run("hidden_states", x, requested, path, cu_seqlens, seq_idx, mask)[1]

    def _run(
        self, name: str, x: Any, requested: Sequence[int], path: Any, cu_seqlens: Any, seq_idx: Any, mask: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """Run over whole sequences; return the outputs, and the residual stream after the requested pairs."""
        # 1) Check the batch; run rows of packed sequences as one row.
        if seq_idx is not None:
            row, cu_seqlens = self._flatten_packed_rows(name, x, seq_idx, cu_seqlens, mask)
            y, hidden_states = self._run(name, row, requested, path, cu_seqlens, None, None)
            return y.view_as(x), [h.view_as(x) for h in hidden_states]
        padding = self._check_sequences(name, x, cu_seqlens, mask)
        options: dict[str, Any] = {"add_residual": False, "path": path, "cu_seqlens": cu_seqlens}
        if padding is not None:
            options["mask"] = padding.as_compact()
        inserter = None
        if self.config.has_class_tokens():
            where = f"{type(self).__name__}.{name}"
            inserter = ClassTokenInserter(
                self, where, make_layout(where, x, None, cu_seqlens, padding, is_whole=True), ()
            )
        lengths = None if padding is None else padding.lengths
        time_order = reversal_order(x.shape[1], cu_seqlens, lengths, x.device)

        # 2) Run the pairs. Class tokens change the lengths from pair to pair, and with them what to flip.
        def run_pair(u: int, h: Tensor, add_residual: bool) -> Tensor:
            nonlocal time_order
            if inserter is not None:
                layout = inserter.layout
                options.update(layout.block_options())
                lengths = None if layout.padding is None else layout.padding.lengths
                time_order = reversal_order(h.shape[1], layout.cu_seqlens, lengths, h.device)
            forward_layer, backward_layer = self._layer_of_pass[2 * u : 2 * u + 2]
            forward_btd = self._layer(forward_layer)(h, **options)[0]
            flipped_btd = self._layer(backward_layer)(reverse_time(h, time_order), **options)[0]
            merged_btd = self._merge(u, forward_btd, reverse_time(flipped_btd, time_order))
            return h + merged_btd if add_residual else merged_btd.to(h.dtype)

        return self._run_passes(x, len(self._pair_of_passes), run_pair, requested, inserter, padding)

    def _merge(self, u: int, forward_btd: Tensor, backward_btd: Tensor) -> Tensor:
        if self.config.merge == "mean":
            return (forward_btd + backward_btd) / 2
        merge: Any = self.merges[self._pair_of_passes[u]]
        y: Tensor = merge(torch.cat([forward_btd, backward_btd], dim=-1).to(merge.weight.dtype))
        return y
