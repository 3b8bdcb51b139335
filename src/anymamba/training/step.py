"""One step's arithmetic: the cost of a batch, states that streams carry, and the search for what is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM
from anymamba.models.loss import head_nats
from anymamba.training.data import Batch


def autocast(model: nn.Module, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Autocast where the computation is narrower than the weights."""
    weight = next(model.parameters())
    return nullcontext() if dtype == weight.dtype else torch.autocast(weight.device.type, dtype)


def batch_nats(model: MambaLM, batch: Batch, carried: LMCache | None, dtype: torch.dtype) -> tuple[Tensor, LMCache]:
    """The negative log-likelihood of a batch's targets, added up, and the state after each of its rows.

    Args:
        model: the language model.
        batch: on the model's device.
        carried: the state of each row, after the step before; None for a fresh start of all.
        dtype: of the computation.

    Returns:
        A scalar in float32 or wider, and the new state of each row, without its history.
    """
    with autocast(model, dtype):
        cache = None
        if carried is not None and bool((batch.carried < len(batch.last)).any()):
            fresh = model.init_cache(1).to(dtype=dtype)
            cache = LMCache.cat([carried, fresh]).rows(batch.carried)
        hidden_1td, new = model.backbone(batch.inputs, cache, cu_seqlens=batch.cu_seqlens)
        nats = head_nats(model.lm_head, hidden_1td[0], batch.targets[0])
    return nats, new.detach().rows(batch.last)


def carried_from(model: MambaLM, tensors: dict[str, Tensor]) -> LMCache:
    """The states of streams, from their tensors by name."""
    fresh: Any = model.init_cache(1).layers
    return LMCache(
        tuple(
            type(layer)(
                *(
                    tensors[f"layers.{i}.{name}"].to(model.device) if isinstance(x, Tensor) else x
                    for name, x in zip(layer._fields, layer, strict=True)
                )
            )
            for i, layer in enumerate(fresh)
        )
    )


def first_non_finite(model: nn.Module, compute: Callable[[], Tensor]) -> str:
    """Where a value or gradient that is not finite first appears.

    Args:
        model: whose modules are watched.
        compute: runs the model and returns what to differentiate.

    Returns:
        Words that name the module.
    """
    seen: list[str] = []

    def watch(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for x in _tensors(output):
            if not torch.isfinite(x).all():
                seen.append(f"the output of {name}")
            if x.requires_grad:
                x.register_hook(partial(look, f"the gradient at the output of {name}"))

    def look(what: str, gradient: Tensor | None) -> None:
        if gradient is not None and not torch.isfinite(gradient).all():
            seen.append(what)

    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"the parameter {name}"
    handles = [m.register_forward_hook(partial(watch, name)) for name, m in model.named_modules() if name]
    try:
        with torch.compiler.set_stance("force_eager"):  # where a module can be watched
            total = compute()
        if not seen and not torch.isfinite(total).all():
            seen.append("the loss itself")
        if not seen:
            total.backward()
    finally:
        for handle in handles:
            handle.remove()
    seen += [
        f"the gradient of {name}"
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all()
    ]
    return seen[0] if seen else "the norm of the gradient, whose square overflows"


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for x in output:
            yield from _tensors(x)
