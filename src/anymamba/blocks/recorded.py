"""A block's token by the compiled kernels: recorded when first needed, and again after the block changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from anymamba.core import anomaly
from anymamba.core.operators import are_dense_tensors, is_tracing
from anymamba.core.registry import are_kernels_off
from anymamba.kernels.cpu.compiled_step import Recording
from anymamba.kernels.cpu.step_program import OUTPUT

if TYPE_CHECKING:
    from anymamba.blocks.base import Block

# Not attributes of the blocks: a recording is neither copied nor saved with its block.
_RECORDINGS: WeakKeyDictionary[Block, Recording] = WeakKeyDictionary()


def compiled_step(block: Block, x: Any, cache: Any, *, record: bool = False) -> tuple[Tensor, Any] | None:
    """`Block.step` by the compiled kernels; None if they do not cover it.

    Args:
        block: whose step it is.
        x: as for `step`; a program checks what it is given against what it was recorded for.
        cache: likewise.
        record: record a program if there is none for the current block; x must have been checked.
    """
    if torch.is_grad_enabled() or are_kernels_off() or anomaly.is_check_finite_on() or torch.is_autocast_enabled("cpu"):
        return None
    if not isinstance(cache, block.CACHE) or is_tracing() or not are_dense_tensors((x, *cache)):
        return None
    recording = _RECORDINGS.get(block)
    if recording is None or not recording.is_current():
        if not record:
            return None
        recording = _RECORDINGS[block] = Recording(
            lambda program: block.record(program, 0, to=OUTPUT), x.dtype, block.d_model, x.dtype
        )
    done = recording.run(x, cache)
    return None if done is None else (done[0], block.CACHE(*done[1]))
