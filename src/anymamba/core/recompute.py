"""Portable implementations made from a definition, which keep only their inputs for the backward pass.

The backward runs the definition again under autograd: as a whole (`recompute_all`), or, if rows are independent, in
blocks that fit in a CPU's cache (`recompute_row_blocks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.core.operators import gradients
from anymamba.core.registry import Implementation

# Half a MiB of float32: with an operand or two beside it, a block stays in a core's second-level cache.
CACHE_BLOCK_NUMEL = 2**17


def recompute_all(definition: Callable[..., Any], outputs: int, differentiable: int) -> Implementation:
    """An implementation of an operator with that many outputs and differentiable inputs."""

    def forward(*inputs: Any) -> Any:
        results = definition(*inputs)
        return results.contiguous() if isinstance(results, Tensor) else tuple(x.contiguous() for x in results)

    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        return gradients(definition, arguments[:outputs], arguments[outputs:], differentiable)

    return Implementation(forward, backward)


def split_into_cache_blocks(x: Tensor, rows: int, width: int) -> Iterator[slice]:
    """Cut `rows` of `width` elements each into blocks that stay in a CPU's cache; elsewhere, into one."""
    size = max(1, CACHE_BLOCK_NUMEL // max(1, width)) if x.device.type == "cpu" else max(1, rows)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def recompute_row_blocks(
    definition: Callable[..., Tensor], rows: dict[int, int], result: int, parameters: range
) -> Implementation:
    """An implementation of an operator with one result.

    Args:
        definition: inputs -> result, plain torch code, for any number of leading axes.
        rows: how many trailing axes belong to a row, by the index of each input that has rows.
        result: how many trailing axes belong to a row of the result, which has the shape of the first input but for
            these: they are those of the last input in `rows`.
        parameters: indices of the other differentiable inputs; their gradients are summed in the state's dtype.
    """

    def by_row(x: Tensor | None, axes: int) -> Tensor | None:
        return None if x is None else x.reshape(-1, *x.shape[x.ndim - axes :])

    def cut(inputs: tuple[Any, ...], block: slice) -> list[Any]:
        return [x[block] if i in rows and x is not None else x for i, x in enumerate(inputs)]

    def flat(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(by_row(x, rows[i]) if i in rows else x for i, x in enumerate(inputs))

    def shape(inputs: tuple[Any, ...]) -> torch.Size:
        first, like = inputs[0], next(inputs[i] for i in reversed(rows) if inputs[i] is not None)
        return torch.Size((*first.shape[: first.ndim - rows[0]], *like.shape[like.ndim - result :]))

    def blocks(inputs: tuple[Any, ...]) -> Iterator[slice]:
        first = inputs[0]
        return split_into_cache_blocks(first, first.shape[0], math.prod(first.shape[1:]))

    def forward(*inputs: Any) -> Tensor:
        out = torch.empty(shape(inputs), dtype=inputs[0].dtype, device=inputs[0].device)
        out_rows, flattened = out.view(-1, *out.shape[out.ndim - result :]), flat(inputs)
        for block in blocks(flattened):
            out_rows[block] = definition(*cut(flattened, block))
        return out

    def backward(dout: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        wide, flattened = state_dtype(inputs[0].dtype), flat(inputs)
        dout_rows = dout.reshape(-1, *dout.shape[dout.ndim - result :])
        differentiable = max((*rows, *parameters)) + 1
        given = [x if i not in parameters or x is None else x.to(wide) for i, x in enumerate(flattened)]
        grads = [
            None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format)
            for x in given[:differentiable]
        ]
        for block in blocks(flattened):
            found = gradients(definition, (dout_rows[block],), tuple(cut(tuple(given), block)), differentiable)
            for i, (grad, part) in enumerate(zip(grads, found, strict=True)):
                if grad is not None and i in rows:
                    grad[block] = part
                elif grad is not None:
                    grad += part
        return tuple(
            dout.new_empty(0) if grad is None else grad.reshape(x.shape).to(x.dtype)
            for grad, x in zip(grads, inputs, strict=False)
        )

    return Implementation(forward, backward)
