"""A sequence that several workers share, each with a part of it: what crosses from one part into the next.

Worker 0 holds the first tokens, worker 1 those after them, and so on. What a block carries from one token to the next
crosses a boundary, and nothing else does: a window, a key, a rotation, a state. So the bytes that are sent depend on
the model, and not on the length.

A value that is carried obeys `out = f(in, own)`: `in` comes from the worker before (or from a cache, where the sequence
begins here), `own` is known here. The gradient goes the other way: `dout` comes from the worker after, and
`din = (gradient here) + dfᵀ dout` goes to the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Values = tuple[Tensor, ...]


class ContextParallelGroup:
    """The workers that share sequences, and this one among them.

    Attributes:
        sent: bytes that this worker has sent to its neighbors.
    """

    def __init__(self, ranks: list[int], rank: int, group: Any = None) -> None:
        """`ranks` in the order of the sequence's parts, `rank` one of them, `group` the process group of all."""
        self.place, self.size = ranks.index(rank), len(ranks)
        self._before = ranks[self.place - 1] if self.place else None
        self._after = ranks[self.place + 1] if self.place + 1 < self.size else None
        self._group = group
        self.sent = 0

    def part(self, length: int) -> tuple[int, int]:
        """Begin and end of this worker's part of that many tokens."""
        return self.place * length // self.size, (self.place + 1) * length // self.size

    def send(self, values: Values, forward: bool) -> Any:
        """Start to send values to the worker after this one, or before; returns what to wait for."""
        import torch.distributed as dist

        message = _packed(values)
        self.sent += message.numel()
        return dist.isend(message, self._after if forward else self._before, group=self._group), message

    def receive(self, like: Values, forward: bool) -> Values:
        """Values of these shapes and dtypes, from the worker before this one, or after."""
        import torch.distributed as dist

        message = torch.empty(sum(x.nbytes for x in like), dtype=torch.uint8, device=like[0].device)
        dist.recv(message, self._before if forward else self._after, group=self._group)
        return _unpacked(message, like)

    def chosen(self, x: Tensor, here: Tensor) -> Tensor:
        """Rows (r, ...) on every worker, each as it is on the one where `here` (r,) is True, without gradients."""
        import torch.distributed as dist

        found = torch.where(here.view(-1, *[1] * (x.ndim - 1)), x, 0).contiguous()
        self.sent += found.nbytes
        dist.all_reduce(found, group=self._group)
        return found


class Context(NamedTuple):
    """This worker's part of a batch: whether its first sequence comes from the part before, and its last continues.

    Attributes:
        neighbors: the workers that share the batch.
        before: the first sequence here (each row, where none are packed) continues one of the worker before.
        after: the last sequence here continues on the worker after.
    """

    neighbors: ContextParallelGroup
    before: bool
    after: bool

    def exchange_boundary_state(
        self,
        starts: Values,
        cu_seqlens: Tensor | None,
        own: Values,
        carry: Callable[..., Values],
        *,
        anew: bool = False,
    ) -> Values:
        """The values that the sequences here start from.

        Args:
            starts: where sequences begin here, (z, ...) each; those of a first one that continues do not count.
            cu_seqlens: boundaries of packed sequences, z + 1 of them; without, z rows, all of which continue.
            own: what the last sequence does with them here, (1, ...) each, or (z, ...) without boundaries.
            carry: start values (1 or z, ...) and `own` -> the values after the last token here.
            anew: those do not depend on the start values, so no worker waits for the one before it.

        Returns:
            The start values (z, ...) with those of the worker before in place of the first.
        """
        several = cu_seqlens is not None and cu_seqlens.shape[0] > 2
        first, last = tuple(x[:1] if several else x for x in starts), tuple(x[-1:] if several else x for x in starts)
        received: Values = _Relay.apply(  # type: ignore[no-untyped-call]
            self, several or anew, carry, len(starts), *first, *last, *own
        )
        if not several:
            return tuple(received)
        return tuple(torch.cat([new, old[1:]]) for new, old in zip(received, starts, strict=True))


class _Relay(torch.autograd.Function):
    """Receive from the part before, send to the part after; the other way round for gradients."""

    @staticmethod
    def forward(ctx: Any, context: Context, anew: bool, carry: Any, count: int, *values: Tensor) -> Values:
        first, last, own = values[:count], values[count : 2 * count], values[2 * count :]
        workers, sending = context.neighbors, None
        if context.after and anew:
            sending = workers.send(carry(*last, *own), True)
        found = workers.receive(first, True) if context.before else tuple(x.clone() for x in first)
        if context.after and not anew:
            sending = workers.send(carry(*found, *own), True)
        if sending is not None:
            sending[0].wait()
        ctx.context, ctx.anew, ctx.carry, ctx.count = context, anew, carry, count
        ctx.save_for_backward(*(last if anew else found), *own)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        context, count, anew = ctx.context, ctx.count, ctx.anew
        saved = ctx.saved_tensors
        base, own = saved[:count], saved[count:]
        workers, sending = context.neighbors, None
        total: list[Tensor] = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, base, strict=True)]
        if context.before and anew:
            sending = workers.send(tuple(total), False)
        through: list[Tensor | None] = [None] * (count + len(own))
        if context.after:
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (*base, *own)]
                made = ctx.carry(*leaves)
                cotangents = workers.receive(made, False)
                used = [(y, dy) for y, dy in zip(made, cotangents, strict=True) if y.requires_grad]
                through = list(
                    torch.autograd.grad([y for y, _ in used], leaves, [dy for _, dy in used], allow_unused=True)
                )
            if not anew:
                pairs = zip(total, through[:count], strict=True)
                total = [a if b is None else a + b for a, b in pairs]
        if context.before and not anew:
            sending = workers.send(tuple(total), False)
        if sending is not None:
            sending[0].wait()
        first = [None] * count if context.before else total
        last = through[:count] if anew else [None] * count
        return (None, None, None, None, *first, *last, *through[count:])


def _packed(values: Values) -> Tensor:
    """The bytes of all values, one after another."""
    return torch.cat([x.detach().contiguous().flatten().view(torch.uint8) for x in values])


def _unpacked(message: Tensor, like: Values) -> Values:
    parts = message.split([x.nbytes for x in like])
    return tuple(
        part.clone().view(x.dtype).view(x.shape) if x.numel() else torch.empty_like(x)
        for part, x in zip(parts, like, strict=True)
    )
