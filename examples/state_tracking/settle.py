"""A penalty that makes the turns of states that last exact.

A turn that is learned from sequences of some length is off by a little, the same way at every step: nothing in the loss
sees what it adds up to in longer ones. With log-decays a and turns θ, the penalty is the mean over heads of

    1 - kept  +  kept · mean (1 - cos 60 θ),        kept = exp(1000 · mean a)

with means over tokens and pairs. `kept` is what is left of a head's states after 1,000 tokens, and a constant in the
second term. The first makes states that last for hundreds of tokens last for thousands. The second is zero where every
turn is a multiple of 1/60 of a circle: halves, thirds, quarters, fifths and sixths are among them, so it presumes no
task. Heads that forget sooner stay free: all heads share the rates of their pairs, so not all turns could be exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from anymamba import MambaLM
from anymamba.analysis import recurrence

PARTS, LONG = 60, 1000


def unsettled(log_decay_bth: Tensor, turn_bths: Tensor | None) -> Tensor:
    """The penalty of one block, a scalar of at least 0; a block whose states do not turn is only kept from fading."""
    kept_h = torch.exp(LONG * log_decay_bth.mean((0, 1)))
    faded = (1 - kept_h).mean()
    if turn_bths is None or turn_bths.shape[-1] == 0:
        return faded
    off_h = (1 - torch.cos(PARTS * turn_bths)).mean((0, 1, 3))
    return faded + (kept_h.detach() * off_h).mean()


@contextmanager
def watching(model: MambaLM) -> Iterator[list[Tensor]]:
    """Collect the penalty of each layer, with its gradient, while the model runs inside of the context."""
    found: list[Tensor] = []

    def look(block: Any, inputs: tuple[Any, ...]) -> None:
        terms = recurrence(block, inputs[0])
        found.append(unsettled(terms.log_decay, terms.rotation))

    mixers: list[Any] = [layer.mixer for layer in model.backbone.layers]
    handles = [mixer.register_forward_pre_hook(look) for mixer in mixers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
