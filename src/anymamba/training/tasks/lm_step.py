"""The arithmetic of a step: the cost of a batch, the states of streams, and the search for what is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anymamba.core.cache_io import check_tensor_names
from anymamba.models.cache import LMCache
from anymamba.models.lm import MambaLM
from anymamba.training.data.batches import Batch
from anymamba.training.distributed.fsdp import local


def autocast(model: nn.Module, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Autocast if the computation is narrower than the weights."""
    weight = next(model.parameters())
    return nullcontext() if dtype == weight.dtype else torch.autocast(weight.device.type, dtype)


def batch_loss_sum(
    model: MambaLM, batch: Batch, carried: LMCache | None, dtype: torch.dtype, *, kept: bool = True
) -> tuple[Tensor, LMCache | None]:
    """The negative log-likelihood of a batch's targets, added up, and the state after each of its rows.

    Args:
        model: the language model.
        batch: on the model's device.
        carried: the state of each row after the step before; None if all rows start afresh.
        dtype: of the computation.
        kept: whether the state is wanted.

    Returns:
        A scalar in float32 or wider, and the new state of each row, without its history.
    """
    with autocast(model, dtype):
        cache = None
        if carried is not None and bool((batch.carried < len(batch.last)).any()):
            fresh = model.init_cache(1).to(dtype=dtype)
            cache = LMCache.cat([carried, fresh]).rows(batch.carried)
        output = model(
            batch.inputs,
            cache,
            targets=batch.targets,
            cu_seqlens=batch.cu_seqlens,
            logits="none",
            context=batch.context,
        )
    assert output.nats is not None
    return output.nats, _states_of_rows(output.cache.detach(), batch) if kept else None


def _states_of_rows(cache: LMCache, batch: Batch) -> LMCache:
    """The state after each row of a batch, from those after its sequences; also of rows that end on another worker."""
    found = cache.rows(batch.last.clamp(min=0))
    if batch.context is None:
        return found
    cp_group, here = batch.context.cp_group, batch.last >= 0
    return found.with_tensors(cp_group.broadcast_rows(x, here) for x in found.leaves())


def carried_from(model: MambaLM, tensors: Mapping[str, Any], streams: int, parts: Iterable[slice]) -> list[LMCache]:
    """The states of some streams, from the tensors of all by name; the others are not read.

    Raises:
        ValueError: the tensors belong to other streams or to another model.
    """
    fresh = model.init_cache(1)
    expected = fresh.tensors()
    check_tensor_names("carried", tensors, expected)
    for name, x in expected.items():
        if tuple(tensors[name].shape) != (shape := (streams, *x.shape[1:])):
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensors[name].shape)}")
    return [fresh.with_tensors(tensors[name][rows].to(model.device) for name in expected) for rows in parts]


def first_non_finite(
    model: nn.Module, compute: Callable[[], Tensor], agreed: Callable[[bool], bool] = lambda here: here
) -> str:
    """Where a value or gradient that is not finite first appears.

    Args:
        model: whose modules are watched.
        compute: runs the model and returns what to differentiate.
        agreed: whether something is true on any worker; all workers compute the same steps.

    Returns:
        Words that name the module; empty if it appears on another worker.
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

    wrong = [name for name, parameter in model.named_parameters() if not torch.isfinite(local(parameter)).all()]
    if agreed(bool(wrong)):
        return f"the parameter {wrong[0]}" if wrong else ""
    handles = [m.register_forward_hook(partial(watch, name)) for name, m in model.named_modules() if name]
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled modules cannot be watched
            total = compute()
        if not seen and not torch.isfinite(total).all():
            seen.append("the loss itself")
        if not agreed(bool(seen)):
            total.backward()
    finally:
        for handle in handles:
            handle.remove()
    seen += [
        f"the gradient of {name}"
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not torch.isfinite(local(parameter.grad)).all()
    ]
    if agreed(bool(seen)):
        return seen[0] if seen else ""
    return "the norm of the gradient, whose square overflows"


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for x in output:
            yield from _tensors(x)
