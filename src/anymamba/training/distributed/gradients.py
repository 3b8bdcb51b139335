"""Gradients of parameters that all ranks hold: plain data parallelism.

Losses are already divided by the targets of all ranks, so gradients are summed, not averaged. Those of sharded weights
are reduced by FSDP2 in the backward pass (fsdp.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from anymamba.training.distributed.process_group import World

Reduction = Literal["float32", "bfloat16"]
_BUCKET_NUMEL = 2**23  # numbers of gradients that are sent at once: 32 MiB in float32


def all_reduce_grads(parameters: Iterable[Tensor], world: World, reduction: Reduction) -> None:
    """Sum the gradients of parameters that all ranks hold, in place; a missing gradient counts as zero."""
    trained = [p for p in parameters if p.requires_grad]
    for p in trained:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for bucket in _buckets([p.grad for p in trained if p.grad is not None]):
        flat = _flatten_dense_tensors(bucket)
        total = flat.bfloat16() if reduction == "bfloat16" else flat
        world.all_reduce_sum(total, "to sum gradients")
        for grad, part in zip(bucket, _unflatten_dense_tensors(total.to(flat.dtype), bucket), strict=True):
            grad.copy_(part)


def _buckets(grads: list[Tensor]) -> list[list[Tensor]]:
    """Group gradients of one dtype into buckets, the same on every rank."""
    buckets: list[list[Tensor]] = []
    numel = 0
    for grad in sorted(grads, key=lambda g: str(g.dtype)):
        if not buckets or numel + grad.numel() > _BUCKET_NUMEL or buckets[-1][0].dtype != grad.dtype:
            buckets.append([])
            numel = 0
        buckets[-1].append(grad)
        numel += grad.numel()
    return buckets
