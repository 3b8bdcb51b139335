"""One continuation in the making: how its tokens are chosen, and the text that they make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.generation.completion import CompletionBuilder
from anymamba.generation.sampling import Sampling, TokenScore, draw_uniform, sample_tokens, score_token
from anymamba.generation.state import GenerationState
from anymamba.generation.tokenizers import Tokenizer
from anymamba.models.cache import LMCache


class TokenText(NamedTuple):
    """What one token added.

    Attributes:
        token: its id.
        text: the text that is now certain, which may be empty.
        scores: the token, then the most likely ones, if they were asked for.
    """

    token: int
    text: str
    scores: list[TokenScore]


@dataclass(frozen=True, kw_only=True)
class ContinuationOptions:
    """What is asked of a continuation.

    Attributes:
        sampling: how tokens are chosen; its seed is set.
        max_tokens: the most tokens.
        ends: tokens that end it.
        stops: texts before which it ends.
        logprobs: how many of the most likely tokens are scored beside the chosen one; None for no scores.
        feed_final_token: whether the state that is kept at the end has read every token, including one that ended it.
    """

    sampling: Sampling
    max_tokens: int
    ends: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    feed_final_token: bool = False


class Continuation:
    """A continuation: `take` a token that `choose_tokens` has chosen, feed it to the model, tell the row that it was
    `fed`, and again.

    Attributes:
        plan: what is asked.
        completion: Text of the row, and why it ended.
        pending: the token that was taken but not fed yet, if there is one.
        way: equal for rows that choose tokens in the same way, apart from their seeds.
    """

    def __init__(
        self, plan: ContinuationOptions, tokenizer: Tokenizer, vocab_size: int, state: GenerationState, key: int
    ) -> None:
        """Start after a prompt: `state` is that of one row, `key` the row's identity for sampling."""
        self.plan, self._vocab = plan, vocab_size
        self._seen_v, self._key, self._count = state.seen[0].clone(), key, int(state.counts[0])
        self._given: Counter[int] = Counter()
        self.completion = CompletionBuilder(
            tokenizer, end_tokens=plan.ends, stop_texts=plan.stops, max_tokens=plan.max_tokens
        )
        self.pending: int | None = None
        self.way = _way(plan.sampling)

    def _uniform(self) -> float:
        """The random number that draws its next token."""
        sampling = self.plan.sampling
        assert sampling.seed is not None
        return draw_uniform(sampling.seed, self._key, self._count) if sampling.temperature else 0.0

    def take(self, token: int, logits_1v: Tensor) -> TokenText:
        """Add a token, which `choose_tokens` has chosen from these logits."""
        if self.plan.sampling.needs_token_counts:
            self._given[token] += 1
        scores: list[TokenScore] = []
        if self.plan.logprobs is not None:
            scores = score_token(logits_1v[0, : self._vocab], token, self.plan.logprobs)
        self.pending = token
        return TokenText(token, self.completion.add(token), scores)

    def fed(self) -> None:
        """Note that the model has read the pending token."""
        assert self.pending is not None
        self._seen_v[self.pending] = True
        self._count += 1
        self.pending = None

    @property
    def must_feed(self) -> bool:
        """Whether the pending token belongs in the state that is kept."""
        return self.pending is not None and (self.plan.feed_final_token or self.completion.reason == "length")

    def state(self, cache: LMCache, logits_1v: Tensor) -> GenerationState:
        """The state of the row, with these tensors, which nobody else may change."""
        keys, counts = torch.tensor([self._key]), torch.tensor([self._count])
        return GenerationState(cache, logits_1v, self._seen_v.unsqueeze(0), keys, counts)


def _way(sampling: Sampling) -> Hashable:
    fields = {**vars(sampling), "seed": None, "logit_bias": tuple((sampling.logit_bias or {}).items())}
    return tuple(fields.items())


def choose_tokens(rows: Sequence[Continuation], logits_bv: Tensor) -> list[int | ValueError]:
    """The next token of each row; rows that choose in the same way do so in one call.

    Args:
        rows: rows that have not ended.
        logits_bv: their logits.

    Returns:
        A token for each row, or the error of a row whose logits are not finite.
    """
    alike: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        alike.setdefault(row.way, []).append(i)
    chosen: dict[int, int | ValueError] = {}
    for group in alike.values():
        logits = logits_bv if len(group) == len(rows) else logits_bv[group]
        try:
            tokens: list[int | ValueError] = [*_choose([rows[i] for i in group], logits)]
        except ValueError:  # of one row, which must not fail the others
            tokens = [_choose_alone(rows[i], logits_bv[i : i + 1]) for i in group]
        chosen.update(zip(group, tokens, strict=True))
    return [chosen[i] for i in range(len(rows))]


def _choose(rows: list[Continuation], logits_bv: Tensor) -> list[int]:
    """Tokens of rows that choose in the same way."""
    sampling, vocab = rows[0].plan.sampling, rows[0]._vocab
    seen_bv = None
    if sampling.repetition_penalty != 1:
        seen_bv = torch.stack([row._seen_v[:vocab] for row in rows])
    uniforms = [row._uniform() for row in rows]
    return sample_tokens(logits_bv[:, :vocab], sampling, uniforms, seen_bv, [row._given for row in rows]).tolist()


def _choose_alone(row: Continuation, logits_1v: Tensor) -> int | ValueError:
    try:
        return _choose([row], logits_1v)[0]
    except ValueError as error:
        return error
