"""A computation as one operator: its contract is public, and how it is computed is decided when it runs.

An operator has a *definition*, plain torch code that autograd can differentiate, and *implementations*: portable ones
by the name of their algorithm, and kernels by device (`core/registry.py`, which also has the switches). A traced or
exported graph holds one node per call, `anymamba::name`, so it runs wherever this package does, with or without
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from anymamba.core import anomaly
from anymamba.core.registry import Implementation, find_kernel, is_portable, missing_kernel

_ORDINARY = (Tensor, nn.Parameter)
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
_ALL_GLOBAL_HOOKS = (*GLOBAL_HOOKS, torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks)

OPERATORS: dict[str, Operator] = {}


class Operator:
    """A computation, to be called with its inputs.

    Args:
        name: Name without the namespace.
        inputs: Arguments in schema language, "Tensor x, Tensor? bias, int width". One that is called `algorithm`
            chooses among `portable`; "fastest" leaves the choice to the operator, "fused" requires a kernel.
        outputs: Names of the tensors that it returns.
        differentiable: How many of the leading inputs receive a gradient. They are tensors or None.
        fake: Returns the outputs without values: dtypes, shapes and strides that every implementation returns.
        definition: Plain torch code.
        portable: Implementations by algorithm; only the definition by default.
        fastest: Maps the inputs to the algorithm that "fastest" means if no kernel covers them.
        may_be_infinite: Names of inputs that may hold infinities.
    """

    def __init__(
        self,
        name: str,
        *,
        inputs: str,
        outputs: str,
        differentiable: int,
        fake: Callable[..., Any],
        definition: Callable[..., Any],
        portable: Mapping[str, Implementation] | None = None,
        fastest: Callable[..., str] = lambda *_: "",
        may_be_infinite: frozenset[str] = frozenset(),
    ) -> None:
        """Register `anymamba::name` and `anymamba::name_backward`, and join them in autograd."""
        self.name = name
        self.definition = definition
        self.portable = portable or {"": Implementation(definition)}
        self.names = tuple(part.split()[1] for part in inputs.split(", "))
        self.results = tuple(outputs.split(", "))
        self._fastest = fastest
        self._may_be_infinite = may_be_infinite
        self._algorithm = self.names.index("algorithm") if "algorithm" in self.names else None
        self._outputs = len(self.results)
        self.differentiable = differentiable
        self._node = torch.library.custom_op(
            f"anymamba::{name}", self._run_node, mutates_args=(), schema=_schema(inputs, self._outputs)
        )
        cotangents = ", ".join(f"Tensor grad{i}" for i in range(self._outputs))
        self._backward_node = torch.library.custom_op(
            f"anymamba::{name}_backward",
            self._run_backward,
            mutates_args=(),
            schema=_schema(f"{cotangents}, {inputs}", differentiable),
        )
        self._fake = fake
        self._node.register_fake(self._fake_outputs)
        self._backward_node.register_fake(self._fake_backward)
        self._node.register_autograd(self._differentiate, setup_context=_keep_inputs)
        self._backward_node.register_autograd(self._reject_second_order)
        OPERATORS[name] = self

    def __call__(self, *inputs: Any) -> Any:
        """Compute the outputs."""
        is_traced = is_tracing()
        is_checked = anomaly.is_check_finite_on() and not is_traced
        if is_checked:
            anomaly.check_tensors_finite(f"{self.name}: input", self.names, inputs, self._may_be_infinite)
        if is_portable():
            check_onnx_exporter()
            outputs = self.definition(*inputs)
        elif is_traced:
            if not torch.compiler.is_compiling():
                self._check_no_transform(inputs)
                self._check_no_onnx()
            outputs = self._node(*inputs)
        else:
            implementation = self.choose(inputs)
            needs_node = implementation.backward is not None and _wants_gradient(inputs)
            # torch's dispatcher takes longer than the work of a decode step, so it is only used where it is needed.
            # For tensors without data, the node computes shapes and nothing else.
            is_direct = _are_ordinary(inputs) and not needs_node and not inputs[0].is_meta
            outputs = implementation.forward(*inputs) if is_direct else self._node(*inputs)
        if is_checked:
            anomaly.check_tensors_finite(f"{self.name}: result", self.results, _as_tuple(outputs))
        return outputs

    def choose(self, inputs: tuple[Any, ...]) -> Implementation:
        """Return the implementation that computes these inputs, or raise if there is no such kernel or algorithm."""
        algorithm = "fastest" if self._algorithm is None else inputs[self._algorithm]
        if algorithm in ("fastest", "fused"):
            if (kernel := find_kernel(self.name, *inputs)) is not None:
                return kernel
            if algorithm == "fused" and "fused" not in self.portable:
                reason = missing_kernel(self.name, *inputs)
                raise RuntimeError(
                    f"{self.name}: no compiled kernel: {reason}. SsdPath() takes the fastest one available."
                )
            algorithm = self._fastest(*inputs) if algorithm == "fastest" else algorithm
        if algorithm not in self.portable:
            expected = ", ".join(("fastest", *self.portable, "fused"))
            raise ValueError(f"{self.name}: the path's algorithm must be one of {expected}, got {algorithm!r}")
        return self.portable[algorithm]

    def _run_node(self, *inputs: Any) -> Any:
        implementation = self.choose(inputs)
        outputs = implementation.forward(*inputs)
        if implementation.backward is not None:
            return outputs
        # Torch code may return views of its inputs, which a node must not.
        copies = [x.clone(memory_format=torch.contiguous_format) for x in _as_tuple(outputs)]
        return tuple(copies) if self._outputs > 1 else copies[0]

    def _run_backward(self, *arguments: Any) -> Any:
        cotangents, inputs = arguments[: self._outputs], arguments[self._outputs :]
        implementation = self.choose(inputs)
        if implementation.backward is not None:
            return implementation.backward(*arguments)
        grads = gradients(implementation.forward, cotangents, inputs, self.differentiable)
        return grads if self.differentiable > 1 else grads[0]

    def _fake_outputs(self, *inputs: Any) -> Any:
        self._check_no_onnx()
        return self._fake(*inputs)

    def _fake_backward(self, *arguments: Any) -> Any:
        grads = tuple(
            arguments[0].new_empty(0) if x is None else allocate_like(x)[0]
            for x in arguments[self._outputs : self._outputs + self.differentiable]
        )
        return grads if self.differentiable > 1 else grads[0]

    def _differentiate(self, ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
        inputs = [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]
        grads = _as_tuple(self._backward_node(*cotangents, *inputs))
        input_grads = [None if x is None else grad for x, grad in zip(inputs, grads, strict=False)]
        return (*input_grads, *(None for _ in inputs[self.differentiable :]))

    def _reject_second_order(self, *_: Any) -> None:
        raise RuntimeError(
            f"anymamba::{self.name} has no second derivative: its backward is derived by hand. Inside "
            "anymamba.portable() everything is computed in torch's own operators, which have one."
        )

    def _check_no_onnx(self) -> None:
        """Raise `RuntimeError` during an export to ONNX, which has no such operator."""
        check_onnx_exporter()
        if torch.onnx.is_in_onnx_export():
            raise RuntimeError(
                f"ONNX has no operator anymamba::{self.name}: call torch.onnx.export inside `with anymamba.portable():`"
            )

    def _check_no_transform(self, inputs: tuple[Any, ...]) -> None:
        """Raise `NotImplementedError` for transforms that torch would ignore, or reject with an unrelated message."""
        hint = "inside anymamba.portable() there is one"
        if forward_ad._current_level >= 0 and any(
            isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in inputs
        ):
            raise NotImplementedError(
                f"anymamba::{self.name} has no forward-mode derivative (jvp), only a backward; {hint}"
            )
        transform = torch._C._functorch.peek_interpreter_stack()
        if transform is not None and transform.key() == torch._C._functorch.TransformType.Grad:
            raise NotImplementedError(
                f"anymamba::{self.name} has no torch.func.grad; use torch.autograd.grad or backward(); {hint}"
            )


def allocate_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return contiguous tensors of the same shapes, dtypes and devices, without values."""
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors)


def gradients(
    function: Callable[..., Any], cotangents: tuple[Tensor, ...], inputs: tuple[Any, ...], differentiable: int
) -> tuple[Tensor, ...]:
    """Return the gradients of the leading inputs of plain torch code, which is run again; empty tensors for None.

    It may be called inside an operator, where torch has switched autograd off.
    """
    with _autograd():
        leaves = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in inputs[:differentiable]]
        outputs = _as_tuple(function(*leaves, *inputs[differentiable:]))
        pairs = [(y, dy) for y, dy in zip(outputs, cotangents, strict=True) if y.requires_grad]
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        grads = iter(
            torch.autograd.grad([y for y, _ in pairs], tensors, [dy for _, dy in pairs], materialize_grads=True)
            if pairs
            else [torch.zeros_like(x) for x in tensors]
        )
    return tuple(next(grads).contiguous() if isinstance(x, Tensor) else cotangents[0].new_empty(0) for x in leaves)


@contextmanager
def _autograd() -> Iterator[None]:
    """Switch autograd on, also inside an operator."""
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_AUTOGRAD, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_AUTOGRAD, excluded)


def check_onnx_exporter() -> None:
    """Raise `RuntimeError` in torch's former exporter to ONNX, which lacks operators that every block needs."""
    if (
        not torch.compiler.is_compiling()
        and torch.onnx.is_in_onnx_export()
        and torch._C._get_tracing_state() is not None
    ):
        raise RuntimeError(
            "torch.onnx.export(dynamo=False) is not supported: pass dynamo=True, inside `with anymamba.portable():`"
        )


def is_tracing() -> bool:
    """Return whether anything observes the operations: a tracer, a transform, a mode, or forward-mode autograd."""
    return (
        torch.compiler.is_compiling()
        or torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def is_eager_no_grad(inputs: tuple[Any, ...]) -> bool:
    """Return whether the inputs are ordinary tensors that neither autograd nor a tracer follows."""
    return not is_tracing() and _are_ordinary(inputs) and not _wants_gradient(inputs)


def are_dense_tensors(inputs: tuple[Any, ...]) -> bool:
    """Return whether all are tensors whose values are those in their memory: not subclasses, and not lazily negated.

    It is called for every token, so it is written for speed.
    """
    for x in inputs:  # noqa: SIM110
        if type(x) not in _ORDINARY or x.is_neg():
            return False
    return True


def has_no_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module runs its class's `forward` only: no hooks, no patched `forward`."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or any(_ALL_GLOBAL_HOOKS)
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None
    )


def _are_ordinary(inputs: tuple[Any, ...]) -> bool:
    """Return whether the tensors among the inputs are dense."""
    return are_dense_tensors(tuple(x for x in inputs if isinstance(x, Tensor)))


def _wants_gradient(inputs: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs if isinstance(x, Tensor))


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.others = [x for x in inputs if not isinstance(x, Tensor)]


def _schema(arguments: str, results: int) -> str:
    return f"({arguments}) -> " + ("Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})")


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
