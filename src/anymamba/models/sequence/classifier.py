"""A classifier of whole sequences, and how a sequence becomes one vector.

    p = pool(stack(input(x)))        logits = head(p)

Letters: b batch, t time, d d_model, o output_size, z sequences: rows, or packed ones.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anymamba.blocks.block_inputs import flatten_packed_rows
from anymamba.core.checks import can_read_values
from anymamba.core.layout import Padding
from anymamba.models.inputs import check_classes, ids_or_embeddings
from anymamba.models.outputs import last_hidden
from anymamba.models.sequence.sequence_model import SequenceConfig, SequenceModel


class SequenceOutput(NamedTuple):
    """Output of a classifier or regressor.

    Attributes:
        logits: Logits of the classes, or predicted values, (z, o).
        loss: Mean loss over sequences, if labels were given.
    """

    logits: Float[Tensor, "z o"]
    loss: Float[Tensor, ""] | None


class SequenceClassifier(SequenceModel):
    """Classifier of sequences of tokens or vectors.

    model = SequenceClassifier(vocab_size=256, output_size=3, stack={"d_model": 64, "n_layer": 2})
    logits, loss = model(ids, labels=classes, mask=lengths)
    """

    MODEL_TYPE: ClassVar[str] = "anymamba_classifier"

    def build_head(self, config: SequenceConfig, factory: dict[str, Any]) -> None:
        """Create the projection to the classes, and the class token, if the pooling uses one."""
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
        """Return the logits or values of each sequence, and the loss.

        Args:
            x: Token ids, or vectors.
            labels: Class of each sequence, (z,); for a regressor, its target values (z, o).
            inputs_embeds: Embeddings, in place of token ids.
            cu_seqlens: Boundaries (0, ..., t) of sequences packed into a batch of one.
            seq_idx: For several packed rows, an integer per step: a sequence ends where it changes, and with its row.
            mask: For padded batches, True for real steps (b, t), or the lengths (b,). Padding is left out.

        Raises:
            ValueError: A shape, id or label is invalid.
            TypeError: A dtype is invalid.
        """
        reads_ids = self.config.vocab_size is not None
        x = ids_or_embeddings(type(self).__name__, "x", x, inputs_embeds, reads_ids=reads_ids)
        if seq_idx is not None:
            x, cu_seqlens = flatten_packed_rows(type(self).__name__, x, seq_idx, cu_seqlens, mask)
        logits = self.head(self.pool(x, cu_seqlens=cu_seqlens, mask=mask))
        return SequenceOutput(logits, None if labels is None else self.loss(logits, labels))

    def pool(self, x: Tensor, *, cu_seqlens: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the vector (z, d) that represents each sequence; raise `ValueError` for a row without a real step."""
        inputs, padding = self.embed_inputs(x, cu_seqlens, mask)
        check_real_steps(type(self).__name__, padding)
        if self.config.pooling == "class_token":
            inputs, cu_seqlens, padding = _append_row(inputs, self.class_token, cu_seqlens, padding)
        hidden = self.backbone(inputs, cu_seqlens=cu_seqlens, mask=padding)
        if self.config.pooling == "mean":
            return mean_of_sequences(hidden, cu_seqlens, padding)
        return last_hidden(hidden, cu_seqlens, padding).squeeze(1)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of the classes."""
        check_classes("SequenceClassifier", labels, logits.shape[:1], logits.shape[1])
        return F.cross_entropy(logits.float() if logits.dtype.itemsize < 4 else logits, labels.long())


def check_real_steps(where: str, padding: Padding | None) -> None:
    """Raise `ValueError` for a row of padding only. Checked only where that is cheap, and not while tracing."""
    if padding is not None and can_read_values(padding.lengths) and bool((padding.lengths == 0).any()):
        row = padding.lengths.tolist().index(0)
        raise ValueError(f"{where}: every row must have a real step, got only padding in row {row}")


def mean_of_sequences(hidden_btd: Tensor, cu_seqlens: Tensor | None, padding: Padding | None) -> Tensor:
    """Return the mean over the real steps of each row or packed sequence, (z, d); the padding must be zero."""
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff()
        sequence_t = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        sums = hidden_btd.new_zeros(len(lengths), hidden_btd.shape[2]).index_add(0, sequence_t, hidden_btd[0])
        return sums / lengths.unsqueeze(1)
    if padding is None:
        return hidden_btd.mean(1)
    return hidden_btd.sum(1) / padding.lengths.unsqueeze(1)


def _append_row(
    x: Tensor, row_d: Tensor, cu_seqlens: Tensor | None, padding: Padding | None
) -> tuple[Tensor, Tensor | None, Padding | None]:
    """Append a row to each sequence, after its last real step; return the new boundaries or padding, too."""
    if cu_seqlens is not None:
        z, t = cu_seqlens.shape[0] - 1, x.shape[1]
        sequence_t = torch.bucketize(torch.arange(t, device=x.device), cu_seqlens[1:].long(), right=True)
        both = torch.cat([x[0], row_d.expand(z, -1).to(x.dtype)])
        ends = cu_seqlens[1:].long() + torch.arange(z, device=x.device)
        index = torch.cat([torch.arange(t, device=x.device) + sequence_t, ends])
        longer = cu_seqlens + torch.arange(z + 1, device=x.device, dtype=cu_seqlens.dtype)
        return both[index.argsort()].unsqueeze(0), longer, None
    last = row_d.to(x.dtype).expand(x.shape[0], 1, -1)
    if padding is None:
        return torch.cat([x, last], 1), None, None
    x = torch.cat([padding.compact(x), torch.zeros_like(last)], 1)
    index = padding.lengths.view(-1, 1, 1).expand_as(last)
    b, t, _ = x.shape
    return x.scatter(1, index, last), None, Padding.from_mask("SequenceClassifier", padding.lengths + 1, b, t, x.device)
