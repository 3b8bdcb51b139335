"""A window: several consecutive tokens of each row, read at once, of which any number may turn out to count.

Letters: b batch, k tokens of a window, v vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.models.cache import LMCache

MAX_WINDOW = 64  # tokens

# The cache after the first tokens of each row, as many as the numbers say; whether to overwrite the old cache.
Advance = Callable[[list[int], bool], LMCache]


class TokenWindow:
    """What a model returns for a window: the logits after each token, and the cache after any number of them.

    Attributes:
        logits: Logits (b, k, v) after each token, as if the tokens before it in its row were all that came.
    """

    def __init__(self, logits: Float[Tensor, "b k v"], advance: Advance) -> None:
        """Join the logits and what advances the cache."""
        self.logits = logits
        self._advance: Advance | None = advance

    def cache_after(self, counts: int | Sequence[int] | Int[Tensor, " b"], *, in_place: bool = False) -> LMCache:
        """Return the cache after the first tokens of each row, without reading the weights again.

        Args:
            counts: Number of tokens that count, 0 to k, of each row or of all rows.
            in_place: Overwrite the cache before the window; only for a cache that nothing else uses, and once.

        Raises:
            TypeError: A number is not an integer.
            ValueError: Not one number for each row, or a number out of range.
        """
        b, k = self.logits.shape[:2]
        numbers = counts.tolist() if isinstance(counts, Tensor) else counts
        numbers = list(numbers) if isinstance(numbers, Sequence) else [numbers] * b
        numbers = [operator.index(number) for number in numbers]
        if len(numbers) != b or not all(0 <= number <= k for number in numbers):
            raise ValueError(f"counts must be {b} numbers of tokens, from 0 to {k}, got {numbers}")
        if self._advance is None:
            raise RuntimeError("the cache before this window was overwritten by an earlier call with in_place=True")
        advance = self._advance
        if in_place:
            self._advance = None
        return advance(numbers, in_place)


def check_window(where: str, input_ids: object) -> None:
    """Raise unless these are the token ids of a window."""
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
        received = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"{where}: input_ids must be a tensor (b, k), a window of tokens per row, got {received}")
    if not 1 <= input_ids.shape[1] <= MAX_WINDOW:
        raise ValueError(f"{where}: a window must have 1 to {MAX_WINDOW} tokens, got {input_ids.shape[1]}")


def unroll_window(
    step: Callable[[Tensor, LMCache], tuple[Tensor, LMCache]], input_ids: Int[Tensor, "b k"], cache: LMCache
) -> TokenWindow:
    """Return a window that is read token by token, with `step`."""
    caches = [cache]
    logits = []
    for ids_b in input_ids.unbind(1):
        logits_bv, after = step(ids_b, caches[-1])
        logits.append(logits_bv)
        caches.append(after)

    def advance(counts: list[int], in_place: bool) -> LMCache:
        if len(set(counts)) <= 1:
            return caches[counts[0] if counts else -1]
        return type(cache).cat([caches[count].rows([row]) for row, count in enumerate(counts)])

    return TokenWindow(torch.stack(logits, dim=1), advance)
