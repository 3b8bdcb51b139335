"""Operators with a backward derived by hand, as `torch.compile`, `torch.export` and autograd want them.

An operator here keeps its inputs and nothing else for the backward, which recomputes what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

# Half a MiB of float32: with an operand or two beside it, a block stays in a core's second-level cache.
CACHE_ELEMENTS = 2**17


def define_operator(
    name: str,
    *,
    inputs: str,
    outputs: int,
    differentiable: int,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """Register `anymamba::name` and `anymamba::name_backward` and join them in autograd.

    Args:
        name: of the operator, without its namespace.
        inputs: its arguments in schema language, "Tensor x, Tensor? bias, int width".
        outputs: how many tensors it returns.
        differentiable: how many of the leading inputs receive a gradient. They are tensors or None.
        forward: computes the outputs from the inputs.
        backward: computes one gradient per differentiable input from the outputs' gradients followed by the inputs; for
            an input that is None, any tensor.
        fake: the outputs without their values, for tracing.

    Returns:
        The operator, to be called with `inputs`. Its second derivative raises `RuntimeError`. Where nothing is traced
        and no gradient is wanted, `forward` is called as it is: the dispatcher takes longer than a decode step's work,
        and on its first call loads a second of compiler.
    """

    def schema(arguments: str, results: int) -> str:
        return f"({arguments}) -> " + ("Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})")

    cotangents = ", ".join(f"Tensor grad{i}" for i in range(outputs))
    forward_op = torch.library.custom_op(f"anymamba::{name}", forward, mutates_args=(), schema=schema(inputs, outputs))
    backward_op = torch.library.custom_op(
        f"anymamba::{name}_backward",
        backward,
        mutates_args=(),
        schema=schema(f"{cotangents}, {inputs}", differentiable),
    )

    def fake_backward(*arguments: Any) -> Any:
        grads = tuple(
            arguments[0].new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
            for x in arguments[outputs : outputs + differentiable]
        )
        return grads if differentiable > 1 else grads[0]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        ctx.others = [x for x in inputs if not isinstance(x, Tensor)]

    def autograd(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
        arguments = [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]
        grads = backward_op(*cotangents, *arguments)
        grads = grads if differentiable > 1 else (grads,)
        kept = [None if x is None else grad for x, grad in zip(arguments, grads, strict=False)]
        return (*kept, *(None for _ in arguments[differentiable:]))

    def second_order(*_: Any) -> None:
        raise RuntimeError(
            f"anymamba::{name} has no second derivative: its backward is derived by hand. Gradients of gradients are "
            "there for the scans alone: anymamba.scan.scan with SsdPath.serial() or SsdPath.minimal(), selective_scan "
            "with SsdPath.recurrent(); not for blocks."
        )

    forward_op.register_fake(fake)
    backward_op.register_fake(fake_backward)
    forward_op.register_autograd(autograd, setup_context=setup_context)
    backward_op.register_autograd(second_order)

    def call(*arguments: Any) -> Any:
        if forward_ad._current_level >= 0:
            _expect_no_tangents(name, arguments)
        if not torch.compiler.is_compiling():
            _expect_no_functional_gradient(name)
        return (forward if is_plain(arguments) else forward_op)(*arguments)

    return call


def is_observed() -> bool:
    """Whether somebody follows which operations are called: a tracer, a transform, a mode, or forward-mode autograd."""
    return (
        torch.compiler.is_compiling()
        or torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def is_plain(arguments: tuple[Any, ...]) -> bool:
    """Whether the arguments are ordinary tensors that nobody follows, neither autograd nor a tracer.

    A tensor that torch has marked as negated, without having done so in memory, is not.
    """
    if is_observed():
        return False
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    return all(type(x) in (Tensor, nn.Parameter) and not x.is_neg() for x in tensors)


def _expect_no_tangents(name: str, arguments: tuple[Any, ...]) -> None:
    """An operator drops tangents; that must not happen in silence."""
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):
        raise NotImplementedError(f"anymamba::{name} has no forward-mode derivative (jvp), only a backward")


def _expect_no_functional_gradient(name: str) -> None:
    """torch has no rule for operators like ours there, and would say so in its own terms."""
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and transform.key() == torch._C._functorch.TransformType.Grad:
        raise NotImplementedError(f"anymamba::{name} has no torch.func.grad; use torch.autograd.grad or backward()")


def cache_blocks(x: Tensor, steps: int, row: int) -> Iterator[tuple[int, int]]:
    """Cut `steps` of `row` elements each into blocks [start, stop) that stay in a CPU's cache; elsewhere, into one."""
    size = max(1, CACHE_ELEMENTS // max(1, row)) if x.device.type == "cpu" else max(1, steps)
    for start in range(0, steps, size):
        yield start, min(start + size, steps)


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """`grad · σ(x) (1 + x (1 - σ(x)))`."""
    return torch.ops.aten.silu_backward(grad, x)
