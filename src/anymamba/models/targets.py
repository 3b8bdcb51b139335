"""Which hidden states and labels belong together: the last real token of a row, and the label of the next one.

Letters: b batch, t time, d d_model, z packed sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.ground.padding import Padding
from anymamba.models.checks import expect_labels
from anymamba.models.loss import IGNORED_LABEL


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
            expect_labels(name, given, shape, device)
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
