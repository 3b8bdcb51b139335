"""Slots for caches that grow with the sequence: each holds a value, which is never copied to make it fit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anymamba.core.registry import are_kernels_off
from anymamba.generation.decoder import Decoder
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM


class GrowingSlots:
    """Slots 0 to `used` - 1, each with the cache of one row: `DecodeSlots` for a model with attention layers.

    Args:
        model: Language model.
        capacity: Largest number of rows.
        together: True to step all rows in one batch, False to step each alone, None for one batch where the compiled
            kernels run.
    """

    def __init__(self, model: MambaLM, capacity: int, together: bool | None = None) -> None:
        """Begin without rows."""
        if capacity < 1:
            raise ValueError(f"rows must be at least 1, got {capacity}")
        self.capacity = capacity
        self._device = model.device
        self._decoder = Decoder(model)
        is_compiled = not self._decoder.reason and not are_kernels_off()
        self.together = is_compiled if together is None else together
        self._rows: list[LMCache] = []  # of one row each; out of date while there is a batch
        self._batch: LMCache | None = None  # of all rows, from one step of them together to the next

    @property
    def used(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def insert(self, cache: LMCache) -> None:
        """Add the cache of one row in the next slot."""
        self._split_batch()
        self._rows.append(cache)

    def remove(self, slot: int) -> None:
        """Free a slot; the row of the last one moves there."""
        self._split_batch()
        last = self._rows.pop()
        if slot != len(self._rows):
            self._rows[slot] = last

    def clear(self) -> None:
        """Free all slots."""
        self._rows = []
        self._batch = None

    def copy_row(self, slot: int) -> LMCache:
        """Return the cache in a slot, which later steps do not change."""
        return self._rows[slot] if self._batch is None else self._batch.rows(slot)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Feed one token to the row in each used slot; return the logits of the next tokens, (b, v)."""
        ids_b = torch.tensor(tokens, device=self._device)
        if self.together and len(self._rows) > 1:
            batch = LMCache.cat(self._rows) if self._batch is None else self._batch
            logits_bv, self._batch = self._decoder.step(ids_b, batch)
            return logits_bv
        logits = []
        for slot, row in enumerate(self._rows):
            logits_1v, self._rows[slot] = self._decoder.step(ids_b[slot : slot + 1], row)
            logits.append(logits_1v)
        return torch.cat(logits)

    def _split_batch(self) -> None:
        """Return to one cache per row, before rows come or go."""
        if self._batch is not None:
            self._rows = [self._batch.rows(slot) for slot in range(len(self._rows))]
            self._batch = None


def has_growing_cache(model: MambaLM) -> bool:
    """Return whether the cache of a model grows with the sequence."""
    return bool(model.init_cache(1).growing_names())
