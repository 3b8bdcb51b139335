"""Muon: momentum, orthogonalized (Jordan et al. 2024), at the scale of AdamW (Liu et al. 2025).

    m <- β m + (1 - β) g        u = (1 - β) g + β m        W <- (1 - lr · decay) W - 0.2 √max(rows, columns) · lr · O(u)

O(u) has the singular vectors of u, and singular values of about one: no direction of a matrix learns faster than
another. Its root mean square is about 1/√max(rows, columns), so that an entry of W moves by about 0.2 lr per step, as
with AdamW, and one learning rate and weight decay suit both.

`torch.optim.Muon` is not used: it computes in bfloat16 on every device, which most CPUs emulate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from anymamba.core.linear import linear
from anymamba.training.distributed.fsdp import ParamShard, map_round_robin
from anymamba.training.distributed.process_group import World

# x <- a x + b (x xᵀ) x + c (x xᵀ)² x maps singular values from (0, 1] to about one; it is as steep at zero as a quintic
# can be that keeps the others between 0.68 and 1.14.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalize(matrix: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """Return a matrix with the same singular vectors and singular values of about one.

    A singular value below about a thousandth of the matrix's norm stays smaller. The computation is in float32 or
    float64 on a CPU, and in bfloat16 elsewhere; zeros stay zeros.
    """
    a, b, c = _QUINTIC
    x = matrix if matrix.device.type == "cpu" else matrix.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x).clamp(min=torch.finfo(x.dtype).tiny)
    for _ in range(_ITERATIONS):
        gram = linear(x, x)
        inner = (b * gram).add_(linear(gram, gram), alpha=c)  # symmetric, as every power of x xᵀ
        x = linear(inner, x.mT).add_(x, alpha=a)
    return (x.mT if is_tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Muon for matrices. Pass the parts of a fused projection as views: a whole one would be orthogonalized as one
    matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        shards: Mapping[Tensor, ParamShard] | None = None,
        world: World | None = None,
    ) -> None:
        """Create the optimizer.

        Args:
            params: Matrices, or this rank's rows of them.
            lr: Learning rate.
            momentum: Decay of the momentum, β.
            weight_decay: Weight decay, relative to the learning rate.
            shards: Which rows of a matrix each rank holds, for those that are sharded.
            world: All ranks, each of which orthogonalizes some of the matrices for all of them.

        Raises:
            ValueError: A parameter is not a matrix.
        """
        self._shards = dict(shards or {})
        self._world = world or World()
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise ValueError(f"Muon: every parameter must be a matrix, got the shape {tuple(p.shape)}")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        count = self._world.size
        for group in self.param_groups:
            lr, decay = group["lr"], group["weight_decay"]
            # The ranks orthogonalize some matrices at the same time, so these should have about the same size.
            updated = sorted((p for p in group["params"] if p.grad is not None), key=self._size)
            for begin in range(0, len(updated), count):
                some = updated[begin : begin + count]
                means = [self._momentum(p, group["momentum"]) for p in some]
                for p, update in zip(some, map_round_robin(orthogonalize, means, self._world), strict=True):
                    shard, largest = self._shards.get(p), max(update.shape)
                    p.mul_(1 - lr * decay)
                    p.add_(update if shard is None else update[shard.local_rows], alpha=-0.2 * largest**0.5 * lr)

    def _momentum(self, p: Tensor, beta: float) -> Tensor:
        """Update the momentum and return the whole matrix u."""
        assert p.grad is not None
        mean = self.state[p].setdefault("momentum", torch.zeros_like(p))
        mean.lerp_(p.grad, 1 - beta)
        update, shard = p.grad.lerp(mean, beta), self._shards.get(p)
        return update if shard is None else shard.gather(update)

    def _size(self, p: Tensor) -> int:
        """Return the number of elements of the whole matrix."""
        shard = self._shards.get(p)
        return p.numel() if shard is None else shard.bounds[-1] * p.shape[1]
