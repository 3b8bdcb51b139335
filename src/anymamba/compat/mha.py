"""The official attention layer: `anymamba.blocks.attention.Attention`, with states of a fixed size.

Letters: b batch, t time, s stored steps, d d_model, g heads of keys and values, e width of a head, v channels of the
convolution, w its width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from anymamba.blocks.attention import Attention, AttentionCache
from anymamba.compat.mixers import OfficialBlock, official_constructor


@official_constructor(
    "embed_dim num_heads num_heads_kv head_dim mlp_dim qkv_proj_bias out_proj_bias softmax_scale causal layer_idx "
    "d_conv rotary_emb_dim rotary_emb_base rotary_emb_interleaved device dtype",
    embed_dim=dataclasses.MISSING,
    causal=False,
)
class MHA(OfficialBlock, Attention):
    """Official attention layer. Unless `causal`, every token reads all tokens of the call and of the states."""

    def _construct(self, *, embed_dim: int, causal: bool = False, **arguments: Any) -> None:  # type: ignore[override]
        super()._construct(d_model=embed_dim, **arguments)
        self.embed_dim = embed_dim
        self.causal = causal
        self.mlp_dim = self.config.mlp_channels

    def forward(self, x: Tensor, inference_params: Any = None) -> Tensor:  # type: ignore[override]
        """Map (b, t, d) to (b, t, d), from an empty cache or from the states that `inference_params` keeps."""
        if inference_params is None:
            y, _ = self.prefill(x)
            return y
        if self.layer_idx is None:
            raise ValueError("MHA: layer_idx must be given to use inference_params")
        states_of_layer = inference_params.key_value_memory_dict
        if self.layer_idx not in states_of_layer:
            sizes = (inference_params.max_batch_size, inference_params.max_seqlen)
            states_of_layer[self.layer_idx] = self.allocate_inference_cache(*sizes, dtype=x.dtype)
        kv_state, conv_state = states_of_layer[self.layer_idx]
        b, t = x.shape[:2]
        begin, first = inference_params.seqlen_offset, inference_params.batch_size_offset
        rows = slice(first, first + b)
        if first + b > kv_state.shape[0] or begin + t > kv_state.shape[1]:
            raise ValueError(
                f"MHA: the states hold {kv_state.shape[0]} rows of {kv_state.shape[1]} tokens, got rows up to "
                f"{first + b} and tokens up to {begin + t}"
            )
        cache = None if begin == 0 else self._read_states(kv_state[rows, :begin], conv_state, rows)
        y, new_cache = self.prefill(x, cache)
        with torch.no_grad():
            kv_state[rows, begin : begin + t] = new_cache.kv[:, begin : begin + t]
            if conv_state is not None:
                conv_state[rows] = new_cache.conv
        return y

    def _read_states(self, kv: Tensor, conv_state: Tensor | None, rows: slice) -> AttentionCache:
        """Return the states of some rows, kv (b, s, 2, g, e), as our cache."""
        dtype, lengths = self.reference_tensor().dtype, torch.full((kv.shape[0],), kv.shape[1], dtype=torch.int64)
        conv = kv.new_zeros(kv.shape[0], self.config.qkv_dim, 0) if conv_state is None else conv_state[rows]
        return AttentionCache(kv.to(dtype), conv.to(dtype), lengths)

    def read_keys(self, q: Tensor, k: Tensor, v: Tensor, begins: Tensor | None) -> Tensor:
        """Attend as `Attention` does; unless `causal`, from a position after all keys, so that each of them is read."""
        if not self.causal:
            begins = torch.full((q.shape[0],), k.shape[1], dtype=torch.int64)
        return super().read_keys(q, k, v, begins)

    def allocate_inference_cache(  # type: ignore[override]
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return empty states: keys and values (b, s, 2, g, e), and the window of the convolution (b, v, w) or None."""
        c, like = self.config, self.reference_tensor()
        dtype = like.dtype if dtype is None else dtype
        kv_state = like.new_zeros(batch_size, max_seqlen, 2, c.kv_heads, c.head_width, dtype=dtype)
        return kv_state, like.new_zeros(batch_size, c.qkv_dim, c.d_conv, dtype=dtype) if c.d_conv else None
