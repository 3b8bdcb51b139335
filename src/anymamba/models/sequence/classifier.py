"""Models with one answer for a whole sequence: its class, or some numbers.

    p = pool(stack(input(x)))        logits = head(p)

Letters: b batch, t time, d d_model, o output_size, z sequences: rows, or packed ones.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anymamba.core.checks import can_read_values
from anymamba.core.layout import Padding
from anymamba.models.inputs import check_classes, flatten_packed_rows, ids_or_embeddings
from anymamba.models.outputs import last_hidden
from anymamba.models.sequence.sequence_model import SequenceConfig, SequenceModel


class SequenceOutput(NamedTuple):
    """A model's answer for each sequence.

    Attributes:
        logits: of each class, or the numbers, (z, o).
        loss: the mean over sequences, if labels were given.
    """

    logits: Float[Tensor, "z o"]
    loss: Float[Tensor, ""] | None


class SequenceClassifier(SequenceModel):
    """A class for each sequence of tokens or vectors.

    model = SequenceClassifier(vocab_size=256, output_size=3, stack={"d_model": 64, "n_layer": 2})
    logits, loss = model(ids, labels=classes, mask=lengths)
    """

    MODEL_TYPE: ClassVar[str] = "anymamba_classifier"

    def build_head(self, config: SequenceConfig, factory: dict[str, Any]) -> None:
        """The projection to the classes, and the row that gathers what the head reads, if there is one."""
        if config.pooling == "class_token":
            self.class_token = nn.Parameter(torch.empty(config.d_model, **factory))
            nn.init.normal_(self.class_token, std=0.02)
        self.head = nn.Linear(config.d_model, config.output_size, **factory)

    def forward(
        self,
        x: Int[Tensor, "b t"] | Float[Tensor, "b t c"] | None = None,
        labels: Tensor | None = None,
        *,
        inputs_embeds: Float[Tensor, "b t d"] | None = None,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        seq_idx: Int[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
    ) -> SequenceOutput:
        """Give an answer for each sequence.

        Args:
            x: token ids, or vectors.
            labels: the class of each sequence, (z,); of a regressor, its numbers (z, o).
            inputs_embeds: embeddings, in place of token ids.
            cu_seqlens: boundaries (0, ..., t) of sequences packed into a batch of one.
            seq_idx: for several packed rows, a number for every step: a sequence ends where it changes, and with its
                row.
            mask: for padded batches, True for real steps (b, t), or the lengths (b,). Padding is left out.

        Raises:
            ValueError: shapes, ids or labels that do not fit.
            TypeError: dtypes that do not fit.
        """
        reads_ids = self.config.vocab_size is not None
        x = ids_or_embeddings(type(self).__name__, "x", x, inputs_embeds, reads_ids=reads_ids)
        if seq_idx is not None:
            x, cu_seqlens = flatten_packed_rows(type(self).__name__, x, seq_idx, cu_seqlens, mask)
        logits = self.head(self.pooled(x, cu_seqlens=cu_seqlens, mask=mask))
        return SequenceOutput(logits, None if labels is None else self.loss(logits, labels))

    def pooled(self, x: Tensor, *, cu_seqlens: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The vector (z, d) that represents each sequence.

        Raises:
            ValueError: a row without a real step.
        """
        inputs, padding = self.embed_inputs(x, cu_seqlens, mask)
        check_real_steps(type(self).__name__, padding)
        if self.config.pooling == "class_token":
            inputs, cu_seqlens, padding = _with_last(inputs, self.class_token, cu_seqlens, padding)
        hidden = self.backbone(inputs, cu_seqlens=cu_seqlens, mask=padding)
        if self.config.pooling == "mean":
            return mean_of_sequences(hidden, cu_seqlens, padding)
        return last_hidden(hidden, cu_seqlens, padding).squeeze(1)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean negative log-likelihood of the classes.

        Raises:
            TypeError: labels that are not whole numbers.
            ValueError: labels of another shape, or that are not classes.
        """
        check_classes("SequenceClassifier", labels, logits.shape[:1], logits.shape[1])
        return F.cross_entropy(logits.float() if logits.dtype.itemsize < 4 else logits, labels.long())


def check_real_steps(where: str, padding: Padding | None) -> None:
    """Refuse a row of padding only, which nothing represents. Checked only where that is cheap, and not in a trace.

    Raises:
        ValueError: there is one.
    """
    if padding is not None and can_read_values(padding.lengths) and bool((padding.lengths == 0).any()):
        row = padding.lengths.tolist().index(0)
        raise ValueError(f"{where}: every row must have a real step, got only padding in row {row}")


def mean_of_sequences(hidden_btd: Tensor, cu_seqlens: Tensor | None, padding: Padding | None) -> Tensor:
    """The mean over the real steps of each row or packed sequence, (z, d); outputs at the padding are zero."""
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff()
        number = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        sums = hidden_btd.new_zeros(len(lengths), hidden_btd.shape[2]).index_add(0, number, hidden_btd[0])
        return sums / lengths.unsqueeze(1)
    if padding is None:
        return hidden_btd.mean(1)
    return hidden_btd.sum(1) / padding.lengths.unsqueeze(1)


def _with_last(
    x: Tensor, row_d: Tensor, cu_seqlens: Tensor | None, padding: Padding | None
) -> tuple[Tensor, Tensor | None, Padding | None]:
    """A row after the last real step of each sequence, and the boundaries or lengths with it."""
    if cu_seqlens is not None:
        z, t = cu_seqlens.shape[0] - 1, x.shape[1]
        number = torch.bucketize(torch.arange(t, device=x.device), cu_seqlens[1:].long(), right=True)
        both = torch.cat([x[0], row_d.expand(z, -1).to(x.dtype)])
        ends = cu_seqlens[1:].long() + torch.arange(z, device=x.device)
        place = torch.cat([torch.arange(t, device=x.device) + number, ends])
        wider = cu_seqlens + torch.arange(z + 1, device=x.device, dtype=cu_seqlens.dtype)
        return both[place.argsort()].unsqueeze(0), wider, None
    last = row_d.to(x.dtype).expand(x.shape[0], 1, -1)
    if padding is None:
        return torch.cat([x, last], 1), None, None
    x = torch.cat([padding.compact(x), torch.zeros_like(last)], 1)
    place = padding.lengths.view(-1, 1, 1).expand_as(last)
    b, t, _ = x.shape
    return x.scatter(1, place, last), None, Padding.from_mask("SequenceClassifier", padding.lengths + 1, b, t, x.device)
