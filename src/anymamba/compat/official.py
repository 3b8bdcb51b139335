"""What the official blocks share: `inference_params`, and states that are changed in place.

The states hold what our caches hold, and are float32 or wider where our caches are.

Letters: b batch, t time, d d_model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymamba.blocks.block import Block
from anymamba.compat.packing import Packing, in_one_row


class OfficialBlock(Block):
    """What the official blocks have besides their constructors.

    Attributes:
        FIELDS: the fields of the cache in the order of the official states.
        layer_idx: the key under which `inference_params` keeps the states.
    """

    FIELDS: tuple[str, ...]
    layer_idx: int | None

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """The states of a fresh start; `max_seqlen` does not matter to them."""
        cache = self.init_cache(batch_size, dtype)
        return tuple(getattr(cache, name).detach() for name in self.FIELDS)

    def _get_states_from_cache(
        self, inference_params: Any, batch_size: int, initialize_states: bool = False
    ) -> tuple[Tensor, ...]:
        """The states that `inference_params` keeps for this layer, made if there are none."""
        if self.layer_idx is None:
            raise ValueError(f"{type(self).__name__}: layer_idx must be given to use inference_params")
        kept: dict[Any, Any] = inference_params.key_value_memory_dict
        if self.layer_idx not in kept or initialize_states:
            kept[self.layer_idx] = self.allocate_inference_cache(batch_size, 1)
        states: tuple[Tensor, ...] = kept[self.layer_idx]
        return states

    def _sequence(
        self, u: Tensor, inference_params: Any, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """(b, t, d) -> (b, t, d), from a fresh start or from the states that `inference_params` keeps."""
        if seq_idx is not None and cu_seqlens is None:
            b, t = u.shape[:2]
            packing = Packing.of(type(self).__name__, seq_idx, b, t)
            if inference_params is not None:
                raise NotImplementedError(
                    f"mamba_ssm.{type(self).__name__}: seq_idx with inference_params; pass cu_seqlens"
                )
            y, _ = self.prefill(in_one_row(u), cu_seqlens=packing.cu_seqlens)
            return y.squeeze(0).unflatten(0, (b, t))
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.to(u.device)
        if inference_params is None:
            y, _ = self.prefill(u, cu_seqlens=cu_seqlens)
            return y
        rows = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        states = self._get_states_from_cache(inference_params, rows)
        cache = self._cache(states) if inference_params.seqlen_offset > 0 else None
        y, new = self.prefill(u, cache, cu_seqlens=cu_seqlens)
        self._write(states, new)
        return y

    def _step(self, u: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One token, (b, d) or (b, 1, d), from states that are changed in place; they are returned with the output."""
        if u.ndim == 3 and u.shape[1] != 1:
            raise ValueError(f"{type(self).__name__}.step: expected one token, got {u.shape[1]}")
        y, new = self.prefill(u if u.ndim == 3 else u.unsqueeze(1), self._cache(states))
        self._write(states, new)
        return (y if u.ndim == 3 else y.squeeze(1), *states)

    def _cache(self, states: tuple[Tensor, ...]) -> Any:
        """Official states as our cache."""
        like = self.activation_like().dtype
        return self.CACHE(**{n: x.to(self._field_dtype(n, like)) for n, x in zip(self.FIELDS, states, strict=True)})

    def _write(self, states: tuple[Tensor, ...], cache: Any) -> None:
        with torch.no_grad():
            for name, state in zip(self.FIELDS, states, strict=True):
                state.copy_(getattr(cache, name))
