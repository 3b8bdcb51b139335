"""Configurations of stacks: their layers, which layer each pass uses, and what connects the passes.

Letters: v pass, V passes, R real layers; of pairs u = ⌊v/2⌋, U = V/2, E = ⌈R/2⌉, O = ⌊R/2⌋.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from anymamba.blocks.base import Block
from anymamba.blocks.block_config import MAX_CONFIG_NUMBER
from anymamba.core.config_fields import coerce_value, field_types
from anymamba.models.families import family_name, get_family, make_block_config, suggest_field
from anymamba.models.stack.class_tokens import Position, check_positions

MAX_PASSES = 2**16  # more than any real model; limits the work that one number in a config can ask for

_Schedule = Callable[[int, int, int], int]  # (v, R, V) -> layer

SCHEDULES: dict[str, _Schedule] = {
    "cyclic": lambda v, real, passes: v % real,
    "stretched": lambda v, real, passes: v * real // passes,
}


def _alternate_directions(count: Callable[[int, int, int], int]) -> _Schedule:
    """Return a schedule with forward passes over the even layers and backward ones over the odd ones.

    `count`(u, layers, U) is the schedule of either kind.
    """

    def schedule(v: int, real: int, passes: int) -> int:
        backward = v % 2
        layers = (real + 1 - backward) // 2
        return 2 * count(v // 2, layers, passes // 2) + backward

    return schedule


def _symmetric(count: Callable[[int, int, int], int]) -> _Schedule:
    """Return a schedule in which both directions of a pair share the weights of a layer."""
    return lambda v, real, passes: count(v // 2, real, passes // 2)


PAIR_SCHEDULES: dict[str, _Schedule] = {
    "strided_cyclic": _alternate_directions(SCHEDULES["cyclic"]),
    "strided_stretched": _alternate_directions(SCHEDULES["stretched"]),
    "symmetric_cyclic": _symmetric(SCHEDULES["cyclic"]),
    "symmetric_stretched": _symmetric(SCHEDULES["stretched"]),
}


def layer_order(
    where: str, schedule: str | list[int], real: int, passes: int | None, schedules: dict[str, _Schedule]
) -> list[int]:
    """Return which of `real` layers each pass uses.

    `schedule` names one of `schedules`, or lists the layer of every pass. Without a number of passes there are as many
    as layers, or as entries in the list. Raise `ValueError` if the two do not match, or a layer does not exist.
    """
    if isinstance(schedule, str):
        if schedule not in schedules:
            raise ValueError(
                f"{where}: schedule must be one of {', '.join(schedules)}, or a list of layers, got {schedule!r}"
            )
        count = real if passes is None else passes
        return [schedules[schedule](v, real, count) for v in range(count)]
    if not isinstance(schedule, list | tuple) or not all(type(i) is int for i in schedule) or not schedule:
        raise ValueError(f"{where}: a custom schedule is a list of layers, got {reprlib.repr(schedule)}")
    if passes is not None and len(schedule) != passes:
        raise ValueError(f"{where}: the schedule must have {passes} entries, one per pass, got {len(schedule)}")
    if invalid := [i for i in schedule if not 0 <= i < real]:
        raise ValueError(f"{where}: the schedule must name layers 0 to {real - 1}, got {invalid[0]}")
    return list(schedule)


def check_numbers(config: Any, *, at_least_one: tuple[str, ...]) -> None:
    """Raise `ValueError` for a field of another type than its annotation, among numbers, or for an invalid size."""
    where = type(config).__name__
    for name, kind in field_types(type(config)).items():
        if kind in (int, bool, float, int | None, float | None):
            coerce_value(f"{where}: {name}", getattr(config, name), kind, max_number=MAX_CONFIG_NUMBER)
    for name in at_least_one:
        if (value := getattr(config, name)) is not None and value < 1:
            raise ValueError(f"{where}: {name} must be at least 1, got {value!r}")
    if config.d_intermediate < 0:
        raise ValueError(f"{where}: d_intermediate must be 0 or a width, got {config.d_intermediate!r}")


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Options of the MLP after each block; its width is the `d_intermediate` of the stack."""

    multiple_of: int = 128  # the width is rounded up to a multiple of it
    gate_first: bool = False  # whether the gates are the first half of the output of `fc1`, not the second
    bias: bool = False  # of both projections

    def __post_init__(self) -> None:
        """Raise for a multiple below 1."""
        if self.multiple_of < 1:
            raise ValueError(f"MLPConfig: multiple_of must be at least 1, got {self.multiple_of}")


# Fields that the config of a language model has itself; the others are in its table `stack`.
MODEL_FIELDS = frozenset({"d_model", "n_layer", "ssm_cfg", "d_intermediate", "rms_norm", "residual_in_fp32"})


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Sizes and options of a stack of residual layers."""

    d_model: int  # D, width of the residual stream
    n_layer: int  # R, sets of weights
    ssm_cfg: dict[str, Any] = field(default_factory=dict)  # "layer": family of the blocks; the rest: fields of a block
    layer_cfgs: list[dict[str, Any]] = field(default_factory=list)  # an `ssm_cfg` for each layer, if they differ
    d_intermediate: int = 0  # width of the gated MLP after each block, rounded up to a multiple of 128; 0: no MLP
    mlp_cfg: dict[str, Any] = field(default_factory=dict)  # fields of `MLPConfig`
    rms_norm: bool = True  # False: LayerNorm
    norm_eps: float = 1e-5  # of the norms before blocks and MLPs, and of the last one
    residual_in_fp32: bool = True
    final_norm: bool = True  # after the last pass
    input_multiplier: float = 1.0  # factor of the inputs of the stack
    residual_multiplier: float = 1.0  # factor of what each block and MLP adds to the residual stream
    output_multiplier: float = 1.0  # factor of the outputs of the last norm
    n_virtual: int | None = None  # V, passes over the layers, each with its own cache; None: as many as layers
    schedule: str | list[int] = "cyclic"  # or "stretched", or the layer of each pass
    ignore_first_residual: bool = False  # skip the residual add of the first pass
    ignore_last_residual: bool = False  # skip the residual add of the last pass
    streams: int = 0  # residual streams of Multi-Gate Residuals; 0: the plain residual connection
    gates_per: Literal["layer", "pass"] = "layer"  # whether the passes of a layer share gates, or each has its own
    gate_bias: float | None = None  # initial bias of the gate of the first stream; None: the paper's
    gate_bias_step: float = 0.0  # increase of that bias from stream to stream
    grad_horizon: int | None = None  # passes that are differentiated, counted from the last; None: all
    dropout: float = 0.0  # dropout rate of the output of each block and MLP, in training
    class_tokens: list[Position] = field(default_factory=list)  # positions of the class tokens before the stack
    layer_class_tokens: list[list[Position]] = field(default_factory=list)  # the same before each layer, one list each
    checkpointing: bool = False  # keep only the input of each pass, and recompute the rest in the backward pass

    SCHEDULES: ClassVar[dict[str, Any]] = SCHEDULES
    GROUP: ClassVar[str] = "layer"  # the unit that `layer_class_tokens` has one list for, and its number of layers
    LAYERS_PER_GROUP: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Check the fields, and copy tables and lists, so that later changes by the caller have no effect."""
        where = type(self).__name__
        for name in ("ssm_cfg", "mlp_cfg", "layer_cfgs", "schedule", "class_tokens", "layer_class_tokens"):
            object.__setattr__(self, name, copy.deepcopy(getattr(self, name)))
        check_numbers(self, at_least_one=("d_model", "n_layer", "n_virtual"))
        self.mlp_config()
        if self.norm_eps <= 0:
            raise ValueError(f"{where}: norm_eps must be positive, got {self.norm_eps}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"{where}: dropout must be at least 0 and below 1, got {self.dropout!r}")
        if self.gates_per not in ("layer", "pass"):
            raise ValueError(f'{where}: gates_per must be "layer" or "pass", got {self.gates_per!r}')
        self._check_layers(where)
        self._check_passes(where)
        self._check_class_tokens(where)

    def _check_layers(self, where: str) -> None:
        if not isinstance(self.layer_cfgs, list) or len(self.layer_cfgs) not in (0, self.n_layer):
            received = len(self.layer_cfgs) if isinstance(self.layer_cfgs, list) else repr(self.layer_cfgs)
            raise ValueError(
                f"{where}: layer_cfgs must be a list of {self.n_layer} tables, one per layer, got {received}"
            )
        for index in range(max(1, len(self.layer_cfgs))):
            self.block_config(index)

    def _check_passes(self, where: str) -> None:
        if max(self.n_layer, self.n_virtual or 0) > MAX_PASSES:
            raise ValueError(
                f"{where}: at most {MAX_PASSES:,} passes are possible, got {max(self.n_layer, self.n_virtual or 0):,}"
            )
        passes = self.residual_passes()
        if self.grad_horizon is not None and not 1 <= self.grad_horizon <= passes:
            raise ValueError(f"{where}: grad_horizon must be 1 to {passes}, the passes, got {self.grad_horizon}")
        if self.streams < 0:
            raise ValueError(f"{where}: streams must be 0, for a plain residual, or more, got {self.streams}")
        if self.streams:
            self.initial_gate_bias()

    def _check_class_tokens(self, where: str) -> None:
        check_positions(f"{where}: class_tokens", self.class_tokens)
        lists, groups = self.layer_class_tokens, self.n_layer // self.LAYERS_PER_GROUP
        if not isinstance(lists, list) or len(lists) not in (0, groups):
            received = len(lists) if isinstance(lists, list) else repr(lists)
            raise ValueError(
                f"{where}: layer_class_tokens must have {groups} lists, one per {self.GROUP}, got {received}"
            )
        for index, positions in enumerate(lists):
            check_positions(f"{where}: layer_class_tokens[{index}]", positions)

    @property
    def layer(self) -> str:
        """Name of the block family; all names joined by "+" if layers differ."""
        cfgs = self.layer_cfgs or [self.ssm_cfg]
        return "+".join(dict.fromkeys(map(family_name, cfgs)))

    @property
    def mlp_width(self) -> int:
        """F, `d_intermediate` rounded up to a multiple of 128, or of what `mlp_cfg` says; 0 without an MLP."""
        multiple = self.mlp_config().multiple_of
        return -(-self.d_intermediate // multiple) * multiple

    def mlp_config(self) -> MLPConfig:
        """Return the options of the MLPs."""
        where, types = type(self).__name__, field_types(MLPConfig)
        if not isinstance(self.mlp_cfg, dict):
            raise ValueError(f"{where}: mlp_cfg must be a table of fields of MLPConfig, got {self.mlp_cfg!r}")
        if unknown := sorted(set(self.mlp_cfg) - set(types)):
            near = suggest_field(unknown[0], types)
            raise ValueError(f"{where}: mlp_cfg must have entries among {sorted(types)}, got {unknown}{near}")
        names = {name: f'{where}: mlp_cfg["{name}"]' for name in self.mlp_cfg}
        values = {
            name: coerce_value(names[name], value, types[name], max_number=MAX_CONFIG_NUMBER)
            for name, value in self.mlp_cfg.items()
        }
        return MLPConfig(**values)

    def family(self, index: int = 0) -> type[Block]:
        """Return the class of the block of a layer."""
        return get_family(family_name(self.layer_cfgs[index] if self.layer_cfgs else self.ssm_cfg))

    def block_config(self, index: int = 0) -> Any:
        """Return the config of the block of a layer."""
        where = type(self).__name__
        if self.layer_cfgs:
            return make_block_config(where, self.layer_cfgs[index], self.d_model, f"layer_cfgs[{index}]")
        return make_block_config(where, self.ssm_cfg, self.d_model)

    def layer_order(self) -> list[int]:
        """Return the layer that each pass uses."""
        where = type(self).__name__
        return layer_order(where, self.schedule, self.n_layer, self.n_virtual, self.SCHEDULES)

    def residual_passes(self) -> int:
        """Return how many times a result is added to the residual stream."""
        return len(self.groups_of_passes())

    def groups_of_passes(self) -> list[int]:
        """Return the layer of each pass, or the pair of layers of each pair of passes: that of its forward layer."""
        return [layer // self.LAYERS_PER_GROUP for layer in self.layer_order()[:: self.LAYERS_PER_GROUP]]

    def class_tokens_of_passes(self) -> list[list[Position]]:
        """Return the positions of the class tokens before each pass."""
        lists = self.layer_class_tokens
        return [lists[group] if lists else [] for group in self.groups_of_passes()]

    def has_class_tokens(self) -> bool:
        """Return whether there are class tokens at any level."""
        return bool(self.class_tokens or any(self.layer_class_tokens))

    def gates_of_passes(self) -> list[int]:
        """Return the index of the gates that follow each pass, or pair of passes."""
        return list(range(self.residual_passes())) if self.gates_per == "pass" else self.groups_of_passes()

    def initial_gate_bias(self) -> list[float]:
        """Return the initial bias of the gate of each stream.

        That of the first is by default the paper's -ln(√(L / 21) (e³ + 1) - n) with L = passes - (n - 1). Raise
        `ValueError` where it is undefined, because the argument of the logarithm is not positive.
        """
        bias = self.gate_bias
        if bias is None:
            passes, n = self.residual_passes(), self.streams
            argument = math.sqrt(max(0, passes - (n - 1)) / 21) * (math.exp(3) + 1) - n
            if argument <= 0:
                raise ValueError(
                    f"{type(self).__name__}: the default gate_bias is undefined for {n} streams and {passes} passes, "
                    "because it needs √((passes - streams + 1) / 21) (e³ + 1) > streams; use fewer streams, or set "
                    "gate_bias"
                )
            bias = -math.log(argument)
        return [bias + i * self.gate_bias_step for i in range(self.streams)]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Any:
        """Return the config with these fields, as `to_dict` returned them; raise `ValueError` for other ones."""
        return config_from_dict(cls, values)

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name."""
        return dataclasses.asdict(self)


def config_from_dict(kind: type[Any], values: dict[str, Any]) -> Any:
    """Return a config of class `kind` with these fields; raise `ValueError` if one is unknown or missing."""
    fields = dataclasses.fields(kind)
    known = {f.name for f in fields}
    required = {f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    if unknown := sorted(set(values) - known):
        near = suggest_field(unknown[0], known)
        raise ValueError(f"{kind.__name__}: expected fields among {sorted(known)}, got {unknown}{near}")
    if missing := sorted(required - set(values)):
        raise ValueError(f"{kind.__name__}: {', '.join(missing)} must be given")
    return kind(**values)


@dataclass(frozen=True, kw_only=True)
class BidirectionalConfig(StackConfig):
    """Sizes and options of a bidirectional stack; layers and passes count both directions."""

    schedule: str | list[int] = "strided_cyclic"  # or another of `PAIR_SCHEDULES`, or the layer of each pass
    merge: Literal["mean", "linear"] = "mean"  # how the two directions are merged

    SCHEDULES: ClassVar[dict[str, Any]] = PAIR_SCHEDULES
    GROUP: ClassVar[str] = "pair of layers"
    LAYERS_PER_GROUP: ClassVar[int] = 2

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        where = type(self).__name__
        if self.n_layer % 2:
            raise ValueError(f"{where}: n_layer must be even, one layer per direction of a pair, got {self.n_layer}")
        if len(self.layer_order()) % 2:
            raise ValueError(f"{where}: the number of passes must be even, for pairs, got {len(self.layer_order())}")
        if self.merge not in ("mean", "linear"):
            raise ValueError(f'{where}: merge must be "mean" or "linear", got {self.merge!r}')
        if self.d_intermediate:
            raise ValueError(f"{where}: layers have no MLP, so d_intermediate must be 0, got {self.d_intermediate}")


def make_stack_config(where: str, kind: type[Any], config: Any, fields: dict[str, Any]) -> Any:
    """Return `config`, or a config of class `kind` from its fields; raise for both, or for another class."""
    if config is not None and fields:
        raise TypeError(f"{where}: give a config or its fields, not both; got also {sorted(fields)}")
    if config is not None and not isinstance(config, kind):
        raise TypeError(f"{where}: config must be a {kind.__name__}, got {type(config).__name__}")
    return kind.from_dict(fields) if config is None else config
