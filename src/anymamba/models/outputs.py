"""Which hidden states and labels belong together: the last real token of a row, and the label of the next one.

Letters: b batch, t time, d d_model, z packed sequences.

§ What a language model returns for a sequence.

Letters: b batch, t time, d d_model, v padded vocabulary, z packed sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anymamba.core.layout import Padding
from anymamba.models.cache import LMCache
from anymamba.models.inputs import check_labels
from anymamba.models.loss import IGNORED_LABEL


class LMOutput(NamedTuple):
    """The model's output for a sequence.

    Attributes:
        logits: of the token that follows each input token, (b, t, v); (b, 1, v) or (z, 1, v) for the last tokens only;
            None if they were not asked for.
        loss: mean negative log-likelihood of the labels, if there were any.
        cache: the cache to continue from.
        nats: total negative log-likelihood of the labels, if there were any.
        hidden_states: the residual stream after each requested pass, (b, t, d) each.
    """

    logits: Float[Tensor, "z t v"] | None
    loss: Float[Tensor, ""] | None
    cache: LMCache
    nats: Float[Tensor, ""] | None = None
    hidden_states: tuple[Float[Tensor, "b t d"], ...] = ()


def in_rows(output: LMOutput, rows: int, logits: str) -> LMOutput:
    """The output of one packed row, split into the original rows; logits of last tokens stay one per sequence."""
    hidden = tuple(x.view(rows, -1, x.shape[2]) for x in output.hidden_states)
    if logits != "all" or output.logits is None:
        return output._replace(hidden_states=hidden)
    return output._replace(logits=output.logits.view(rows, -1, output.logits.shape[2]), hidden_states=hidden)


def last_hidden(hidden_btd: Tensor, cu_seqlens: Tensor | None, padding: Padding | None) -> Tensor:
    """The hidden state of the last real token of each row, (b, 1, d), or packed sequence, (z, 1, d)."""
    if cu_seqlens is not None:
        return hidden_btd[0, cu_seqlens[1:].long() - 1].unsqueeze(1)
    if padding is None:
        return hidden_btd[:, -1:]
    last_b1 = (padding.lengths - 1).clamp(min=0).unsqueeze(1)
    if padding.order is not None:
        last_b1 = padding.order.gather(1, last_b1)
    return hidden_btd.gather(1, last_b1.unsqueeze(-1).expand(-1, 1, hidden_btd.shape[2]))


def find_targets(
    shape: tuple[int, ...],
    device: torch.device,
    labels: Tensor | None,
    targets: Tensor | None,
    cu_seqlens: Tensor | None,
    padding: Padding | None,
) -> Tensor | None:
    """The target of each position's logits, (b·t,)."""
    if labels is not None and targets is not None:
        raise ValueError("MambaLM: labels and targets exclude each other, got both")
    for name, given in (("labels", labels), ("targets", targets)):
        if given is not None:
            check_labels(name, given, shape, device)
    found = targets if labels is None else _next_labels(labels, cu_seqlens, padding)
    return None if found is None else found.flatten()


def _next_labels(labels_bt: Tensor, cu_seqlens: Tensor | None, padding: Padding | None) -> Tensor:
    """The label of the next real token of each position's sequence, (b, t)."""
    if padding is not None:
        if padding.order is not None:
            labels_bt = labels_bt.gather(1, padding.order)
        labels_bt = labels_bt.masked_fill(~padding.front, IGNORED_LABEL)
    targets_bt = F.pad(labels_bt[:, 1:], (0, 1), value=IGNORED_LABEL)
    if cu_seqlens is not None:
        targets_bt[0, cu_seqlens[1:].long() - 1] = IGNORED_LABEL
    if padding is None or padding.order is None:
        return targets_bt
    return torch.empty_like(targets_bt).scatter_(1, padding.order, targets_bt)
