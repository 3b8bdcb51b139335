"""A masked language model on the bidirectional stack, and the text embeddings that it computes.

    logits = embeddingᵀ stack(embedding[ids]) + bias        text embedding: the mean over the tokens, scaled to length 1

Letters: b batch, t time, d d_model, v vocabulary, z sequences: rows, or packed ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anymamba.blocks.block_inputs import flatten_packed_rows
from anymamba.core.io import read_json
from anymamba.models.inputs import check_classes, ids_or_embeddings
from anymamba.models.loss import IGNORED_LABEL, cross_entropy_sum
from anymamba.models.sequence.classifier import check_real_steps, mean_of_sequences
from anymamba.models.sequence.sequence_model import SequenceConfig, SequenceModel


class MaskedLMOutput(NamedTuple):
    """Output of a masked language model.

    Attributes:
        logits: Logits of the token at each position, (b, t, v).
        loss: Mean negative log-likelihood of the labels that are not ignored, if labels were given; 0 if all are.
    """

    logits: Float[Tensor, "b t v"]
    loss: Float[Tensor, ""] | None


class MaskedLM(SequenceModel):
    """Model that reads in both directions and predicts the token at each position.

    model = MaskedLM(vocab_size=257, bidirectional=True, stack={"d_model": 64, "n_layer": 4})
    hidden, labels = mask_tokens(ids, mask_id=256)
    loss = model(hidden, labels).loss
    vectors = model.embed(ids, mask=lengths)
    """

    MODEL_TYPE: ClassVar[str] = "anymamba_masked_lm"

    def check_config(self, config: SequenceConfig) -> None:
        """Raise `ValueError` for a config that is not for tokens, or not bidirectional."""
        if config.vocab_size is None or not config.bidirectional:
            received = f"vocab_size = {config.vocab_size}, bidirectional = {config.bidirectional}"
            raise ValueError(f"MaskedLM: vocab_size and bidirectional=True must be given, got {received}")

    def build_head(self, config: SequenceConfig, factory: dict[str, Any]) -> None:
        """Create one bias per token; the weight of the head is the embedding."""
        self.bias = nn.Parameter(torch.zeros(config.vocab_size or 0, **factory))

    def forward(
        self,
        input_ids: Int[Tensor, "b t"] | None = None,
        labels: Int[Tensor, "b t"] | None = None,
        *,
        inputs_embeds: Float[Tensor, "b t d"] | None = None,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        seq_idx: Int[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
    ) -> MaskedLMOutput:
        """Return the logits of every position, and the loss.

        Args:
            input_ids: Token ids, some of them masked.
            labels: True tokens where they were masked, -100 elsewhere; each is compared with the logits at its own
                position.
            inputs_embeds: Embeddings, in place of token ids.
            cu_seqlens: Boundaries (0, ..., t) of sequences packed into a batch of one.
            seq_idx: For several packed rows, an integer per token: a sequence ends where it changes, and with its row.
            mask: For padded batches, True for real tokens (b, t), or the lengths (b,); labels at the padding are
                ignored.

        Raises:
            TypeError: The labels are not integers.
            ValueError: A shape, id or label is invalid.
        """
        x = ids_or_embeddings("MaskedLM", "input_ids", input_ids, inputs_embeds, reads_ids=True)
        if seq_idx is None:
            return self._output(x, labels, cu_seqlens, mask)
        row, bounds = flatten_packed_rows("MaskedLM", x, seq_idx, cu_seqlens, mask)
        if labels is not None:
            check_classes("MaskedLM", labels, x.shape[:2], len(self.bias), ignored=IGNORED_LABEL)
        output = self._output(row, None if labels is None else labels.reshape(row.shape[:2]), bounds, None)
        return output._replace(logits=output.logits.reshape(*x.shape[:2], -1))

    def _output(
        self, x: Tensor, labels: Tensor | None, cu_seqlens: Tensor | None, mask: Tensor | None
    ) -> MaskedLMOutput:
        hidden, padding = self.encode(x, cu_seqlens=cu_seqlens, mask=mask)
        logits = F.linear(hidden, self.embedding.weight, self.bias)
        if labels is None:
            return MaskedLMOutput(logits, None)
        real = None if padding is None else padding.real_mask()
        check_classes("MaskedLM", labels, x.shape[:2], len(self.bias), ignored=IGNORED_LABEL, counts=real)
        if real is not None:
            labels = labels.masked_fill(~real, IGNORED_LABEL)
        nats = cross_entropy_sum(logits.flatten(0, 1), labels.flatten())
        return MaskedLMOutput(logits, nats / (labels != IGNORED_LABEL).sum().clamp(min=1))

    def embed(
        self,
        input_ids: Int[Tensor, "b t"],
        *,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        seq_idx: Int[Tensor, "b t"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "z d"]:
        """Return a vector of length 1 for each sequence: the mean over its real tokens, normalized.

        Raises:
            ValueError: A shape or id is invalid, or a row has only padding.
        """
        if seq_idx is not None:
            input_ids, cu_seqlens = flatten_packed_rows("MaskedLM", input_ids, seq_idx, cu_seqlens, mask)
        hidden, padding = self.encode(input_ids, cu_seqlens=cu_seqlens, mask=mask)
        check_real_steps("MaskedLM.embed", padding)
        return F.normalize(mean_of_sequences(hidden, cu_seqlens, padding), dim=-1)


def is_masked_lm(directory: Path) -> bool:
    """Return whether the config in a directory belongs to a `MaskedLM`."""
    file = directory / "config.json"
    return file.is_file() and read_json(file).get("model_type") == MaskedLM.MODEL_TYPE


def mask_tokens(
    input_ids: Int[Tensor, "b t"], mask_id: int, *, share: float = 0.15, generator: torch.Generator | None = None
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """Mask random tokens for a masked language model to predict.

    Args:
        input_ids: Token ids.
        mask_id: Token that replaces a masked one.
        share: Fraction of the tokens to mask.
        generator: Random generator.

    Returns:
        The ids with some masked, and labels: the true tokens there, -100 elsewhere.

    Raises:
        ValueError: The fraction is out of range.
    """
    if not 0 < share <= 1:
        raise ValueError(f"mask_tokens: share must be above 0 and at most 1, got {share}")
    is_masked = torch.rand(input_ids.shape, generator=generator, device=input_ids.device) < share
    return input_ids.masked_fill(is_masked, mask_id), input_ids.masked_fill(~is_masked, IGNORED_LABEL)
