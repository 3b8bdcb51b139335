"""Weights on several ranks, and their gradients: sharded by rows, or the same on each.

`fully_shard` (FSDP2) divides the rows of every parameter over the ranks of a mesh, gathers those of a layer while it is
computed, and reduces gradients to the ranks that hold their rows. The optimizer updates the rows of its own rank. Where
a whole matrix is needed (by Muon, and for the finished model), its rows are gathered. Checkpoints store the shards.

Losses are already divided by the targets of all ranks, so gradients are summed, not averaged: `all_reduce_grads` sums
those of replicated weights, and FSDP2 sums those of sharded weights in the backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from anymamba.core.io import check_tensor_names
from anymamba.models.stack.residual_layer import ResidualLayer
from anymamba.training.checkpoint.sharded_tensors import TensorShard
from anymamba.training.distributed.process_group import World

Reduction = Literal["float32", "bfloat16"]
_BUCKET_NUMEL = 2**23  # numbers of gradients that are sent at once: 32 MiB in float32


class ParamShard(NamedTuple):
    """Which rows of a parameter, or of a part of one, each rank holds."""

    bounds: list[int]  # first row of each rank, followed by the number of all rows
    rank: int  # this rank's index in the group
    group: Any  # process group of the ranks

    @staticmethod
    def of(parameter: Tensor, begin: int = 0, rows: int | None = None) -> ParamShard | None:
        """Return which ranks hold `rows` rows (None: all) of a parameter from `begin` on; None if it is not sharded."""
        if not _is_sharded(parameter):
            return None
        rows = len(parameter) if rows is None else rows
        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        group, size = mesh.get_group("shard"), mesh["shard"].size()
        rows_per_rank = -(-parameter.shape[0] // size)  # as `torch.chunk` divides
        cuts = [min(rank * rows_per_rank, parameter.shape[0]) for rank in range(size + 1)]
        bounds = [min(max(cut - begin, 0), rows) for cut in cuts]
        return ParamShard(bounds, mesh.get_local_rank("shard"), group)

    @property
    def local_rows(self) -> slice:
        """Return the rows that this rank holds."""
        return slice(self.bounds[self.rank], self.bounds[self.rank + 1])

    def to_tensor_shard(self, rows: Tensor) -> TensorShard:
        """Return this rank's rows in the form in which a checkpoint stores them."""
        return TensorShard(rows, ((self.local_rows.start, self.local_rows.stop),), self.bounds[-1])

    def gather(self, rows: Tensor) -> Tensor:
        """Return all rows, given those of each rank; every rank of the group takes part."""
        sizes = [b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)]
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])


def local(x: Tensor) -> Tensor:
    """Return this rank's rows of a tensor, sharing its memory."""
    return x.detach().to_local() if _is_sharded(x) else x  # type: ignore[attr-defined]


def shard_model(model: nn.Module, world: World, reduction: Reduction) -> None:
    """Divide a model's weights over the ranks, layer by layer; it must be the same on all of them."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes half a second, and few need it

    mesh = world.mesh
    assert mesh is not None
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if reduction == "bfloat16" else None)
    for layer in [module for module in model.modules() if isinstance(module, ResidualLayer)]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in _fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)  # losses are already divided by the targets of all ranks
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        # Lay out the memory that the first gathering makes, before the optimizer takes views of it.
        module.unshard()
        module.reshard()


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device."""

    def to_meta(x: Tensor) -> Tensor:
        empty = torch.empty_like(x, device="meta")
        return nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty

    return copy.deepcopy(model, {id(x): to_meta(x) for x in [*model.parameters(), *model.buffers()]})


def with_state(model: nn.Module, tensors: Mapping[str, Any]) -> Any:
    """Return a copy of a model on the meta device with values, whose memory it shares."""
    filled = copy.deepcopy(model)
    filled.load_state_dict(tensors, assign=True)
    return filled


def full_state_dict(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Gather the whole weights of a sharded model by name, one at a time; only ranks that `keep` them return them."""
    tensors = {}
    for name, x in _unique_state(model).items():
        shard = ParamShard.of(x)
        whole = x.detach() if shard is None else shard.gather(local(x))
        if keep:
            tensors[name] = whole
    return tensors


def local_state_dict(model: nn.Module) -> dict[str, Tensor | TensorShard]:
    """Return the weights by name; of sharded ones, this rank's rows."""
    tensors: dict[str, Tensor | TensorShard] = {}
    for name, x in _unique_state(model).items():
        shard = ParamShard.of(x)
        rows = local(x).detach()
        tensors[name] = rows if shard is None else shard.to_tensor_shard(rows)
    return tensors


def load_local(model: nn.Module, stored: Mapping[str, Any]) -> None:
    """Set this rank's weights from those of the whole model, of which nothing else is read."""
    state = _unique_state(model)
    check_tensor_names("model: the weights", stored, state)
    for name, x in state.items():
        if tuple(stored[name].shape) != tuple(x.shape):
            raise ValueError(f"{name} must have shape {tuple(x.shape)}, got {tuple(stored[name].shape)}")
        shard = ParamShard.of(x)
        local(x).detach().copy_(stored[name][...] if shard is None else stored[name][shard.local_rows])


def _unique_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that a file stores, each under its first name."""
    first_names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, x in state.items():
        first_names.setdefault(id(x), name)
    return {name: state[name] for name in first_names.values()}


def map_round_robin(function: Callable[[Tensor], Tensor], tensors: list[Tensor], world: World) -> list[Tensor]:
    """Apply a function to tensors that all ranks have; the ranks take turns to compute a result and broadcast it.

    The function returns a tensor of the same shape and dtype.
    """
    if world.size == 1:
        return [function(x) for x in tensors]
    owners = [number % world.size for number in range(len(tensors))]
    results = [
        function(x).contiguous() if owner == world.rank else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, owner in zip(tensors, owners, strict=True)
    ]
    world.set_activity("to share updates")
    for result, owner in zip(results, owners, strict=True):
        dist.broadcast(result, owner)
    return results


def all_reduce_grads(parameters: Iterable[Tensor], world: World, reduction: Reduction) -> None:
    """Sum the gradients of parameters that all ranks hold, in place; a missing gradient counts as zero."""
    trained = [p for p in parameters if p.requires_grad]
    for p in trained:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for bucket in _buckets([p.grad for p in trained if p.grad is not None]):
        flat = _flatten_dense_tensors(bucket)
        total = flat.bfloat16() if reduction == "bfloat16" else flat
        world.all_reduce_sum(total, "to sum gradients")
        for grad, part in zip(bucket, _unflatten_dense_tensors(total.to(flat.dtype), bucket), strict=True):
            grad.copy_(part)


def _buckets(grads: list[Tensor]) -> list[list[Tensor]]:
    """Group gradients of one dtype into buckets, the same on every rank."""
    buckets: list[list[Tensor]] = []
    numel = 0
    for grad in sorted(grads, key=lambda g: str(g.dtype)):
        if not buckets or numel + grad.numel() > _BUCKET_NUMEL or buckets[-1][0].dtype != grad.dtype:
            buckets.append([])
            numel = 0
        buckets[-1].append(grad)
        numel += grad.numel()
    return buckets


def reshard(model: nn.Module) -> None:
    """Free the gathered weights of a sharded model: without a backward pass, those of its last layers stay."""
    for module in _fsdp_modules(model):
        module.reshard()


def set_last_microbatch(model: nn.Module, is_last: bool) -> None:
    """Set whether the next backward pass is the last of a step: gradients are summed over replicas only then."""
    for module in _fsdp_modules(model):
        module.set_requires_all_reduce(is_last)


def _fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called on."""
    return [module for module in model.modules() if hasattr(module, "set_requires_all_reduce")]


def _is_sharded(x: Tensor) -> bool:
    """Return whether a tensor is a `DTensor`, without importing its module."""
    return hasattr(x, "device_mesh")
