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

# Half a MiB of float32: a block and one or two operands fit in a core's second-level cache.
CACHE_BLOCK_NUMEL = 2**17


def recompute_all(definition: Callable[..., Any], outputs: int, differentiable: int) -> Implementation:
    """Return an implementation whose backward runs the whole definition, plain torch code, again.

    `outputs` is the number of its results; its first `differentiable` inputs receive gradients.
    """

    def forward(*inputs: Any) -> Any:
        results = definition(*inputs)
        return results.contiguous() if isinstance(results, Tensor) else tuple(x.contiguous() for x in results)

    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        return gradients(definition, arguments[:outputs], arguments[outputs:], differentiable)

    return Implementation(forward, backward)


def recompute_row_blocks(
    definition: Callable[..., Tensor], rows: dict[int, int], result: int, parameters: range
) -> Implementation:
    """Return an implementation with one result that runs forward and backward in blocks of rows.

    Args:
        definition: Plain torch code, inputs -> result, for any number of leading dimensions.
        rows: Number of trailing dimensions that belong to a row, by the index of each input that has rows.
        result: Number of trailing dimensions that belong to a row of the result. They are those of the last input in
            `rows`; the leading ones are those of the first input.
        parameters: Indices of the other differentiable inputs, whose gradients are summed in the states' dtype.
    """

    def flatten_rows(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            x if x is None or i not in rows else x.reshape(-1, *x.shape[x.ndim - rows[i] :])
            for i, x in enumerate(inputs)
        )

    def select_block(inputs: tuple[Any, ...], block: slice) -> tuple[Any, ...]:
        return tuple(x[block] if i in rows and x is not None else x for i, x in enumerate(inputs))

    def result_shape(inputs: tuple[Any, ...]) -> torch.Size:
        first, like = inputs[0], next(inputs[i] for i in reversed(rows) if inputs[i] is not None)
        return torch.Size((*first.shape[: first.ndim - rows[0]], *like.shape[like.ndim - result :]))

    def blocks(flat_inputs: tuple[Any, ...]) -> Iterator[slice]:
        """Yield blocks of rows for which the first input fits in a CPU's cache; on other devices, one block."""
        first = flat_inputs[0]
        count, width = first.shape[0], math.prod(first.shape[1:])
        size = max(1, CACHE_BLOCK_NUMEL // max(1, width)) if first.device.type == "cpu" else max(1, count)
        for start in range(0, count, size):
            yield slice(start, min(start + size, count))

    def forward(*inputs: Any) -> Tensor:
        y = torch.empty(result_shape(inputs), dtype=inputs[0].dtype, device=inputs[0].device)
        y_rows, flat_inputs = y.view(-1, *y.shape[y.ndim - result :]), flatten_rows(inputs)
        for block in blocks(flat_inputs):
            y_rows[block] = definition(*select_block(flat_inputs, block))
        return y

    def backward(dy: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        # 1) Rows, and the parameters in the dtype of their sums.
        acc_dtype = state_dtype(inputs[0].dtype)
        dy_rows = dy.reshape(-1, *dy.shape[dy.ndim - result :])
        flat_inputs = tuple(
            x if i not in parameters or x is None else x.to(acc_dtype) for i, x in enumerate(flatten_rows(inputs))
        )
        # 2) Gradients block by block: stored for rows, summed for parameters.
        differentiable = max((*rows, *parameters)) + 1
        grads = [
            None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format)
            for x in flat_inputs[:differentiable]
        ]
        for block in blocks(flat_inputs):
            block_grads = gradients(definition, (dy_rows[block],), select_block(flat_inputs, block), differentiable)
            for i, (grad, block_grad) in enumerate(zip(grads, block_grads, strict=True)):
                if grad is not None and i in rows:
                    grad[block] = block_grad
                elif grad is not None:
                    grad += block_grad
        # 3) The shapes and dtypes of the inputs.
        return tuple(
            dy.new_empty(0) if grad is None else grad.reshape(x.shape).to(x.dtype)
            for grad, x in zip(grads, inputs, strict=False)
        )

    return Implementation(forward, backward)
