"""Outputs of a language model, and the target of each position: the label of the next real token of its sequence.

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
    """Output of a language model for a sequence.

    Attributes:
        logits: Logits of the token that follows each input token, (b, t, v); (b, 1, v) or (z, 1, v) for the last tokens
            only; None if they were not requested.
        loss: Mean negative log-likelihood of the labels, if there were any.
        cache: Cache to continue from.
        nats: Total negative log-likelihood of the labels, if there were any.
        hidden_states: Residual stream after each requested pass, (b, t, d) each.
    """

    logits: Float[Tensor, "z t v"] | None
    loss: Float[Tensor, ""] | None
    cache: LMCache
    nats: Float[Tensor, ""] | None = None
    hidden_states: tuple[Float[Tensor, "b t d"], ...] = ()


def unflatten_packed_rows(output: LMOutput, rows: int, logits: str) -> LMOutput:
    """Return the output of one packed row as the original rows; logits of last tokens stay one per sequence."""
    hidden = tuple(x.view(rows, -1, x.shape[2]) for x in output.hidden_states)
    if logits != "all" or output.logits is None:
        return output._replace(hidden_states=hidden)
    return output._replace(logits=output.logits.view(rows, -1, output.logits.shape[2]), hidden_states=hidden)


def last_hidden(hidden_btd: Tensor, cu_seqlens: Tensor | None, padding: Padding | None) -> Tensor:
    """Return the hidden state of the last real token of each row, (b, 1, d), or packed sequence, (z, 1, d)."""
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
    """Return the target of the logits at each position, (b·t,); None without labels or targets."""
    if labels is not None and targets is not None:
        raise ValueError("MambaLM: labels cannot be combined with targets, got both")
    for name, tensor in (("labels", labels), ("targets", targets)):
        if tensor is not None:
            check_labels(name, tensor, shape, device)
    if labels is not None:
        targets = _shift_labels(labels, cu_seqlens, padding)
    return None if targets is None else targets.flatten()


def _shift_labels(labels_bt: Tensor, cu_seqlens: Tensor | None, padding: Padding | None) -> Tensor:
    """Return the label of the next real token in the sequence of each position, (b, t)."""
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
