"""Evaluation during a run: bits per byte of the held-out text, those of the baselines, and a sample of text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.generation import generate
from anymamba.generation.tokenizers import Tokenizer
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM
from anymamba.training.config.sections import TextEvaluationSection
from anymamba.training.data.baselines import ORDER
from anymamba.training.data.batches import Batch, segments
from anymamba.training.data.shards import Corpus, Tokens
from anymamba.training.distributed.process_group import World

# A batch and the cache before it -> the summed loss of its targets, and the cache after it.
LossSum = Callable[[Batch, LMCache | None], tuple[Tensor, LMCache | None]]

_SEGMENT_LEN = 2048  # tokens per forward pass
_PROMPT_SOURCE_LEN = 256  # held-out tokens from which a prompt is taken
_MAX_PROMPT_CHARS = 32


class HeldOut(NamedTuple):
    """How well the held-out text is predicted."""

    bits_per_byte: float  # bits per byte of the model
    baselines: dict[str, float]  # bits per byte of simpler methods, by name


@torch.no_grad()
def score_held_out(loss_sum: LossSum, corpus: Corpus, world: World | None = None) -> HeldOut:
    """Score the held-out text, each document from a zero state; the ranks divide the documents between them.

    Nothing predicts the first token of a document, which therefore costs log2 of the vocabulary size, in bits.
    """
    tokens, nats, cache = corpus.held_out, 0.0, None
    world = world or World()
    ranges = _document_ranges(tokens, world.size)
    for batch in segments(tokens, _SEGMENT_LEN, *ranges[world.rank]):
        loss, cache = loss_sum(batch, cache)
        nats += loss.item()
    if world.size > 1:
        counts = [-(-(end - begin) // _SEGMENT_LEN) for begin, end in ranges]
        for _ in range(counts[world.rank], max(counts)):  # all ranks take part in each gathering of a sharded model
            (batch,) = segments(tokens, _SEGMENT_LEN, 0, min(_SEGMENT_LEN, tokens.total))
            loss_sum(batch, None)
        nats = world.all_reduce_sum(torch.tensor(nats, dtype=torch.float64), "to add up an evaluation").item()
    nats += int((tokens.lengths > 0).sum()) * math.log(corpus.vocab_size)
    size = int(tokens.sizes.sum())
    baselines = {f"byte {ORDER}-gram": corpus.ngram_bits / size, "xz -9": 8 * corpus.xz_bytes / size}
    return HeldOut(nats / math.log(2) / size, baselines)


def _document_ranges(tokens: Tokens, count: int) -> list[tuple[int, int]]:
    """Return begin and end of `count` ranges of whole documents with about the same number of tokens."""
    ends = tokens.lengths.cumsum(0)
    cuts = [0]
    for i in range(1, count):
        document = int(torch.searchsorted(ends, tokens.total * i // count))
        cuts.append(max(cuts[-1], int(ends[document]) if document < len(ends) else tokens.total))
    return list(zip(cuts, [*cuts[1:], tokens.total], strict=True))


def default_prompt(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """Return the first words of the held-out text, or a space if none of them can be printed."""
    tokens = corpus.held_out
    text = tokenizer.decode(tokens.read(0, min(_PROMPT_SOURCE_LEN, tokens.total)).tolist())
    words = " ".join("".join(x if x.isprintable() and x != "\ufffd" else " " for x in text).split())
    if len(words) > _MAX_PROMPT_CHARS:
        words = words[: _MAX_PROMPT_CHARS + 1].rpartition(" ")[0] or words[:_MAX_PROMPT_CHARS]
    return words or " "


def sample_text(model: MambaLM, tokenizer: Tokenizer, prompt: str, config: TextEvaluationSection, seed: int) -> str:
    """Return a prompt with the model's continuation, or nothing if the config asks for no sample."""
    ids = tokenizer.encode(prompt, add_special_tokens=True)
    if not ids or not config.sample_tokens:
        return ""
    ids_bt = torch.tensor([ids], device=model.device)
    output = generate(
        model, ids_bt, config.sample_tokens, temperature=config.temperature, seed=seed, stop=tokenizer.end
    )
    return tokenizer.decode([*ids, *output.rows()[0]])
