"""How likely a model finds a text, streamed through fixed memory.

Letters: t time, v vocabulary, d d_model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.generation.prefill import SEGMENT_LEN
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM
from anymamba.models.loss import head_nats


class Likelihood(NamedTuple):
    """What a text has cost so far.

    Attributes:
        nats: negative log-likelihood of the tokens that were predicted.
        predicted: how many these are: all but the first.
        read: tokens the model has read.
    """

    nats: float
    predicted: int
    read: int


@torch.no_grad()
def _segment_nats(
    model: MambaLM, ids: Tensor, hidden_d: Tensor | None, cache: LMCache | None
) -> tuple[float, Tensor, LMCache]:
    """The cost of one segment (t,), given the hidden state and cache behind the one before."""
    hidden_1td, new = model.backbone(ids.unsqueeze(0), cache)
    before_td = hidden_1td[0, :-1] if hidden_d is None else torch.cat([hidden_d.unsqueeze(0), hidden_1td[0, :-1]])
    targets = ids[1:] if hidden_d is None else ids
    return head_nats(model.lm_head, before_td, targets).item(), hidden_1td[0, -1], new


def likelihood(model: MambaLM, tokens: Iterable[list[int]], segment_len: int = SEGMENT_LEN) -> Iterator[Likelihood]:
    """Score a text that comes in pieces; memory depends on neither their number nor their lengths together.

    Args:
        model: the language model.
        tokens: pieces of one text, each a list of token ids.
        segment_len: tokens that are computed at once.

    Yields:
        The cost so far, after each segment.
    """
    waiting: list[int] = []
    total, predicted, read = 0.0, 0, 0
    hidden, cache = None, None
    for piece, last in _with_end(tokens):
        waiting += piece
        while len(waiting) >= segment_len or (last and waiting):
            ids = torch.tensor(waiting[:segment_len], device=model.device)
            waiting = waiting[segment_len:]
            predicted += len(ids) - (hidden is None)
            nats, hidden, cache = _segment_nats(model, ids, hidden, cache)
            total, read = total + nats, read + len(ids)
            yield Likelihood(total, predicted, read)


def _with_end(pieces: Iterable[list[int]]) -> Iterator[tuple[list[int], bool]]:
    for piece in pieces:
        yield piece, False
    yield [], True
