"""The optimizer: which parameters are decayed, which are made orthogonal, and the learning rate of each step."""

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

# What the optimizers keep for a parameter.
_ADAM_STATE, _MUON_STATE = {"step", "exp_avg", "exp_avg_sq"}, {"momentum"}


def parameter_groups(
    model: nn.Module, weight_decay: float = 0.1, *, decay_embeddings: bool = False
) -> list[dict[str, Any]]:
    """A model's parameters in two groups for an optimizer of torch: those that are decayed, and those that are not.

    The weights of projections (`nn.Linear`) are decayed. Step sizes, decay rates, skips, norms, biases, convolutions,
    the weights of MIMO and initial states are not: they have a scale of their own. The embedding and the head of a
    `MambaLM`, wherever it is in the model, are decayed only if `decay_embeddings` says so.

        torch.optim.AdamW(parameter_groups(model), lr=1e-3)
    """
    decayed, others = _by_decay(model, decay_embeddings)
    return [
        {"params": list(decayed.values()), "weight_decay": weight_decay},
        {"params": list(others.values()), "weight_decay": 0.0},
    ]


def hidden_matrices(model: nn.Module) -> dict[str, Tensor]:
    """Weights of the projections between embedding and head, or between a model's first and last projection."""
    parts = [part for part in model.modules() if isinstance(part, SequenceModel)]
    outer = {id(linear.weight) for part in parts for linear in part.outer_projections()}
    return {name: p for name, p in _projections(model).items() if id(p) not in outer}


def _projections(model: nn.Module) -> dict[str, Tensor]:
    """Weights of all projections but the heads of language models, by name."""
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    embeddings = {id(p) for p in _embeddings(model).values()}
    return {name: p for name, p in model.named_parameters() if id(p) in linear - embeddings}


def _by_decay(model: nn.Module, decay_embeddings: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters by name: those that are decayed, and those that are not."""
    decayed = {**_projections(model), **(_embeddings(model) if decay_embeddings else {})}
    return decayed, {name: p for name, p in model.named_parameters() if name not in decayed}


def _embeddings(model: nn.Module) -> dict[str, Tensor]:
    """The embeddings, and heads that are separate parameters."""
    weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights |= {id(m.lm_head.weight) for m in model.modules() if isinstance(m, MambaLM)}
    return {name: p for name, p in model.named_parameters() if id(p) in weights}


class PlanRow(NamedTuple):
    """Which optimizer moves a parameter, or a part of one.

    Attributes:
        name: of the parameter, with the part in brackets.
        shape: of the parameter or part.
        owner: "Muon" or "AdamW".
        decayed: whether weight decay applies.
        share: its share of all numbers in the model.
    """

    name: str
    shape: tuple[int, ...]
    owner: str
    decayed: bool
    share: float


def plan(model: nn.Module, config: OptimizerSection | None = None) -> list[PlanRow]:
    """Which optimizer moves what: a row for each parameter or part, in the order of the optimizers' groups.

    Args:
        model: as it will be trained.
        config: of the optimizer; Muon's defaults if not given.
    """
    return Optimizer(model, config or OptimizerSection(kind="muon")).plan()


def plan_table(rows: list[PlanRow]) -> str:
    """A plan as a table: layers that are alike share a row, and the last rows add up what each optimizer moves."""
    merged: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        name = re.sub(r"(^|\.)\d+\.", r"\1*.", row.name)
        merged.setdefault((name, row.shape, row.owner, row.decayed), []).append(row.share)
    lines = [("parameter", "shape", "times", "moved by", "decayed", "share")]
    for (name, shape, owner, decayed), shares in merged.items():
        size = " x ".join(map(str, shape)) or "1"
        lines.append((name, size, str(len(shares)), owner, "yes" if decayed else "no", f"{sum(shares):.1%}"))
    for owner in ("Muon", "AdamW"):
        share = sum(row.share for row in rows if row.owner == owner)
        lines.append(("all", "", str(sum(row.owner == owner for row in rows)), owner, "", f"{share:.1%}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


class Optimizer:
    """AdamW; or Muon for the hidden matrices, cut into their parts, and AdamW for the rest.

    Make it once the parameters are where they will stay: a part is a view of its parameter, with its own gradient and
    state.
    """

    def __init__(self, model: nn.Module, config: OptimizerSection, world: World | None = None) -> None:
        """Sort the parameters into groups; several `workers` share Muon's work."""
        decayed, others = _by_decay(model, config.decay_embeddings)
        matrices: dict[str, Tensor] = {}
        self._parts: list[tuple[Tensor, Tensor, int]] = []  # a view, the parameter, the first of its rows
        self._shares: dict[str, ParamShard] = {}  # of parameters that workers have divided between them
        cut = hidden_matrices(model) if config.kind == "muon" else {}
        for name, weight in {**decayed, **others}.items():
            if name not in cut:
                group = decayed if name in decayed else others
                group[name] = self._here(name, weight, 0, len(weight) if weight.ndim else 1)
        for name in cut:
            weight = decayed.pop(name)
            for key, begin, rows, is_matrix in _cut(model, name, weight):
                is_taken = any(_is_named(key, chosen) for chosen in config.muon_exclude)
                part = self._here(key, weight, begin, rows)
                (matrices if is_matrix and not is_taken else decayed)[key] = part
        if config.kind == "muon":
            _check_named(config.muon_exclude, [*matrices, *decayed])
        self._decayed = {*decayed, *matrices} if config.weight_decay else set()
        adam = torch.optim.AdamW(
            [
                {"params": list(decayed.values()), "weight_decay": config.weight_decay},
                {"params": list(others.values()), "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=next(model.parameters()).device.type in ("cpu", "cuda"),
        )
        self._model = model
        self._optimizers: list[torch.optim.Optimizer] = [adam]
        self._owned = {name: (x, adam.state) for name, x in {**decayed, **others}.items()}
        if matrices:
            lr = config.lr if config.muon_lr is None else config.muon_lr
            shares = {x: self._shares[name] for name, x in matrices.items() if name in self._shares}
            muon = Muon(
                matrices.values(),
                lr=lr,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                shares=shares,
                world=world,
            )
            self._optimizers.append(muon)
            self._owned |= {name: (x, muon.state) for name, x in matrices.items()}
        self._groups = [(group, group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    def _here(self, name: str, weight: Tensor, begin: int, rows: int) -> Tensor:
        """The rows among these of a parameter that lie here: the parameter itself, or a view of it."""
        share = ParamShard.of(weight, begin, rows)
        if share is None and rows == (len(weight) if weight.ndim else 1):
            return weight
        if share is not None:
            self._shares[name] = share
            first = ParamShard.of(weight, 0, len(weight)).here.start  # type: ignore[union-attr]
            begin, rows = begin + share.here.start - first, share.here.stop - share.here.start
        part = local(weight).detach()[begin : begin + rows] if rows else local(weight).detach()[:0]
        self._parts.append((part, weight, begin))
        return part

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape with all rows, wherever they lie."""
        shape, share = self._owned[name][0].shape, self._shares.get(name)
        return tuple(shape) if share is None else (share.bounds[-1], *shape[1:])

    def plan(self) -> list[PlanRow]:
        """Which optimizer moves what."""
        sizes, adam = {name: math.prod(self._shape(name)) for name in self._owned}, self._optimizers[0].state
        total, owners = sum(sizes.values()), ("Muon", "AdamW")
        return [
            PlanRow(name, self._shape(name), owners[state is adam], name in self._decayed, sizes[name] / total)
            for name, (_, state) in self._owned.items()
        ]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._model.zero_grad(set_to_none=True)

    def step(self, share: float) -> None:
        """Move the parameters, at a share of the largest learning rate."""
        for group, largest in self._groups:
            group["lr"] = share * largest
        for part, whole, begin in self._parts:
            part.grad = None if whole.grad is None else local(whole.grad)[begin : begin + len(part)]
        for optimizer in self._optimizers:
            optimizer.step()
        for part, _, _ in self._parts:
            part.grad = None

    def tensors(self) -> dict[str, Tensor | TensorShard]:
        """The state by name: "backbone.norm_f.weight.exp_avg", "backbone.layers.0.mixer.in_proj.weight[x].momentum".

        Tensors that workers have divided between them have the rows that lie here.
        """
        return {
            f"{name}.{key}": x if key == "step" or name not in self._shares else self._shares[name].piece(x)
            for name, (tensor, states) in self._owned.items()
            for key, x in states.get(tensor, {}).items()
        }

    def restore(self, tensors: Mapping[str, Any]) -> None:
        """Set the state; only the rows that lie here are read.

        Args:
            tensors: all rows by name, as `tensors` of one process gives them or as a checkpoint has them.

        Raises:
            KeyError: there is no such parameter.
            ValueError: a state is incomplete, or has another shape or dtype than the parameter.
        """
        found: dict[str, dict[str, Any]] = {}
        for key, x in tensors.items():
            name, _, field = key.rpartition(".")
            found.setdefault(name, {})[field] = x
        for name, fields in found.items():
            tensor, states = self._owned[name]
            expected = _ADAM_STATE if states is self._optimizers[0].state else _MUON_STATE
            if fields.keys() != expected and fields.keys() in (_ADAM_STATE, _MUON_STATE):
                began, now = ("AdamW", "Muon") if fields.keys() == _ADAM_STATE else ("Muon", "AdamW")
                raise ValueError(f"{name} was moved by {began} when this run began, and is now moved by {now}")
            if fields.keys() != expected:
                raise ValueError(f"{name} must have {sorted(expected)}, got {sorted(fields)}")
            shape, share = self._shape(name), self._shares.get(name)
            for field, x in fields.items():
                kind = (torch.float32, ()) if field == "step" else (tensor.dtype, tuple(shape))
                if (x.dtype, tuple(x.shape)) != kind:
                    wanted, got = (f"{dtype} of shape {size}" for dtype, size in (kind, (x.dtype, tuple(x.shape))))
                    raise ValueError(f"{name}.{field} must be {wanted}, got {got}")
                own = x[...] if field == "step" or share is None else x[share.here]
                states[tensor][field] = own.to(tensor.device, copy=True)


def _cut(model: nn.Module, name: str, weight: Tensor) -> Iterator[tuple[str, int, int, bool]]:
    """The parts of a weight: name, first row, number of rows, and whether it is a matrix."""
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
    """Whether "mixer.in_proj[z]" or "dt_proj" names a part, as "backbone.layers.0.mixer.in_proj.weight[z]"."""
    name = key.replace(".weight", "")
    return f".{name}".endswith(f".{chosen}") or f".{name.partition('[')[0]}".endswith(f".{chosen}")


def _check_named(chosen: Iterable[str], keys: list[str]) -> None:
    """Refuse names of parts that do not exist; the default may name those of another family."""
    usual = OptimizerSection().muon_exclude
    if strange := [name for name in chosen if name not in usual and not any(_is_named(key, name) for key in keys)]:
        known = ", ".join(dict.fromkeys(key.replace(".weight", "").rpartition(".")[2] for key in keys))
        raise ValueError(f"optimizer.muon_exclude must name projections or their parts, as {known}, got {strange[0]!r}")


def clip_gradients(model: nn.Module, largest: float, world: World | None = None) -> float:
    """The norm of all gradients together, which are then scaled down if it is above `largest` (0: never).

    For gradients that workers have divided between them, it is the norm of the whole.
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
    """The learning rate of step 0, 1, ..."""
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
