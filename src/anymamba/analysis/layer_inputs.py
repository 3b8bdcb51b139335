"""Inside a language model: the input of each layer's block, and how likely each token of a text was.

Letters: b batch, t time, d d_model, v vocabulary, k likeliest tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from anymamba.blocks.base import Block
from anymamba.core.dtypes import state_dtype
from anymamba.models.lm import MambaLM


class Layer(NamedTuple):
    """Block of a layer, with its input.

    Attributes:
        block: Mixer of the layer.
        x: Input of the mixer, after the norm of the layer.
    """

    block: Block
    x: Float[Tensor, "b t d"]


class TokenScores(NamedTuple):
    """Probabilities of the tokens of a text, each given those before it; the first is not predicted.

    Attributes:
        logprob: Log-probability of the actual token, in nats.
        rank: Number of tokens that were likelier.
        entropy: Entropy of the whole distribution, in nats.
        best: Log-probabilities of the likeliest tokens.
        best_ids: Ids of the likeliest tokens.
    """

    logprob: Float[Tensor, "b t1"]
    rank: Int[Tensor, "b t1"]
    entropy: Float[Tensor, "b t1"]
    best: Float[Tensor, "b t1 k"]
    best_ids: Int[Tensor, "b t1 k"]


def layers(model: MambaLM, input_ids: Int[Tensor, "b t"]) -> list[Layer]:
    """Run a model from an empty cache and return every block with its input.

    `[dual_matrix(*layer) for layer in layers(model, ids)]` are the matrices of all layers.
    """
    return layers_and_scores(model, input_ids, likeliest=1)[0]


def token_scores(model: MambaLM, input_ids: Int[Tensor, "b t"], likeliest: int = 5) -> TokenScores:
    """Return the log-probabilities of a text from its second token on, in float32 or wider, and the likeliest tokens.

    Args:
        model: Language model.
        input_ids: Text, as token ids.
        likeliest: Number of likeliest tokens to return at each position.
    """
    return layers_and_scores(model, input_ids, likeliest)[1]


def layers_and_scores(
    model: MambaLM, input_ids: Int[Tensor, "b t"], likeliest: int = 5
) -> tuple[list[Layer], TokenScores]:
    """Return `layers` and `token_scores` from one run."""
    layers_run: list[Layer] = []

    def keep_input(block: Any, inputs: tuple[Any, ...]) -> None:
        layers_run.append(Layer(block, inputs[0]))

    mixers: list[Any] = [layer.mixer for layer in model.backbone.layers]
    handles = [mixer.register_forward_pre_hook(keep_input) for mixer in mixers]
    try:
        logits = model(input_ids).logits
    finally:
        for handle in handles:
            handle.remove()
    return layers_run, _score_tokens(logits[:, :-1, : model.config.vocab_size], input_ids[:, 1:], likeliest)


def _score_tokens(logits_btv: Tensor, targets_bt: Tensor, likeliest: int) -> TokenScores:
    logprobs_btv = logits_btv.to(state_dtype(logits_btv.dtype)).log_softmax(-1)
    logprob_bt1 = logprobs_btv.gather(-1, targets_bt.long().unsqueeze(-1))
    best = logprobs_btv.topk(min(likeliest, logprobs_btv.shape[-1]))
    return TokenScores(
        logprob=logprob_bt1.squeeze(-1),
        rank=(logprobs_btv > logprob_bt1).sum(-1),
        entropy=-(logprobs_btv.exp() * logprobs_btv).nan_to_num(0.0).sum(-1),
        best=best.values,
        best_ids=best.indices,
    )
