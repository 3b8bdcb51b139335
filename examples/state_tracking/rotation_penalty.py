"""A penalty that makes the rotations of long-lived states exact.

An angle that is learned from sequences of some length has a small error, which is the same at every step: nothing in
the loss depends on its sum over longer sequences. With log-decays a and angles θ, the penalty is the mean over heads of

    1 - r  +  r · mean (1 - cos 60 θ),        r = exp(1000 · mean a)

with means over tokens and pairs. The retention r is the fraction of a head's states that is left after 1,000 tokens; in
the second term it is a constant. The first term makes states that last for hundreds of tokens last for thousands. The
second is zero where every angle is a multiple of 1/60 of a circle: halves, thirds, quarters, fifths and sixths are
among them, so it presumes no task. Heads that forget sooner are not affected: all heads share the rates of their pairs,
so not all angles could be exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from anymamba import MambaLM
from anymamba.analysis import recurrence

PARTS = 60
HORIZON = 1000


def rotation_penalty(log_decay_bth: Tensor, angle_bths: Tensor | None) -> Tensor:
    """Return the penalty of one block, a scalar of at least 0; without rotation it is the first term alone."""
    retention_h = torch.exp(HORIZON * log_decay_bth.mean((0, 1)))
    forgotten = (1 - retention_h).mean()
    if angle_bths is None or angle_bths.shape[-1] == 0:
        return forgotten
    deviation_h = (1 - torch.cos(PARTS * angle_bths)).mean((0, 1, 3))
    return forgotten + (retention_h.detach() * deviation_h).mean()


@contextmanager
def collect_penalties(model: MambaLM) -> Iterator[list[Tensor]]:
    """Collect the penalty of each layer, with its gradient, while the model runs inside the context."""
    penalties: list[Tensor] = []

    def append_penalty(block: Any, inputs: tuple[Any, ...]) -> None:
        terms = recurrence(block, inputs[0])
        penalties.append(rotation_penalty(terms.log_decay, terms.rotation))

    mixers: list[Any] = [layer.mixer for layer in model.backbone.layers]
    handles = [mixer.register_forward_pre_hook(append_penalty) for mixer in mixers]
    try:
        yield penalties
    finally:
        for handle in handles:
            handle.remove()
