"""A penalty under which states that last come back: it makes learnt turns exact.

A token multiplies a pair of states by z = exp(a + iθ), with its log-decay a and its turn θ. The penalty is the mean of
1 - Re z^60 over tokens, heads and pairs: how far 60 such steps are from bringing a state back to where it was.

It is zero where nothing fades and every turn is a multiple of 1/60 of a circle: halves, thirds, quarters, fifths and
sixths are among them, so it presumes no task. Its gradient has the factor exp(60 a): states that fade within some tens
of tokens stay free, and those that last turn to the nearest multiple.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from anymamba import MambaLM
from anymamba.inspect import recurrence

POWER = 60


def unsettled(log_decay_bth: Tensor, turn_bths: Tensor | None) -> Tensor:
    """The penalty of one block, a scalar of at least 0; a block whose states do not turn is only kept from fading."""
    kept_bth = torch.exp(POWER * log_decay_bth)
    if turn_bths is None or turn_bths.shape[-1] == 0:
        return (1 - kept_bth).mean()
    return (1 - kept_bth.unsqueeze(-1) * torch.cos(POWER * turn_bths)).mean()


@contextmanager
def watching(model: MambaLM) -> Iterator[list[Tensor]]:
    """Collect the penalty of each layer, with its gradient, while the model runs inside of the context."""
    found: list[Tensor] = []

    def look(block: Any, inputs: tuple[Any, ...]) -> None:
        terms = recurrence(block, inputs[0])
        found.append(unsettled(terms.log_decay, terms.turn))

    mixers: list[Any] = [layer.mixer for layer in model.backbone.layers]
    handles = [mixer.register_forward_pre_hook(look) for mixer in mixers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
