"""The optimizer: which parameters are decayed, which are orthogonalized, and `learning_rate`, that of each step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anymamba.models.lm import MambaLM
from anymamba.models.sequence.sequence_model import SequenceModel
from anymamba.training.checkpoint.sharded_tensors import TensorShard
from anymamba.training.config.sections import OptimizerSection, ScheduleSection
from anymamba.training.distributed.fsdp import ParamShard, local
from anymamba.training.distributed.process_group import World
from anymamba.training.optim.muon import Muon

# The state of each optimizer for a parameter.
_ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}
_MUON_STATE = {"momentum"}


def parameter_groups(
    model: nn.Module, weight_decay: float = 0.1, *, decay_embeddings: bool = False
) -> list[dict[str, Any]]:
    """Split a model's parameters into two groups for an optimizer of torch: with weight decay, and without.

    The weights of projections (`nn.Linear`) are decayed. Step sizes, decay rates, skips, norms, biases, convolutions,
    the weights of MIMO and initial states are not: they have a scale of their own. The embedding and the head of a
    `MambaLM`, wherever it is in the model, are decayed only if `decay_embeddings` is set.

        torch.optim.AdamW(parameter_groups(model), lr=1e-3)
    """
    return _decay_groups(*_by_decay(model, decay_embeddings), weight_decay)


def hidden_matrices(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of projections except the outer ones (embedding and head, or first and last), by name."""
    parts = [part for part in model.modules() if isinstance(part, SequenceModel)]
    outer = {id(linear.weight) for part in parts for linear in part.outer_projections()}
    return {name: p for name, p in _projections(model).items() if id(p) not in outer}


def _projections(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of all projections except the heads of language models, by name."""
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    embeddings = {id(p) for p in _embeddings(model).values()}
    return {name: p for name, p in model.named_parameters() if id(p) in linear - embeddings}


def _by_decay(model: nn.Module, decay_embeddings: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters that are decayed, and those that are not, by name."""
    decayed = {**_projections(model), **(_embeddings(model) if decay_embeddings else {})}
    return decayed, {name: p for name, p in model.named_parameters() if name not in decayed}


def _decay_groups(decayed: dict[str, Tensor], others: dict[str, Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameters as groups of an optimizer of torch."""
    return [
        {"params": list(decayed.values()), "weight_decay": weight_decay},
        {"params": list(others.values()), "weight_decay": 0.0},
    ]


def _embeddings(model: nn.Module) -> dict[str, Tensor]:
    """Return the embeddings, and the heads that are separate parameters, by name."""
    weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights |= {id(m.lm_head.weight) for m in model.modules() if isinstance(m, MambaLM)}
    return {name: p for name, p in model.named_parameters() if id(p) in weights}


class PlanRow(NamedTuple):
    """Which optimizer updates a parameter, or a part of one."""

    name: str  # of the parameter, with the part in brackets
    shape: tuple[int, ...]
    owner: str  # "Muon" or "AdamW"
    decayed: bool  # whether weight decay applies
    fraction: float  # of all elements of the model


def plan(model: nn.Module, config: OptimizerSection | None = None) -> list[PlanRow]:
    """Return which optimizer updates what: a row for each parameter or part, in the order of the optimizers' groups.

    Args:
        model: The model, as it will be trained.
        config: Config of the optimizer; Muon's defaults if omitted.
    """
    return Optimizer(model, config or OptimizerSection(kind="muon")).plan()


def plan_table(rows: list[PlanRow]) -> str:
    """Format a plan as a table: equal layers share a row, and the last rows add up what each optimizer updates."""
    merged: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        name = re.sub(r"(^|\.)\d+\.", r"\1*.", row.name)
        merged.setdefault((name, row.shape, row.owner, row.decayed), []).append(row.fraction)
    lines = [("parameter", "shape", "times", "updated by", "decayed", "fraction")]
    for (name, shape, owner, decayed), fractions in merged.items():
        size = " x ".join(map(str, shape)) or "1"
        lines.append((name, size, str(len(fractions)), owner, "yes" if decayed else "no", f"{sum(fractions):.1%}"))
    for owner in ("Muon", "AdamW"):
        fraction = sum(row.fraction for row in rows if row.owner == owner)
        lines.append(("all", "", str(sum(row.owner == owner for row in rows)), owner, "", f"{fraction:.1%}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


class Optimizer:
    """AdamW; or Muon for the hidden matrices, cut into their parts, and AdamW for the rest.

    Create it once the parameters are where they will stay: a part is a view of its parameter, with its own gradient and
    state.
    """

    def __init__(self, model: nn.Module, config: OptimizerSection, world: World | None = None) -> None:
        """Sort the parameters into groups; the ranks of `world` divide Muon's work."""
        decayed, others = _by_decay(model, config.decay_embeddings)
        matrices: dict[str, Tensor] = {}
        self._parts: list[tuple[Tensor, Tensor, int]] = []  # a view, the parameter, the first of its rows
        self._shards: dict[str, ParamShard] = {}  # of parameters that are sharded
        cut = hidden_matrices(model) if config.kind == "muon" else {}
        for name, weight in {**decayed, **others}.items():
            if name not in cut:
                group = decayed if name in decayed else others
                group[name] = self._local_rows(name, weight, 0, len(weight) if weight.ndim else 1)
        for name in cut:
            weight = decayed.pop(name)
            for key, begin, rows, is_matrix in _cut(model, name, weight):
                is_excluded = any(_is_named(key, chosen) for chosen in config.muon_exclude)
                part = self._local_rows(key, weight, begin, rows)
                (matrices if is_matrix and not is_excluded else decayed)[key] = part
        if config.kind == "muon":
            _check_named(config.muon_exclude, [*matrices, *decayed])
        self._decayed = {*decayed, *matrices} if config.weight_decay else set()
        adam = torch.optim.AdamW(
            _decay_groups(decayed, others, config.weight_decay),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=next(model.parameters()).device.type in ("cpu", "cuda"),
        )
        self._model = model
        self._optimizers: list[torch.optim.Optimizer] = [adam]
        self._states = {name: (x, adam.state) for name, x in {**decayed, **others}.items()}
        if matrices:
            lr = config.lr if config.muon_lr is None else config.muon_lr
            shards = {x: self._shards[name] for name, x in matrices.items() if name in self._shards}
            muon = Muon(
                matrices.values(),
                lr=lr,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                shards=shards,
                world=world,
            )
            self._optimizers.append(muon)
            self._states |= {name: (x, muon.state) for name, x in matrices.items()}
        self._groups = [(group, group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    def _local_rows(self, name: str, weight: Tensor, begin: int, rows: int) -> Tensor:
        """Return this rank's rows among some rows of a parameter: the parameter itself, or a view of it."""
        shard = ParamShard.of(weight, begin, rows)
        if shard is None and rows == (len(weight) if weight.ndim else 1):
            return weight
        if shard is not None:
            self._shards[name] = shard
            first = ParamShard.of(weight).local_rows.start  # type: ignore[union-attr]
            begin, rows = begin + shard.local_rows.start - first, shard.local_rows.stop - shard.local_rows.start
        part = local(weight).detach()[begin : begin + rows] if rows else local(weight).detach()[:0]
        self._parts.append((part, weight, begin))
        return part

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter or part with the rows of all ranks."""
        shape, shard = self._states[name][0].shape, self._shards.get(name)
        return tuple(shape) if shard is None else (shard.bounds[-1], *shape[1:])

    def plan(self) -> list[PlanRow]:
        """Return which optimizer updates what."""
        sizes, adam = {name: math.prod(self._shape(name)) for name in self._states}, self._optimizers[0].state
        total, owners = sum(sizes.values()), ("Muon", "AdamW")
        return [
            PlanRow(name, self._shape(name), owners[state is adam], name in self._decayed, sizes[name] / total)
            for name, (_, state) in self._states.items()
        ]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._model.zero_grad(set_to_none=True)

    def step(self, lr_scale: float) -> None:
        """Update the parameters; `lr_scale` is the fraction of the largest learning rate."""
        for group, largest in self._groups:
            group["lr"] = lr_scale * largest
        for part, whole, begin in self._parts:
            part.grad = None if whole.grad is None else local(whole.grad)[begin : begin + len(part)]
        for optimizer in self._optimizers:
            optimizer.step()
        for part, _, _ in self._parts:
            part.grad = None

    def tensors(self) -> dict[str, Tensor | TensorShard]:
        """Return the state by name: "backbone.norm_f.weight.exp_avg",
        "backbone.layers.0.mixer.in_proj.weight[x].momentum".

        Sharded tensors have this rank's rows.
        """
        return {
            f"{name}.{key}": x if key == "step" or name not in self._shards else self._shards[name].to_tensor_shard(x)
            for name, (tensor, states) in self._states.items()
            for key, x in states.get(tensor, {}).items()
        }

    def restore(self, tensors: Mapping[str, Any]) -> None:
        """Set the state, of which only this rank's rows are read.

        Args:
            tensors: All rows by name, as `tensors` of a single process returns them or as a checkpoint stores them.

        Raises:
            KeyError: There is no such parameter.
            ValueError: A state is incomplete, or has another shape or dtype than the parameter.
        """
        states_by_name: dict[str, dict[str, Any]] = {}
        for key, x in tensors.items():
            name, _, field = key.rpartition(".")
            states_by_name.setdefault(name, {})[field] = x
        for name, fields in states_by_name.items():
            tensor, states = self._states[name]
            expected = _ADAM_STATE if states is self._optimizers[0].state else _MUON_STATE
            if fields.keys() != expected and fields.keys() in (_ADAM_STATE, _MUON_STATE):
                old, new = ("AdamW", "Muon") if fields.keys() == _ADAM_STATE else ("Muon", "AdamW")
                raise ValueError(f"{name} was updated by {old} when this run began, and is now updated by {new}")
            if fields.keys() != expected:
                raise ValueError(f"{name} must have {sorted(expected)}, got {sorted(fields)}")
            shape, shard = self._shape(name), self._shards.get(name)
            for field, x in fields.items():
                kind = (torch.float32, ()) if field == "step" else (tensor.dtype, tuple(shape))
                if (x.dtype, tuple(x.shape)) != kind:
                    expected_kind, got = (
                        f"{dtype} of shape {size}" for dtype, size in (kind, (x.dtype, tuple(x.shape)))
                    )
                    raise ValueError(f"{name}.{field} must be {expected_kind}, got {got}")
                rows = x[...] if field == "step" or shard is None else x[shard.local_rows]
                states[tensor][field] = rows.to(tensor.device, copy=True)


def _cut(model: nn.Module, name: str, weight: Tensor) -> Iterator[tuple[str, int, int, bool]]:
    """Yield the parts of a weight: name, first row, number of rows, and whether it is a matrix."""
    path, _, projection = name.removesuffix(".weight").rpartition(".")
    owner: Any = model.get_submodule(path)
    parts = owner.projection_parts().get(projection, ()) if hasattr(owner, "projection_parts") else ()
    if not parts:
        yield name, 0, len(weight), True
        return
    if (total := sum(part.rows for part in parts)) != len(weight):
        raise ValueError(f"{name}: its parts must have as many rows as it, {len(weight)}, got {total}")
    begin = 0
    for part in parts:
        yield f"{name}[{part.name}]", begin, part.rows, part.is_matrix
        begin += part.rows


def _is_named(key: str, chosen: str) -> bool:
    """Return whether "in_proj[z]" or "in_proj" names a part such as "layers.0.mixer.in_proj.weight[z]"."""
    name = key.replace(".weight", "")
    return f".{name}".endswith(f".{chosen}") or f".{name.partition('[')[0]}".endswith(f".{chosen}")


def _check_named(chosen: Iterable[str], keys: list[str]) -> None:
    """Check that names of parts exist; the default may name those of another family."""
    default = OptimizerSection().muon_exclude
    if unknown := [name for name in chosen if name not in default and not any(_is_named(key, name) for key in keys)]:
        known = ", ".join(dict.fromkeys(key.replace(".weight", "").rpartition(".")[2] for key in keys))
        raise ValueError(f"optimizer.muon_exclude must name projections or their parts, as {known}, got {unknown[0]!r}")


def clip_gradients(model: nn.Module, largest: float, world: World | None = None) -> float:
    """Scale all gradients down if their common norm is above `largest` (0: never).

    Return the norm before clipping, over all ranks of a sharded model.
    """
    grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    if world is None or world.shard_size == 1:
        if largest and norm > largest:
            nn.utils.clip_grads_with_norm_(model.parameters(), largest, norm)
        return norm.item()
    norm = world.all_reduce_sum(norm.square(), "to add up the norm of a gradient", world.shard_group).sqrt()
    if largest and norm > largest:
        for grad in grads:
            grad.mul_(largest / (norm + 1e-6))
    return norm.item()


def learning_rate(step: int, largest: float, schedule: ScheduleSection) -> float:
    """Return the learning rate of step 0, 1, ..."""
    if step < schedule.warmup:
        return largest * (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return largest
    length = schedule.steps - schedule.warmup
    if schedule.kind == "wsd":
        length = min(length, round(schedule.decay * schedule.steps))
    done = 1 - (schedule.steps - step) / max(1, length)  # of the decay, from 0 to 1
    if done <= 0:
        return largest
    left = 1 - done if schedule.kind == "wsd" else (1 + math.cos(math.pi * done)) / 2
    return largest * (schedule.final + (1 - schedule.final) * left)
