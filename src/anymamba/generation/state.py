"""The state of a generation, as a value: keep it, branch it, save it, continue in another process.

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
    """Everything the next token depends on, after all tokens so far.

    It is never changed in place. To go back some tokens, keep the state from before them; to branch, select a row
    several times: the branches then draw differently.

    Attributes:
        cache: of the model.
        logits: of the next token, (b, v).
        seen: True for tokens that occurred, for the repetition penalty, (b, v), on the CPU.
        keys: each row's identity for sampling, (b,), on the CPU.
        counts: how many tokens each row has drawn, (b,), on the CPU.
    """

    __slots__ = ()
    CPU_FIELDS: ClassVar[frozenset[str]] = frozenset({"seen", "keys", "counts"})

    @classmethod
    def like(cls, model: MambaLM) -> GenerationState:
        """The state of a fresh start with one row; its logits mean nothing."""
        width = model.config.padded_vocab_size
        logits, none = torch.empty(1, width, dtype=model.dtype, device=model.device), torch.zeros(1, dtype=torch.int64)
        return cls(model.init_cache(1), logits, torch.zeros(1, width, dtype=torch.bool), none, none)

    def describe_problem(self) -> str:
        """Return what is wrong: values or a row's largest logit that are not finite, or a negative count."""
        if problem := self.cache.describe_problem():
            return f"cache.{problem}"
        if not bool(torch.isfinite(self.logits.amax(-1)).all()):
            return "logits has rows whose largest value is not finite"
        if bool((self.counts < 0).any()):
            return f"counts must be 0 or more, got {int(self.counts.min())}"
        return ""
