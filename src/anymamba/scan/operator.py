"""Algorithms of the scan as operators, so that a traced graph holds one node for any sequence length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymamba.operators import define_operator

Algorithm = Callable[..., tuple[Tensor, Tensor]]


def scan_operator(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Algorithm:
    """Register `anymamba::name` and return it with the signature of an algorithm.

    Args:
        name: of the operator.
        forward: (v, k, q, log_decay, initial_state, chunk_len, cu_seqlens) -> (y, final_state).
        backward: the gradients of y and final_state, then the same arguments -> the gradients of the five tensors.
    """
    operator = define_operator(
        name,
        inputs="Tensor v, Tensor k, Tensor q, Tensor log_decay, Tensor initial_state, "
        "SymInt chunk_len, Tensor? cu_seqlens",
        outputs=2,
        differentiable=5,
        forward=forward,
        backward=backward,
        fake=lambda v, k, q, log_decay, initial_state, *_: (
            torch.empty(v.shape, dtype=v.dtype, device=v.device),
            torch.empty(initial_state.shape, dtype=initial_state.dtype, device=v.device),
        ),
    )

    def algorithm(
        v: Tensor,
        k: Tensor,
        q: Tensor,
        log_decay: Tensor,
        *,
        initial_state: Tensor,
        chunk_len: int,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        y, final_state = operator(v, k, q, log_decay, initial_state, chunk_len, cu_seqlens)
        return y, final_state

    return algorithm


def exported(name: str, algorithm: Algorithm) -> Algorithm:
    """`algorithm`, plain torch code whose loops depend on the sequence length, as one node of an exported graph.

    Inside the node it runs as it does eagerly; the node's backward runs it again under autograd.
    """

    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, initial_state, chunk_len, cu_seqlens = arguments
        y, final_state = algorithm(*tensors, initial_state=initial_state, chunk_len=chunk_len, cu_seqlens=cu_seqlens)
        return y.contiguous(), final_state.contiguous()

    def backward(dy: Tensor, dfinal_state: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in arguments[:5]]
            return torch.autograd.grad(forward(*leaves, *arguments[5:]), leaves, (dy, dfinal_state))

    return scan_operator(name, forward, backward)
