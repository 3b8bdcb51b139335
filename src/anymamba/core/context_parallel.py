"""Context parallelism: the ranks of a group share a sequence, and values cross from one part of it into the next.

Rank 0 of the group holds the first tokens, rank 1 the tokens after them, and so on. Only what a block carries from one
token to the next crosses a boundary: a convolution window, a key, a rotation, a state. The number of bytes sent depends
on the model and not on the length of the sequence.

A carried value is `out = combine(initial, local)`. `initial` comes from the previous rank, or from a cache where the
sequence begins on this rank; `local` is computed on this rank. The gradient travels the other way: `dout` comes from
the next rank, and `dinitial = (gradient on this rank) + dcombineᵀ dout` goes to the previous one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Values = tuple[Tensor, ...]


class ContextParallelGroup:
    """The ranks that share sequences, seen from one of them.

    Attributes:
        cp_rank: Position of this rank in the order of the parts.
        size: Number of ranks.
        sent: Bytes that this rank has sent.
    """

    def __init__(self, ranks: list[int], rank: int, group: Any = None) -> None:
        """Describe the group of global `ranks`, in the order of the sequence's parts, from one `rank`, this process.

        `group` is their process group; None means the default group.
        """
        self.cp_rank = ranks.index(rank)
        self.size = len(ranks)
        self.sent = 0
        self._prev = ranks[self.cp_rank - 1] if self.cp_rank else None
        self._next = ranks[self.cp_rank + 1] if self.cp_rank + 1 < self.size else None
        self._group = group

    def part_bounds(self, length: int) -> tuple[int, int]:
        """Return the begin and the end of this rank's part of `length` tokens."""
        return self.cp_rank * length // self.size, (self.cp_rank + 1) * length // self.size

    def send(self, values: Values, *, to_next: bool) -> Any:
        """Start to send values to the next or the previous rank; return the handle to wait for, and the message."""
        import torch.distributed as dist

        message = _pack_bytes(values)
        self.sent += message.numel()
        return dist.isend(message, self._next if to_next else self._prev, group=self._group), message

    def receive(self, like: Values, *, from_prev: bool) -> Values:
        """Receive values with the shapes and dtypes of `like` from the previous or the next rank."""
        import torch.distributed as dist

        message = torch.empty(sum(x.nbytes for x in like), dtype=torch.uint8, device=like[0].device)
        dist.recv(message, self._prev if from_prev else self._next, group=self._group)
        return _unpack_bytes(message, like)

    def broadcast_rows(self, x: Tensor, is_local: Tensor) -> Tensor:
        """Return rows (r, ...) on every rank, each from the rank where `is_local` (r,) is True, without gradients."""
        import torch.distributed as dist

        rows = torch.where(is_local.view(-1, *[1] * (x.ndim - 1)), x, 0).contiguous()
        self.sent += rows.nbytes
        dist.all_reduce(rows, group=self._group)
        return rows


class SequencePart(NamedTuple):
    """The part of a batch that this rank holds, and which of its sequences cross the part's boundaries.

    Attributes:
        cp_group: Ranks that share the batch.
        continues_from_prev: True if the first sequence of this part (each row, if no sequences are packed) begins on
            an earlier rank.
        continues_to_next: True if the last sequence of this part continues on the next rank.
    """

    cp_group: ContextParallelGroup
    continues_from_prev: bool
    continues_to_next: bool

    def exchange_boundary_state(
        self,
        initial: Values,
        cu_seqlens: Tensor | None,
        local: Values,
        combine: Callable[..., Values],
        *,
        independent: bool = False,
    ) -> Values:
        """Return the values that the sequences of this part start from.

        Args:
            initial: Start values of the sequences that begin in this part, (z, ...) each. The entry of a first sequence
                that continues from the previous rank is ignored.
            cu_seqlens: Boundaries of packed sequences, z + 1 of them; without them there are z rows, which all cross
                the boundary.
            local: Effect of this part on its last sequence, (1, ...) each, or (z, ...) without `cu_seqlens`.
            combine: Start values (1 or z, ...) and `local` -> the values after the part's last token.
            independent: True if the result of `combine` does not depend on the start values: then no rank waits for
                the previous one.

        Returns:
            The start values (z, ...), with the previous rank's in place of the first where it continues.
        """
        has_several = cu_seqlens is not None and cu_seqlens.shape[0] > 2
        first = tuple(x[:1] if has_several else x for x in initial)
        last = tuple(x[-1:] if has_several else x for x in initial)
        received: Values = _ExchangeBoundary.apply(  # type: ignore[no-untyped-call]
            self, has_several or independent, combine, len(initial), *first, *last, *local
        )
        if not has_several:
            return tuple(received)
        return tuple(torch.cat([new, old[1:]]) for new, old in zip(received, initial, strict=True))


class _ExchangeBoundary(torch.autograd.Function):
    """Receive from the previous rank and send to the next one; the other way round for gradients."""

    @staticmethod
    def forward(
        ctx: Any, part: SequencePart, independent: bool, combine: Callable[..., Values], count: int, *values: Tensor
    ) -> Values:
        first, last, local = values[:count], values[count : 2 * count], values[2 * count :]
        sending = None
        # 1) What does not depend on the previous rank is sent before anything is waited for.
        if part.continues_to_next and independent:
            sending = part.cp_group.send(combine(*last, *local), to_next=True)
        # 2) The start values of this part.
        if part.continues_from_prev:
            start = part.cp_group.receive(first, from_prev=True)
        else:
            start = tuple(x.clone() for x in first)
        # 3) Everything else is sent once the start values are known.
        if part.continues_to_next and not independent:
            sending = part.cp_group.send(combine(*start, *local), to_next=True)
        if sending is not None:
            sending[0].wait()
        ctx.part = part
        ctx.independent = independent
        ctx.combine = combine
        ctx.count = count
        ctx.save_for_backward(*(last if independent else start), *local)
        return start

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        part = ctx.part
        count = ctx.count
        saved = ctx.saved_tensors  # activation checkpointing allows to read them once
        base, local = saved[:count], saved[count:]
        sending = None
        dstart: list[Tensor] = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, base, strict=True)]
        # 1) The gradient for the previous rank is complete already if this part does not contribute to it.
        if part.continues_from_prev and ctx.independent:
            sending = part.cp_group.send(tuple(dstart), to_next=False)
        # 2) Differentiate `combine` with what comes from the next rank.
        through: list[Tensor | None] = [None] * (count + len(local))
        if part.continues_to_next:
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (*base, *local)]
                results = ctx.combine(*leaves)
                dresults = part.cp_group.receive(results, from_prev=False)
                pairs = [(y, dy) for y, dy in zip(results, dresults, strict=True) if y.requires_grad]
                through = list(
                    torch.autograd.grad([y for y, _ in pairs], leaves, [dy for _, dy in pairs], allow_unused=True)
                )
            if not ctx.independent:
                dstart = [a if b is None else a + b for a, b in zip(dstart, through[:count], strict=True)]
        # 3) Send the sum on.
        if part.continues_from_prev and not ctx.independent:
            sending = part.cp_group.send(tuple(dstart), to_next=False)
        if sending is not None:
            sending[0].wait()
        dfirst = [None] * count if part.continues_from_prev else dstart
        dlast = through[:count] if ctx.independent else [None] * count
        return (None, None, None, None, *dfirst, *dlast, *through[count:])


def _pack_bytes(values: Values) -> Tensor:
    """Return the bytes of all values, one after another."""
    return torch.cat([x.detach().contiguous().flatten().view(torch.uint8) for x in values])


def _unpack_bytes(message: Tensor, like: Values) -> Values:
    """Return the values whose bytes `_pack_bytes` has joined."""
    parts = message.split([x.nbytes for x in like])
    return tuple(
        part.clone().view(x.dtype).view(x.shape) if x.numel() else torch.empty_like(x)
        for part, x in zip(parts, like, strict=True)
    )
