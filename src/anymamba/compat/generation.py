"""The official way to generate: states in `InferenceParams`, and `generate` on anything that takes them.

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
    """The states of all layers, and how far their sequences are."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Start again: at offset 0 the kept states are overwritten."""
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


@dataclass
class DecoderOutput:
    """What was generated.

    Attributes:
        sequences: prompts and new tokens, (b, t).
        scores: the logits that each new token was chosen from, each (b, v), if asked for.
    """

    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None


def sample(logits: Tensor, top_k: int = 1, top_p: float = 0.0, min_p: float = 0.0, temperature: float = 1.0) -> Tensor:
    """Choose a token for each row of logits (b, v): the likeliest for `top_k` = 1, else drawn by torch's generator.

    Args:
        logits: (b, v).
        top_k: draw from this many; 0: from all.
        top_p: draw from the likeliest that together reach this probability; 0: from all.
        min_p: draw from those at least this many times as likely as the likeliest.
        temperature: the logits are divided by it.
    """
    if top_k == 1:
        return logits.argmax(-1)
    sampling = Sampling(temperature=temperature, top_k=top_k or None, top_p=top_p or 1.0, min_p=min_p)
    return sample_tokens(logits, sampling, torch.rand(logits.shape[0]).tolist()).to(logits.device)


def modify_logit_for_repetition_penalty(
    logits: Tensor, prev_output_tokens: Tensor, repetition_penalty: float = 1.0
) -> Tensor:
    """Make tokens (b, t) that a row had before less likely: divide their logits, or multiply those below zero."""
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
        input_ids: prompts.
        model: takes `(ids, position_ids=, inference_params=, num_last_tokens=)` and returns `.logits`.
        max_length: tokens of a sequence, including its prompt.
        top_k: as for `sample`, like the next three.
        top_p: of likely tokens.
        min_p: of likely tokens.
        temperature: of draws.
        repetition_penalty: above 1, makes tokens that a row had before less likely.
        eos_token_id: ends a text.
        teacher_outputs: tokens that are taken instead of chosen ones, (b, t).
        vocab_size: how many of the logits count.
        cg: of the official package: capture a graph. Our models compile their steps without asking.
        enable_timing: print how long it took.
        output_scores: keep the logits.
        streamer: `put` is called with every tensor of tokens, `end` at the end.
    """
    began = time.perf_counter()
    forced = 0 if teacher_outputs is None else teacher_outputs.shape[1]
    step = getattr(model, "_stepper", _stepper)(model, max_length, input_ids.shape[0])
    scores: list[Tensor] = []
    sequences, latest = input_ids, input_ids
    if streamer is not None:
        streamer.put(input_ids.cpu())
    while sequences.shape[1] < max_length:
        logits = step(latest)
        logits = logits if vocab_size is None else logits[..., :vocab_size]
        if output_scores:
            scores.append(logits.clone())
        at = sequences.shape[1]
        if teacher_outputs is not None and at < forced:
            latest = teacher_outputs[:, at : at + 1]
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
        print(f"Prompt processing + decoding time: {(time.perf_counter() - began) * 1000:.0f}ms")
    return DecoderOutput(sequences, tuple(scores) if output_scores else None)


def _stepper(model: Any, max_length: int, batch_size: int) -> Callable[[Tensor], Tensor]:
    """Runs a model over the next tokens (b, t) of its sequences; returns the logits (b, v) after the last."""
    params = InferenceParams(max_seqlen=max_length, max_batch_size=batch_size)

    def step(ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape) + params.seqlen_offset
        output = model(ids, position_ids=places, inference_params=params, num_last_tokens=1)
        params.seqlen_offset += ids.shape[1]
        return output.logits[:, -1]

    return step


class GenerationMixin:
    """`generate` for a model that takes `inference_params`."""

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """The states of a fresh start, defined by the model."""
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
        """`decode`: the sequences, or with `return_dict_in_generate` all of its output."""
        options = (max_length, top_k, top_p, min_p, temperature)
        output = decode(input_ids, self, *options, output_scores=output_scores, **kwargs)
        return output if return_dict_in_generate else output.sequences
