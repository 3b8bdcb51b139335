"""Weights and gradients that several workers hold: divided between them by rows, or the same on each.

`fully_shard` (FSDP2) divides the rows of every parameter over the workers of a mesh, gathers those of a layer when it
is computed, and adds up gradients where their rows lie. An optimizer moves the rows that lie here. Where it needs a
whole matrix, and for the finished model, the rows are gathered. A checkpoint has pieces.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from anymamba.core.cache_io import check_tensor_names
from anymamba.models.stack.residual_layer import ResidualLayer
from anymamba.training.checkpoint.sharded_tensors import TensorShard
from anymamba.training.distributed.process_group import World

Reduction = Literal["float32", "bfloat16"]
_BUCKET = 2**23  # numbers of a gradient that are sent at once: 32 MiB in float32


class ParamShard(NamedTuple):
    """Which rows of a tensor lie on which worker.

    Attributes:
        bounds: the first row of each worker, and then the number of all rows.
        place: of this worker.
        group: of the workers.
    """

    bounds: list[int]
    place: int
    group: Any

    @staticmethod
    def of(parameter: Tensor, begin: int, rows: int) -> ParamShard | None:
        """The share of some rows of a parameter, counted from 0; None if all of them are here."""
        if not _is_divided(parameter):
            return None
        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        group, size = mesh.get_group("shard"), mesh["shard"].size()
        most = -(-parameter.shape[0] // size)  # as `torch.chunk` divides
        cuts = [min(worker * most, parameter.shape[0]) for worker in range(size + 1)]
        bounds = [min(max(cut - begin, 0), rows) for cut in cuts]
        return ParamShard(bounds, mesh.get_local_rank("shard"), group)

    @property
    def here(self) -> slice:
        """The rows that lie here."""
        return slice(self.bounds[self.place], self.bounds[self.place + 1])

    def piece(self, rows: Tensor) -> TensorShard:
        """The rows that lie here, for a file."""
        return TensorShard(rows, ((self.here.start, self.here.stop),), self.bounds[-1])

    def whole(self, rows: Tensor) -> Tensor:
        """All rows, from those that lie here; every worker of the group takes part."""
        sizes = [b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)]
        most = max(sizes)
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: len(rows)] = rows
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(found, sizes, strict=True)])


def local(x: Tensor) -> Tensor:
    """The rows of a tensor that lie here, sharing its memory."""
    return x.detach().to_local() if _is_divided(x) else x  # type: ignore[attr-defined]


def shard_model(model: nn.Module, world: World, reduction: Reduction) -> None:
    """Divide a model's weights between the workers, layer by layer; it must be the same on all of them."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes half a second, and few need it

    mesh = world.mesh
    assert mesh is not None
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if reduction == "bfloat16" else None)
    for layer in [module for module in model.modules() if isinstance(module, ResidualLayer)]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in _divided(model):
        module.set_gradient_divide_factor(1.0)  # costs are already divided by the targets of all workers
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        # Lay out the memory that the first gathering makes, before the optimizer takes views of it.
        module.unshard()
        module.reshard()


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy without values."""
    held = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(x): _valueless(x) for x in held})


def _valueless(x: Tensor) -> Tensor:
    found = torch.empty_like(x, device="meta")
    return nn.Parameter(found, x.requires_grad) if isinstance(x, nn.Parameter) else found


def with_state(model: nn.Module, tensors: Mapping[str, Any]) -> Any:
    """A copy of a skeleton, with values that it shares."""
    found = copy.deepcopy(model)
    found.load_state_dict(tensors, assign=True)
    return found


def full_state_dict(model: nn.Module, wanted: bool) -> dict[str, Tensor]:
    """The whole weights by name, if they are `wanted`; every worker takes part, and holds one of them at a time."""
    found = {}
    for name, x in _state(model).items():
        share = ParamShard.of(x, 0, len(x)) if _is_divided(x) else None
        whole = x.detach() if share is None else share.whole(local(x))
        if wanted:
            found[name] = whole
    return found


def local_state_dict(model: nn.Module) -> dict[str, Tensor | TensorShard]:
    """The weights by name; of divided ones, the rows that lie here."""
    shares = {name: ParamShard.of(x, 0, len(x)) if _is_divided(x) else None for name, x in _state(model).items()}
    held = {name: local(x).detach() for name, x in _state(model).items()}
    return {name: x if (share := shares[name]) is None else share.piece(x) for name, x in held.items()}


def load_local(model: nn.Module, stored: Mapping[str, Any]) -> None:
    """Set the weights that lie here from those of the whole model; the others are not read.

    Raises:
        ValueError: they belong to another model.
    """
    held = _state(model)
    check_tensor_names("model", stored, held)
    for name, x in held.items():
        if tuple(stored[name].shape) != tuple(x.shape):
            raise ValueError(f"{name} must have shape {tuple(x.shape)}, got {tuple(stored[name].shape)}")
        share = ParamShard.of(x, 0, len(x)) if _is_divided(x) else None
        local(x).detach().copy_(stored[name][...] if share is None else stored[name][share.here])


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that a file has, each under its first name."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, x in state.items():
        first.setdefault(id(x), name)
    return {name: state[name] for name in first.values()}


def map_round_robin(function: Callable[[Tensor], Tensor], tensors: list[Tensor], world: World) -> list[Tensor]:
    """`function` of some tensors that all workers have; one worker computes each result and sends it to all.

    `function` returns a tensor of the same shape and dtype.
    """
    if world.size == 1:
        return [function(x) for x in tensors]
    owners = [number % world.size for number in range(len(tensors))]
    found = [
        function(x).contiguous() if owner == world.rank else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, owner in zip(tensors, owners, strict=True)
    ]
    world.set_activity("to share updates")
    for y, owner in zip(found, owners, strict=True):
        dist.broadcast(y, owner)
    return found


def reshard(model: nn.Module) -> None:
    """Keep only the rows of a divided model that lie here: without a backward pass, its last parts stay gathered."""
    for module in _divided(model):
        module.reshard()


def set_last_microbatch(model: nn.Module, last: bool) -> None:
    """Set whether the next backward pass is the last of a step: replicas add up their gradients only then."""
    for module in _divided(model):
        module.set_requires_all_reduce(last)


def all_reduce_grads(parameters: Iterable[Tensor], world: World, reduction: Reduction) -> None:
    """Add up the gradients of weights that are the same on all workers, in place; a missing one counts as zero."""
    held = [p for p in parameters if p.requires_grad]
    for p in held:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for bucket in _buckets([p.grad for p in held if p.grad is not None]):
        flat = _flatten_dense_tensors(bucket)
        sent = flat.bfloat16() if reduction == "bfloat16" else flat
        world.all_reduce_sum(sent, "to add up gradients")
        for grad, total in zip(bucket, _unflatten_dense_tensors(sent.to(flat.dtype), bucket), strict=True):
            grad.copy_(total)


def _buckets(grads: list[Tensor]) -> list[list[Tensor]]:
    """Gradients of one dtype, some at a time, in the same order on every worker."""
    found: list[list[Tensor]] = []
    size = 0
    for grad in sorted(grads, key=lambda g: str(g.dtype)):
        if not found or size + grad.numel() > _BUCKET or found[-1][0].dtype != grad.dtype:
            found.append([])
            size = 0
        found[-1].append(grad)
        size += grad.numel()
    return found


def _divided(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on."""
    return [module for module in model.modules() if hasattr(module, "set_requires_all_reduce")]


def _is_divided(x: Tensor) -> bool:
    """Whether a tensor is a `DTensor`; finds out without importing its module."""
    return hasattr(x, "device_mesh")
