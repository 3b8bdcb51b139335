"""The rows that are decoded together, in memory that stays where it is: to join or leave costs the copy of one row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anymamba.generation.decoder import Decoder
from anymamba.ground.operators import kernels_are_off
from anymamba.kernels.cpu.program import MAX_ROWS
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM


class Slots:
    """Places 0 to `used` - 1 of a cache, each with the state of one row.

    The compiled kernels compute a row the same in any batch of up to `MAX_ROWS`. Where they do not run, the last bits
    of a row depend on its batch, so each row is stepped alone there, unless `together` asks for speed.

    Args:
        model: the language model.
        capacity: the most rows, at most `MAX_ROWS`.
        together: whether rows share a step; if not given, they do where the kernels run.

    Raises:
        ValueError: a capacity out of range.
    """

    def __init__(self, model: MambaLM, capacity: int = MAX_ROWS, together: bool | None = None) -> None:
        """Take no memory yet."""
        if not 1 <= capacity <= MAX_ROWS:
            raise ValueError(f"rows must be between 1 and {MAX_ROWS}, got {capacity}")
        self.decoder, self.capacity, self.used = Decoder(model), capacity, 0
        compiled = not self.decoder.reason and not kernels_are_off()
        self.together = compiled if together is None else together
        self._model, self._cache = model, model.init_cache(1)

    def join(self, cache: LMCache) -> None:
        """Copy the state of one row to the next place."""
        size = self._cache.batch_size
        if self.used == size:
            self._grow(min(self.capacity, 2 * size))
        for mine, new in zip(self._cache.leaves(), cache.leaves(), strict=True):
            mine[self.used : self.used + 1] = new
        self.used += 1

    def leave(self, place: int) -> None:
        """Give up a place; the row in the last one moves there."""
        self.used -= 1
        if place != self.used:
            for x in self._cache.leaves():
                x[place] = x[self.used]

    def clear(self) -> None:
        """Give up all places."""
        self.used = 0

    def row(self, place: int) -> LMCache:
        """A copy of the state in a place."""
        return self._cache.with_tensors(x[place : place + 1].clone() for x in self._cache.leaves())

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Feed one token to each row.

        Args:
            tokens: as many as places are used.

        Returns:
            The logits of the next token of each, (b, v).
        """
        ids = torch.tensor(tokens, device=self._model.device)
        if self.together:
            return self._step(ids, 0, self.used)
        return torch.cat([self._step(ids[place : place + 1], place, place + 1) for place in range(self.used)])

    def _step(self, ids: Tensor, begin: int, end: int) -> Tensor:
        views = self._cache.with_tensors(x[begin:end] for x in self._cache.leaves())
        logits, new = self.decoder.step(ids, views, in_place=True)
        for mine, x in zip(views.leaves(), new.leaves(), strict=True):
            if mine.data_ptr() != x.data_ptr():  # the model's own code ran, which makes a new cache
                mine.copy_(x)
        return logits

    def _grow(self, size: int) -> None:
        def grown(x: Tensor) -> Tensor:
            wider = torch.zeros((size, *x.shape[1:]), dtype=x.dtype, device=x.device)
            wider[: x.shape[0]] = x
            return wider

        self._cache = self._cache.with_tensors(map(grown, self._cache.leaves()))
