"""The state of a generation as a value: keep it, branch it, save it, continue it in another process.

Letters: b batch, v vocabulary.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anymamba.models.cache import LMCache, ModelState
from anymamba.models.lm import MambaLM


class _GenerationStateFields(NamedTuple):
    cache: LMCache
    logits: Float[Tensor, "b v"]
    seen: Bool[Tensor, "b v"]
    keys: Int[Tensor, " b"]
    counts: Int[Tensor, " b"]


class GenerationState(_GenerationStateFields, ModelState):
    """Everything that the next token depends on, after all tokens so far.

    It is never changed in place. To go back some tokens, keep the state from before them; to branch, select a row
    several times: the branches then draw differently.

    Attributes:
        cache: Cache of the model.
        logits: Logits of the next token (b, v).
        seen: True for tokens that have occurred, for the repetition penalty (b, v), on the CPU.
        keys: Key of each row, from which its random numbers follow (b,), on the CPU.
        counts: Number of tokens that each row has drawn (b,), on the CPU.
    """

    __slots__ = ()
    CPU_FIELDS: ClassVar[frozenset[str]] = frozenset({"seen", "keys", "counts"})

    @classmethod
    def like(cls, model: MambaLM) -> GenerationState:
        """Return the zero state of one row; its logits are undefined."""
        width = model.config.padded_vocab_size
        logits = torch.empty(1, width, dtype=model.dtype, device=model.device)
        seen = torch.zeros(1, width, dtype=torch.bool)
        zero = torch.zeros(1, dtype=torch.int64)
        return cls(model.init_cache(1), logits, seen, zero, zero)

    def after_tokens(self, tokens: Int[Tensor, " b"], logits: Float[Tensor, "b v"], cache: LMCache) -> GenerationState:
        """Return the state after one more token per row (on the CPU), with the logits and the cache after it."""
        seen = self.seen.scatter(1, tokens.unsqueeze(1), True)
        return GenerationState(cache, logits, seen, self.keys, self.counts + 1)

    def describe_problem(self) -> str:
        """Return what is wrong: values or a row's largest logit that are not finite, or a negative count."""
        if problem := self.cache.describe_problem():
            return f"cache.{problem}"
        if not bool(torch.isfinite(self.logits.amax(-1)).all()):
            return "logits has rows whose largest value is not finite"
        if bool((self.counts < 0).any()):
            return f"counts must be 0 or more, got {int(self.counts.min())}"
        return ""
