"""Where a generation stands, as a value: keep it, branch it, save it, go on in another process.

Letters: b batch, v vocabulary.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anymamba.blocks.cache import Rows, row_index
from anymamba.models.cache import Fingerprinted, LMCache, cache_from, load_state, save_state

_KIND = "GenerationState"


class GenerationState(NamedTuple):
    """Everything the next token depends on, after all tokens so far. It is never changed in place.

    To go back some tokens, keep the state from before them; to branch, select a row several times.

    Attributes:
        cache: of the model.
        logits: of the next token, (b, v).
        seen: True for tokens that occurred, for the repetition penalty, (b, v), on the CPU.
        keys: each row's identity for sampling, (b,).
        counts: how many tokens each row has drawn, (b,).
    """

    cache: LMCache
    logits: Float[Tensor, "b v"]
    seen: Bool[Tensor, "b v"]
    keys: Int[Tensor, " b"]
    counts: Int[Tensor, " b"]

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self.logits.shape[0]

    def rows(self, index: Rows) -> GenerationState:
        """Select rows; an index may repeat, to branch one sequence into several, which then draw differently.

        Raises:
            IndexError: there is no such row.
            TypeError: `index` is not a whole number, some of them, or a slice.
        """
        chosen = row_index(index, self.batch_size)
        on_cpu = chosen.cpu() if isinstance(chosen, Tensor) else chosen
        return GenerationState(
            self.cache.rows(chosen), self.logits[chosen], self.seen[on_cpu], self.keys[on_cpu], self.counts[on_cpu]
        )

    def clone(self) -> GenerationState:
        """A copy that shares no memory with this state."""
        return GenerationState(self.cache.clone(), *(x.clone() for x in self[1:]))

    def detach(self) -> GenerationState:
        """The same values without their autograd history."""
        return self._replace(cache=self.cache.detach(), logits=self.logits.detach())

    def to(
        self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> GenerationState:
        """For the model on another device, or in another dtype; the cache's states keep at least float32."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        return self._replace(cache=self.cache.to(device, dtype), logits=self.logits.to(device, dtype))

    def save(self, path: str | os.PathLike[str], model: Fingerprinted) -> None:
        """Write to a safetensors file together with the fingerprint of `model`."""
        own = {name: x for name, x in zip(self._fields, self, strict=True) if isinstance(x, Tensor)}
        save_state(path, _KIND, model, {**self.cache.tensors(), **own}, self.cache.notes())

    @staticmethod
    def load(path: str | os.PathLike[str], model: Fingerprinted) -> GenerationState:
        """Read what `save` wrote, to go on with the same `model`, on its device.

        Raises:
            ValueError: the file is not a saved state, is damaged, or is of another model.
        """
        tensors, notes = load_state(path, _KIND, model)
        cache = cache_from(path, model, tensors, notes)
        names = GenerationState._fields[1:]
        if missing := [name for name in names if name not in tensors]:
            raise ValueError(f"{path}: the state lacks {', '.join(missing)}")
        logits, seen, keys, counts = (tensors[name] for name in names)
        rows = cache.batch_size
        shapes = [(rows, logits.shape[-1]), (rows, logits.shape[-1]), (rows,), (rows,)]
        dtypes = [logits.dtype, torch.bool, torch.int64, torch.int64]
        for name, x, shape, dtype in zip(names, (logits, seen, keys, counts), shapes, dtypes, strict=True):
            if x.shape != shape or x.dtype != dtype:
                raise ValueError(
                    f"{path}: {name} must be {dtype} of shape {shape}, got {x.dtype} of shape {tuple(x.shape)}"
                )
        device = next(iter(cache.tensors().values())).device
        return GenerationState(cache, logits.to(device), seen, keys, counts)

    @staticmethod
    def cat(states: list[GenerationState]) -> GenerationState:
        """The rows of several states, one after another."""
        if len(states) == 1:
            return states[0]
        rest = (torch.cat(xs) for xs in zip(*(state[1:] for state in states), strict=True))
        return GenerationState(LMCache.cat(state.cache for state in states), *rest)
