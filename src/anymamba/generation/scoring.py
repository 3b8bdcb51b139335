"""How likely a model finds a text, streamed through fixed memory.

Letters: t time, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.core.context_parallel import ContextParallelGroup, SequencePart
from anymamba.generation.prefill import SEGMENT_LEN
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM
from anymamba.models.loss import IGNORED_LABEL, cross_entropy_sum


class Likelihood(NamedTuple):
    """What a text has cost so far.

    Attributes:
        nats: negative log-likelihood of the tokens that were predicted; of those that were predicted here, where
            several workers share the text.
        predicted: how many these are: all but the first.
        read: tokens the model has read.
    """

    nats: float
    predicted: int
    read: int


@torch.no_grad()
def _segment_nats(
    model: MambaLM, ids: Tensor, before: Tensor | None, cache: LMCache | None
) -> tuple[float, Tensor, LMCache]:
    """The cost of one segment (t,), given the logits (1, v) and cache after the one before; the same after it."""
    output = model(ids.unsqueeze(0), cache, labels=ids.unsqueeze(0), logits="last")
    assert output.logits is not None
    assert output.nats is not None
    first = 0.0 if before is None else cross_entropy_sum(before, ids[:1]).item()
    return first + output.nats.item(), output.logits[:, 0], output.cache


@torch.no_grad()
def _shared_nats(
    model: MambaLM, ids: Tensor, before: Tensor | None, cache: LMCache | None, cp_group: ContextParallelGroup
) -> tuple[float, Tensor, LMCache]:
    """`_segment_nats` of one segment, a part of it on each worker: the cost of the part here, the cache of the whole.

    The last worker has the logits after it, and predicts the first token of the next.
    """
    is_last = cp_group.cp_rank + 1 == cp_group.size
    if len(ids) // cp_group.size < _least_part(model):
        nats, before, cache = _segment_nats(model, ids, before, cache)
        return nats if is_last else 0.0, before, cache
    begin, end = cp_group.part_bounds(len(ids))
    targets = ids.roll(-1)
    targets[-1] = IGNORED_LABEL
    output = model(
        ids[begin:end].unsqueeze(0),
        cache,
        targets=targets[begin:end].unsqueeze(0),
        logits="last",
        context=SequencePart(cp_group, cp_group.cp_rank > 0, not is_last),
    )
    assert output.logits is not None
    assert output.nats is not None
    first = cross_entropy_sum(before, ids[:1]).item() if is_last and before is not None else 0.0
    here = torch.tensor([is_last], device=model.device)
    after = output.cache.with_tensors(cp_group.broadcast_rows(x, here) for x in output.cache.leaves())
    return first + output.nats.item(), output.logits[:, 0], after


def _least_part(model: MambaLM) -> int:
    """Tokens that a worker's part of a segment must have."""
    layers: Any = model.backbone.layers
    return max(getattr(layer.mixer.config, "d_conv", 1) for layer in layers)


def likelihood(
    model: MambaLM,
    tokens: Iterable[list[int]],
    segment_len: int = SEGMENT_LEN,
    cp_group: ContextParallelGroup | None = None,
) -> Iterator[Likelihood]:
    """Score a text that comes in pieces; memory depends neither on their number nor on their total length.

    Args:
        model: the language model.
        tokens: pieces of one text, each a list of token ids.
        segment_len: tokens that are computed at once, on each worker.
        cp_group: workers that share the text, all of which are given all of its tokens.

    Yields:
        The cost so far, after each segment.
    """
    waiting: list[int] = []
    total, predicted, read = 0.0, 0, 0
    before, cache = None, None
    segment_len *= 1 if cp_group is None else cp_group.size
    for piece, last in _with_end(tokens):
        waiting += piece
        while len(waiting) >= segment_len or (last and waiting):
            ids = torch.tensor(waiting[:segment_len], device=model.device)
            waiting = waiting[segment_len:]
            predicted += len(ids) - (before is None)
            if cp_group is None:
                nats, before, cache = _segment_nats(model, ids, before, cache)
            else:
                nats, before, cache = _shared_nats(model, ids, before, cache, cp_group)
            total, read = total + nats, read + len(ids)
            yield Likelihood(total, predicted, read)


def _with_end(pieces: Iterable[list[int]]) -> Iterator[tuple[list[int], bool]]:
    for piece in pieces:
        yield piece, False
    yield [], True
