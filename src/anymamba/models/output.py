"""What a language model returns for a sequence.

Letters: b batch, t time, d d_model, v padded vocabulary, z packed sequences.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from anymamba.models.cache import LMCache


class LMOutput(NamedTuple):
    """The model's output for a sequence.

    Attributes:
        logits: of the token that follows each input token, (b, t, v); (b, 1, v) or (z, 1, v) for the last tokens only;
            None if they were not asked for.
        loss: mean negative log-likelihood of the labels, if there were any.
        cache: the cache to continue from.
        nats: total negative log-likelihood of the labels, if there were any.
        hidden_states: the residual stream after each requested pass, (b, t, d) each.
    """

    logits: Float[Tensor, "z t v"] | None
    loss: Float[Tensor, ""] | None
    cache: LMCache
    nats: Float[Tensor, ""] | None = None
    hidden_states: tuple[Float[Tensor, "b t d"], ...] = ()


def in_rows(output: LMOutput, rows: int, logits: str) -> LMOutput:
    """The output of one packed row, split into the original rows; logits of last tokens stay one per sequence."""
    hidden = tuple(x.view(rows, -1, x.shape[2]) for x in output.hidden_states)
    if logits != "all" or output.logits is None:
        return output._replace(hidden_states=hidden)
    return output._replace(logits=output.logits.view(rows, -1, output.logits.shape[2]), hidden_states=hidden)
