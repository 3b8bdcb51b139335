"""What is evaluated while a run trains: bits per byte of held-out text, those of simpler methods, and a sample."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from anymamba.generation import generate
from anymamba.generation.tokenizers import Tokenizer
from anymamba.models.lm import MambaLM
from anymamba.training.config.sections import TextEvaluationSection
from anymamba.training.data.batches import segments
from anymamba.training.data.shards import Corpus, Tokens
from anymamba.training.distributed.process_group import Workers
from anymamba.training.evaluation.baselines import ORDER
from anymamba.training.tasks.lm_step import batch_loss_sum

_SEGMENT = 2048  # tokens that are computed at once
_LOOKED_AT = 256  # tokens of the held-out text that a prompt is taken from
_PROMPT = 32  # characters of a prompt, at most


class HeldOut(NamedTuple):
    """How well the held-out text is predicted.

    Attributes:
        bits_per_byte: of the model.
        neighbors: what simpler methods need for the same bytes, by name.
    """

    bits_per_byte: float
    neighbors: dict[str, float]


@torch.no_grad()
def evaluate(model: MambaLM, corpus: Corpus, dtype: torch.dtype, workers: Workers | None = None) -> HeldOut:
    """Score the held-out text, every document from a fresh start; workers divide the documents between them.

    Nothing predicts the first token of a document, so it costs as much as any: log2 of the vocabulary, in bits.
    """
    tokens, nats = corpus.held_out, 0.0
    workers = workers or Workers()
    shares, carried = _shares(tokens, workers.size), None
    for batch in segments(tokens, _SEGMENT, *shares[workers.rank]):
        cost, carried = batch_loss_sum(model, batch.to(model.device), carried, dtype)
        nats += cost.item()
    if workers.size > 1:
        counts = [-(-(end - begin) // _SEGMENT) for begin, end in shares]
        for _ in range(counts[workers.rank], max(counts)):  # all workers take part when a divided model is gathered
            (batch,) = segments(tokens, _SEGMENT, 0, min(_SEGMENT, tokens.total))
            batch_loss_sum(model, batch.to(model.device), None, dtype)
        nats = workers.sum(torch.tensor(nats, dtype=torch.float64), "to add up an evaluation").item()
    nats += int((tokens.lengths > 0).sum()) * math.log(corpus.vocab_size)
    size = int(tokens.sizes.sum())
    neighbors = {"xz -9": 8 * corpus.xz_bytes / size}
    if corpus.ngram_bits is not None:
        neighbors = {f"byte {ORDER}-gram": corpus.ngram_bits / size, **neighbors}
    return HeldOut(nats / math.log(2) / size, neighbors)


def _shares(tokens: Tokens, count: int) -> list[tuple[int, int]]:
    """Begin and end of `count` stretches of whole documents, of about the same length."""
    ends = tokens.lengths.cumsum(0)
    cuts = [0]
    for i in range(1, count):
        at = int(torch.searchsorted(ends, tokens.total * i // count))
        cuts.append(max(cuts[-1], int(ends[at]) if i and at < len(ends) else tokens.total))
    return list(zip(cuts, [*cuts[1:], tokens.total], strict=True))


def beginning(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """The first words of the held-out text, or a space if none can be printed."""
    tokens = corpus.held_out
    text = tokenizer.decode(tokens.read(0, min(_LOOKED_AT, tokens.total)).tolist())
    words = " ".join("".join(x if x.isprintable() and x != "\ufffd" else " " for x in text).split())
    return (words if len(words) <= _PROMPT else words[: _PROMPT + 1].rpartition(" ")[0] or words[:_PROMPT]) or " "


def sample(model: MambaLM, tokenizer: Tokenizer, prompt: str, config: TextEvaluationSection, seed: int) -> str:
    """The prompt and what the model writes after it."""
    ids = tokenizer.encode(prompt, add_special_tokens=True)
    if not ids or not config.sample_tokens:
        return ""
    ids_bt = torch.tensor([ids], device=model.device)
    new = generate(model, ids_bt, config.sample_tokens, temperature=config.temperature, seed=seed, stop=tokenizer.end)
    return tokenizer.decode([*ids, *new.rows()[0]])
