"""Inside a language model: what each layer's block was given, and how likely each token of a text was.

Letters: b batch, t time, d d_model, v vocabulary, k likeliest tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.blocks.base import Block
from anymamba.models.lm import MambaLM


class Layer(NamedTuple):
    """A layer's block and what it was given.

    Attributes:
        block: the mixer.
        x: its input, after the layer's norm.
    """

    block: Block
    x: Float[Tensor, "b t d"]


def layers(model: MambaLM, input_ids: Int[Tensor, "b t"]) -> list[Layer]:
    """Run a model from a fresh start and keep the input of every block.

    `[dual_matrix(*layer) for layer in layers(model, ids)]` gives the matrices of all layers.
    """
    return _run(model, input_ids)[0]


class TokenScores(NamedTuple):
    """How likely a model finds each token of a text after those before it; the first is not predicted.

    Attributes:
        logprob: of the actual token, in nats.
        rank: how many tokens were likelier.
        entropy: of the whole distribution, in nats.
        best: log-probabilities of the likeliest tokens.
        best_ids: their ids.
    """

    logprob: Float[Tensor, "b t1"]
    rank: Int[Tensor, "b t1"]
    entropy: Float[Tensor, "b t1"]
    best: Float[Tensor, "b t1 k"]
    best_ids: Int[Tensor, "b t1 k"]


def token_scores(model: MambaLM, input_ids: Int[Tensor, "b t"], likeliest: int = 5) -> TokenScores:
    """Log-probabilities of a text's tokens from the second on, in float32 or wider, and what was likely instead.

    Args:
        model: the language model.
        input_ids: the text.
        likeliest: how many of the likeliest tokens to return at each place.
    """
    return _run(model, input_ids, likeliest)[1]


def look_inside(model: MambaLM, input_ids: Int[Tensor, "b t"], likeliest: int = 5) -> tuple[list[Layer], TokenScores]:
    """`layers` and `token_scores` of one run."""
    return _run(model, input_ids, likeliest)


def _run(model: MambaLM, input_ids: Tensor, likeliest: int = 1) -> tuple[list[Layer], TokenScores]:
    found: list[Layer] = []

    def keep(block: Any, inputs: tuple[Any, ...]) -> None:
        found.append(Layer(block, inputs[0]))

    mixers: list[Any] = [layer.mixer for layer in model.backbone.layers]
    handles = [mixer.register_forward_pre_hook(keep) for mixer in mixers]
    try:
        logits = model(input_ids).logits
    finally:
        for handle in handles:
            handle.remove()
    return found, _scores(logits[:, :-1, : model.config.vocab_size], input_ids[:, 1:], likeliest)


def _scores(logits_btv: Tensor, wanted_bt: Tensor, likeliest: int) -> TokenScores:
    wide = torch.float64 if logits_btv.dtype == torch.float64 else torch.float32
    logprobs_btv = logits_btv.to(wide).log_softmax(-1)
    logprob_bt1 = logprobs_btv.gather(-1, wanted_bt.long().unsqueeze(-1))
    best = logprobs_btv.topk(min(likeliest, logprobs_btv.shape[-1]))
    return TokenScores(
        logprob=logprob_bt1.squeeze(-1),
        rank=(logprobs_btv > logprob_bt1).sum(-1),
        entropy=-(logprobs_btv.exp() * logprobs_btv).nan_to_num(0.0).sum(-1),
        best=best.values,
        best_ids=best.indices,
    )
