"""How likely a model finds a text, computed segment by segment in a fixed amount of memory.

Letters: t time, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.core.context_parallel import ContextParallelGroup, SequencePart
from anymamba.generation.prefill import SEGMENT_LEN
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM
from anymamba.models.loss import IGNORED_LABEL, cross_entropy_sum


class TextScore(NamedTuple):
    """The score of a text so far.

    Attributes:
        nats: Negative log-likelihood of the predicted tokens; on a rank of a context-parallel group, of those that this
            rank predicted.
        predicted: Number of predicted tokens: all but the first.
        read: Number of tokens that the model has read.
    """

    nats: float
    predicted: int
    read: int


def score_text(
    model: MambaLM,
    tokens: Iterable[list[int]],
    segment_len: int = SEGMENT_LEN,
    cp_group: ContextParallelGroup | None = None,
) -> Iterator[TextScore]:
    """Score a text that arrives in chunks; memory depends neither on their number nor on the length of the text.

    Args:
        model: Language model.
        tokens: Token ids of the text, in lists of any lengths.
        segment_len: Number of tokens computed at once, on each rank.
        cp_group: Ranks that share the text, each of which is given all tokens.

    Yields:
        The score so far, after each segment.
    """
    waiting: list[int] = []
    total, predicted, read = 0.0, 0, 0
    last_logits_1v, cache = None, None
    segment_len *= 1 if cp_group is None else cp_group.size
    chunks: Iterable[tuple[list[int], bool]] = chain(((chunk, False) for chunk in tokens), [([], True)])
    for chunk, is_end in chunks:
        # 1) Collect chunks until there is a segment, or the text has ended.
        waiting += chunk
        while len(waiting) >= segment_len or (is_end and waiting):
            ids_t = torch.tensor(waiting[:segment_len], device=model.device)
            waiting = waiting[segment_len:]
            # 2) Score it, from the cache and the logits after the segment before it.
            if cp_group is None:
                nats, logits_1v, cache = _score_segment(model, ids_t, last_logits_1v, cache)
            else:
                nats, logits_1v, cache = _score_shared_segment(model, ids_t, last_logits_1v, cache, cp_group)
            # 3) Add it up; the first token of a text is not predicted.
            predicted += len(ids_t) - (last_logits_1v is None)
            total += nats
            read += len(ids_t)
            last_logits_1v = logits_1v
            yield TextScore(total, predicted, read)


@torch.no_grad()
def _score_segment(
    model: MambaLM, ids_t: Tensor, last_logits_1v: Tensor | None, cache: LMCache | None
) -> tuple[float, Tensor, LMCache]:
    """Score one segment, from the logits and cache after the segment before it.

    Returns:
        The negative log-likelihood, and the logits and cache after this segment.
    """
    output = model(ids_t.unsqueeze(0), cache, labels=ids_t.unsqueeze(0), logits="last")
    assert output.logits is not None
    assert output.nats is not None
    first = 0.0 if last_logits_1v is None else cross_entropy_sum(last_logits_1v, ids_t[:1]).item()
    return first + output.nats.item(), output.logits[:, 0], output.cache


@torch.no_grad()
def _score_shared_segment(
    model: MambaLM, ids_t: Tensor, last_logits_1v: Tensor | None, cache: LMCache | None, cp_group: ContextParallelGroup
) -> tuple[float, Tensor, LMCache]:
    """Score one segment, a part of it on each rank; arguments and results are those of `_score_segment`.

    The likelihood is that of this rank's part, the cache that of the whole segment. Only the last rank has the logits
    after the segment, and predicts the first token of the next.
    """
    is_last = cp_group.cp_rank + 1 == cp_group.size
    # A short segment is computed on every rank, and counted by the last.
    if len(ids_t) // cp_group.size < _min_part_len(model):
        nats, logits_1v, cache = _score_segment(model, ids_t, last_logits_1v, cache)
        return nats if is_last else 0.0, logits_1v, cache
    begin, end = cp_group.part_bounds(len(ids_t))
    targets_t = ids_t.roll(-1)
    targets_t[-1] = IGNORED_LABEL
    output = model(
        ids_t[begin:end].unsqueeze(0),
        cache,
        targets=targets_t[begin:end].unsqueeze(0),
        logits="last",
        context=SequencePart(cp_group, cp_group.cp_rank > 0, not is_last),
    )
    assert output.logits is not None
    assert output.nats is not None
    first = 0.0
    if is_last and last_logits_1v is not None:
        first = cross_entropy_sum(last_logits_1v, ids_t[:1]).item()
    is_source = torch.tensor([is_last], device=model.device)
    cache = output.cache.with_tensors(cp_group.broadcast_rows(x, is_source) for x in output.cache.leaves())
    return first + output.nats.item(), output.logits[:, 0], cache


def _min_part_len(model: MambaLM) -> int:
    """Return the least number of tokens of a segment that a rank can compute: those of a convolution's window."""
    layers: Any = model.backbone.layers
    return max(getattr(layer.mixer.config, "d_conv", 1) for layer in layers)
