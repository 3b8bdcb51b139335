"""Growing tensors of caches: steps appended to rows of different lengths, in time that does not grow with the rows.

Without gradients, the steps are stored in a *buffer* that is longer than they are, and a cache holds a view of its
first columns. The buffer knows how far each row is filled. A cache that reaches as far as that writes its next steps
after its own, where no cache has anything yet; a shorter one, from which another has continued already, is copied to
a buffer of its own first. So no cache ever changes, and a conversation copies its steps only when its buffer is full.

With gradients, or while a call is traced, the steps are concatenated.

Letters: b batch, s and t steps of the cache and new ones.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.core.operators import is_tracing

_BLOCK = 64  # steps; a buffer has a multiple of it
_SPARE_FRACTION = 8  # and is at least an eighth longer than its rows, so that long rows are seldom copied
_FILLED = "_anymamba_filled_steps"  # attribute of a buffer: how many steps of each row are in use, as a list
_LOCK = threading.Lock()


def append_steps(
    x: Float[Tensor, "b s *rest"],
    lengths: Int[Tensor, " b"],
    new: Float[Tensor, "b t *rest"],
    counts: Int[Tensor, " b"] | None = None,
) -> tuple[Float[Tensor, "b u *rest"], Int[Tensor, " b"]]:
    """Append steps to a growing tensor, each row's after its own last step.

    Args:
        x: Growing tensor; it is not changed.
        lengths: Number of steps of each row of `x`, on the CPU.
        new: New steps, at least one, in the dtype of `x`.
        counts: Number of leading steps of `new` that are real, in each row. Default: all.

    Returns:
        The longer tensor, finite everywhere, and the number of steps of each of its rows. It owns its memory.
    """
    after = lengths + (new.shape[1] if counts is None else counts.to("cpu"))
    if is_tracing() or (torch.is_grad_enabled() and (x.requires_grad or new.requires_grad)):
        return _concatenate(x, lengths, new, after), after
    begins, ends = lengths.tolist(), after.tolist()
    width = max(begins, default=0) + new.shape[1]  # what follows the real steps is written too, where nothing is yet
    buffer = reserve_steps(x, begins, ends, width)
    if len(set(begins)) <= 1:
        buffer[:, width - new.shape[1] : width] = new
    else:
        rows = torch.arange(len(begins)).unsqueeze(1)
        buffer[rows, lengths.unsqueeze(1) + torch.arange(new.shape[1])] = new
    return buffer[:, : max(ends, default=0)], after


def reserve_steps(x: Tensor, begins: list[int], ends: list[int], width: int) -> Tensor:
    """Return a buffer with the steps of `x`, `begins` of each row, in which the caller writes the next ones.

    Args:
        x: Growing tensor.
        begins: Number of steps of each row.
        ends: Number of steps of each row when they are written.
        width: Number of columns that are written to.
    """
    with _LOCK:
        buffer = _buffer_of(x)
        if buffer is None or buffer.shape[1] < width or getattr(buffer, _FILLED) != begins:
            buffer = _allocate(x, begins, width)
        setattr(buffer, _FILLED, ends)
    return buffer


def _concatenate(x: Tensor, lengths: Tensor, new: Tensor, after: Tensor) -> Tensor:
    s, t = x.shape[1], new.shape[1]
    longest = s + t if is_tracing() else int(after.max()) if len(after) else 0
    if not s:
        return new[:, :longest].clone() if longest < t else new
    both = torch.cat([x, new], dim=1)
    if not is_tracing() and bool((lengths == s).all()):
        return both[:, :longest].clone() if longest < s + t else both
    begins_b1 = lengths.to(x.device).unsqueeze(1)
    steps_u = torch.arange(longest, device=x.device)
    source_bu = torch.where(steps_u < begins_b1, steps_u, s + steps_u - begins_b1).clamp(max=s + t - 1)
    return both.gather(1, source_bu.view(*source_bu.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))


def _buffer_of(x: Tensor) -> Tensor | None:
    """Return the buffer whose first columns `x` is a view of; None for any other tensor."""
    buffer: Any = x._base
    is_view = buffer is not None and hasattr(buffer, _FILLED) and x.data_ptr() == buffer.data_ptr()
    return buffer if is_view and x.shape[0] == buffer.shape[0] and x.stride() == buffer.stride() else None


def _allocate(x: Tensor, begins: list[int], width: int) -> Tensor:
    """Return a buffer with the steps of `x`, for `width` steps and more; zero where nothing has been written."""
    capacity = width + width // _SPARE_FRACTION
    buffer = x.new_zeros(x.shape[0], -(-capacity // _BLOCK) * _BLOCK, *x.shape[2:])
    longest = max(begins, default=0)
    buffer[:, :longest] = x[:, :longest]
    return buffer
