"""How likely a model finds a text, streamed through fixed memory.

Letters: t time, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.generation.prefill import SEGMENT_LEN
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM
from anymamba.models.loss import logits_nats


class Likelihood(NamedTuple):
    """What a text has cost so far.

    Attributes:
        nats: negative log-likelihood of the tokens that were predicted.
        predicted: how many tokens that is: all but the first.
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
    first = 0.0 if before is None else logits_nats(before, ids[:1]).item()
    return first + output.nats.item(), output.logits[:, 0], output.cache


def likelihood(model: MambaLM, tokens: Iterable[list[int]], segment_len: int = SEGMENT_LEN) -> Iterator[Likelihood]:
    """Score a text that comes in pieces; memory depends neither on their number nor on their total length.

    Args:
        model: the language model.
        tokens: pieces of one text, each a list of token ids.
        segment_len: tokens that are computed at once.

    Yields:
        The cost so far, after each segment.
    """
    waiting: list[int] = []
    total, predicted, read = 0.0, 0, 0
    before, cache = None, None
    for piece, last in _with_end(tokens):
        waiting += piece
        while len(waiting) >= segment_len or (last and waiting):
            ids = torch.tensor(waiting[:segment_len], device=model.device)
            waiting = waiting[segment_len:]
            predicted += len(ids) - (before is None)
            nats, before, cache = _segment_nats(model, ids, before, cache)
            total, read = total + nats, read + len(ids)
            yield Likelihood(total, predicted, read)


def _with_end(pieces: Iterable[list[int]]) -> Iterator[tuple[list[int], bool]]:
    for piece in pieces:
        yield piece, False
    yield [], True
