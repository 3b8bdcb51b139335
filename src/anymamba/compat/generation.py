"""Official generation: states in `InferenceParams`, and `generate` on any model that takes them.

Letters: b batch, t time, v vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anymamba.generation.sampling import Sampling, sample_tokens


@dataclass
class InferenceParams:
    """States of all layers, and the offset of their sequences."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Start again at offset 0, where states are overwritten."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


@dataclass
class DecoderOutput:
    """Generated sequences.

    Attributes:
        sequences: Prompts and new tokens, (b, t).
        scores: Logits that each new token was sampled from, each (b, v), if requested.
    """

    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None


def sample(logits: Tensor, top_k: int = 1, top_p: float = 0.0, min_p: float = 0.0, temperature: float = 1.0) -> Tensor:
    """Sample a token for each row of logits (b, v), the likeliest for `top_k` = 1, with torch's global generator.

    Args:
        logits: Logits, (b, v).
        top_k: Number of likeliest tokens to sample from; 0 for all.
        top_p: Probability that the likeliest tokens, from which one is sampled, must reach together; 0 for all.
        min_p: Least probability of a token to sample, relative to the likeliest one.
        temperature: Number that the logits are divided by.
    """
    if top_k == 1:
        return logits.argmax(-1)
    sampling = Sampling(temperature=temperature, top_k=top_k or None, top_p=top_p or 1.0, min_p=min_p)
    return sample_tokens(logits, sampling, torch.rand(logits.shape[0]).tolist()).to(logits.device)


def modify_logits_for_min_p_filtering(logits: Tensor, min_p: float) -> None:
    """Set logits (b, v) below `min_p` to -inf in place, unless it is not between 0 and 1."""
    if 0 < min_p < 1:
        logits.masked_fill_(logits < min_p, float("-inf"))


def modify_logits_for_top_k_filtering(logits: Tensor, top_k: int) -> None:
    """Set all but the `top_k` largest logits of each row of (b, v) to -inf in place."""
    logits.masked_fill_(logits < logits.topk(top_k).values[..., -1:], float("-inf"))


def modify_logits_for_top_p_filtering(logits: Tensor, top_p: float) -> None:
    """Set the logits (b, v) to -inf in place whose probabilities, with all smaller ones, reach at most 1 - `top_p`."""
    if 0 < top_p < 1:
        ascending, order = logits.sort()
        is_removed = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        logits.masked_fill_(is_removed.scatter(1, order, is_removed), float("-inf"))


def modify_logit_for_repetition_penalty(
    logits: Tensor, prev_output_tokens: Tensor, repetition_penalty: float = 1.0
) -> Tensor:
    """Make the previous tokens (b, t) of a row less likely: divide positive logits, multiply negative ones."""
    if repetition_penalty == 1:
        return logits
    score = logits.gather(1, prev_output_tokens)
    score = torch.where(score < 0, score * repetition_penalty, score / repetition_penalty)
    return logits.scatter(1, prev_output_tokens, score)


@torch.no_grad()
def decode(
    input_ids: Tensor,
    model: Any,
    max_length: int,
    top_k: int = 1,
    top_p: float = 0.0,
    min_p: float = 0.0,
    temperature: float = 1.0,
    repetition_penalty: float = 1.0,
    eos_token_id: int | None = None,
    teacher_outputs: Tensor | None = None,
    vocab_size: int | None = None,
    cg: bool = False,
    enable_timing: bool = False,
    output_scores: bool = False,
    streamer: Any = None,
) -> DecoderOutput:
    """Continue prompts (b, t) until they are `max_length` long, or all rows have reached `eos_token_id`.

    Args:
        input_ids: Prompts.
        model: Model that takes `(ids, position_ids=, inference_params=, num_last_tokens=)` and returns `.logits`.
        max_length: Length of a sequence, including its prompt.
        top_k: Number of likeliest tokens to sample from, as in `sample`.
        top_p: Probability of the tokens to sample from, as in `sample`.
        min_p: Least relative probability, as in `sample`.
        temperature: Temperature, as in `sample`.
        repetition_penalty: Factor above 1 that makes the previous tokens of a row less likely.
        eos_token_id: Token that ends a sequence.
        teacher_outputs: Tokens that replace the sampled ones, (b, t).
        vocab_size: Number of logits that are used.
        cg: Option of the official package to capture a CUDA graph; it has no effect here.
        enable_timing: Whether to print the elapsed time.
        output_scores: Whether to keep the logits.
        streamer: Object whose `put` is called with every tensor of tokens, and `end` at the end.
    """
    start_time = time.perf_counter()
    forced = 0 if teacher_outputs is None else teacher_outputs.shape[1]
    step = getattr(model, "_make_step", make_step)(model, max_length, input_ids.shape[0])
    scores: list[Tensor] = []
    sequences, latest = input_ids, input_ids
    if streamer is not None:
        streamer.put(input_ids.cpu())
    while sequences.shape[1] < max_length:
        logits = step(latest)
        logits = logits if vocab_size is None else logits[..., :vocab_size]
        if output_scores:
            scores.append(logits.clone())
        length = sequences.shape[1]
        if teacher_outputs is not None and length < forced:
            latest = teacher_outputs[:, length : length + 1]
        else:
            penalized = modify_logit_for_repetition_penalty(logits, sequences, repetition_penalty)
            latest = sample(penalized, top_k, top_p, min_p, temperature).unsqueeze(1)
        sequences = torch.cat([sequences, latest], dim=1)
        if streamer is not None:
            streamer.put(latest.cpu())
        if eos_token_id is not None and bool((latest == eos_token_id).all()):
            break
    if streamer is not None:
        streamer.end()
    if enable_timing:
        print(f"Prompt processing + decoding time: {(time.perf_counter() - start_time) * 1000:.0f}ms")
    return DecoderOutput(sequences, tuple(scores) if output_scores else None)


def make_step(model: Any, max_length: int, batch_size: int) -> Callable[[Tensor], Tensor]:
    """Return a function from the next tokens (b, t) of all sequences to the logits (b, v) after the last."""
    params = InferenceParams(max_seqlen=max_length, max_batch_size=batch_size)

    def step(ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape) + params.seqlen_offset
        output = model(ids, position_ids=positions, inference_params=params, num_last_tokens=1)
        params.seqlen_offset += ids.shape[1]
        return output.logits[:, -1]

    return step


class GenerationMixin:
    """Mixin with `generate`, for a model that takes `inference_params`."""

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """Return the states of an empty cache; the model defines it."""
        raise NotImplementedError

    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        min_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the sequences of `decode`, or with `return_dict_in_generate` all of its output."""
        options = (max_length, top_k, top_p, min_p, temperature)
        output = decode(input_ids, self, *options, output_scores=output_scores, **kwargs)
        return output if return_dict_in_generate else output.sequences
