"""The configuration of a stack: its layers, how often they are passed through, and what connects the passes.

§ Which set of weights each pass of a stack uses: any number of passes over the layers.

Letters: v pass, V passes, R real layers; of pairs u = ⌊v/2⌋, U = V/2, E = ⌈R/2⌉, O = ⌊R/2⌋.
"""

from __future__ import annotations

import copy
import dataclasses
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from anymamba.blocks.base import Block
from anymamba.core.config_fields import coerce_value, field_types
from anymamba.models.families import MAX_CONFIG_NUMBER, family, family_name, make_block_config
from anymamba.models.stack.class_tokens import Position, check_positions
from anymamba.models.stack.residual_gates import default_gate_bias

MOST_PASSES = 2**16  # more than any real model; limits the work that one number in a config can ask for

_Schedule = Callable[[int, int, int], int]  # (v, R, V) -> layer

SCHEDULES: dict[str, _Schedule] = {
    "cyclic": lambda v, real, passes: v % real,
    "stretched": lambda v, real, passes: v * real // passes,
}


def _strided(count: Callable[[int, int, int], int]) -> _Schedule:
    """Forward passes over the even layers, backward ones over the odd ones; `count`(u, layers, U) numbers each kind."""

    def schedule(v: int, real: int, passes: int) -> int:
        backward = v % 2
        layers = (real + 1 - backward) // 2
        return 2 * count(v // 2, layers, passes // 2) + backward

    return schedule


def _symmetric(count: Callable[[int, int, int], int]) -> _Schedule:
    """Both directions of a pair share the weights of a layer."""
    return lambda v, real, passes: count(v // 2, real, passes // 2)


PAIR_SCHEDULES: dict[str, _Schedule] = {
    "strided_cyclic": _strided(SCHEDULES["cyclic"]),
    "strided_stretched": _strided(SCHEDULES["stretched"]),
    "symmetric_cyclic": _symmetric(SCHEDULES["cyclic"]),
    "symmetric_stretched": _symmetric(SCHEDULES["stretched"]),
}


def layer_order(
    where: str, schedule: str | list[int], real: int, passes: int | None, names: dict[str, _Schedule]
) -> list[int]:
    """The layer that each pass uses.

    Args:
        where: named in errors.
        schedule: one of `names`, or the layer of every pass.
        real: number of layers.
        passes: number of passes; None: as many as layers, or as entries in the list.
        names: the schedules to choose from.

    Raises:
        ValueError: an unknown schedule, one that does not fit the number of passes, or a layer that does not exist.
    """
    if isinstance(schedule, str):
        if schedule not in names:
            raise ValueError(
                f"{where}: schedule must be one of {', '.join(names)}, or a list of layers, got {schedule!r}"
            )
        count = real if passes is None else passes
        return [names[schedule](v, real, count) for v in range(count)]
    if not isinstance(schedule, list | tuple) or not all(type(i) is int for i in schedule) or not schedule:
        raise ValueError(f"{where}: a custom schedule is a list of layers, got {reprlib.repr(schedule)}")
    if passes is not None and len(schedule) != passes:
        raise ValueError(f"{where}: the schedule must have {passes} entries, one per pass, got {len(schedule)}")
    if wrong := [i for i in schedule if not 0 <= i < real]:
        raise ValueError(f"{where}: the schedule must name layers 0 to {real - 1}, got {wrong[0]}")
    return list(schedule)


# Fields that a language model's own config has; the others are in its table `stack`.
MODEL_FIELDS = frozenset({"d_model", "n_layer", "ssm_cfg", "d_intermediate", "rms_norm", "residual_in_fp32"})


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Sizes and options of a stack of residual layers."""

    d_model: int  # D, width of the residual stream
    n_layer: int  # R, sets of weights
    ssm_cfg: dict[str, Any] = field(default_factory=dict)  # "layer": family of the blocks; the rest: fields of a block
    layer_cfgs: list[dict[str, Any]] = field(default_factory=list)  # an `ssm_cfg` for each layer, if they differ
    d_intermediate: int = 0  # width of the gated MLP after each block, rounded up to a multiple of 128; 0: no MLP
    rms_norm: bool = True  # False: LayerNorm
    residual_in_fp32: bool = True
    final_norm: bool = True  # after the last pass
    n_virtual: int | None = None  # V, passes over the layers, each with its own cache; None: as many as layers
    schedule: str | list[int] = "cyclic"  # or "stretched", or the layer of each pass
    ignore_first_residual: bool = False  # the first pass replaces the stream, instead of being added to it
    ignore_last_residual: bool = False  # and so does the last
    streams: int = 0  # of Multi-Gate Residuals; 0: the plain residual connection
    gates_per: Literal["layer", "pass"] = "layer"  # which passes share gates: those of a layer, or none
    gate_bias: float | None = None  # initial bias of the gates' first stream; None: the paper's
    gate_bias_step: float = 0.0  # more for each further stream
    grad_horizon: int | None = None  # passes that are differentiated, counted from the last; None: all
    dropout: float = 0.0  # dropout rate of what each block and MLP adds, in training
    class_tokens: list[Position] = field(default_factory=list)  # learned rows before the stack, by their places
    layer_class_tokens: list[list[Position]] = field(default_factory=list)  # before each layer, a list for each
    checkpointing: bool = False  # keep only the inputs of each pass, and recompute the rest in the backward pass

    SCHEDULES: ClassVar[dict[str, Any]] = SCHEDULES
    GROUP: ClassVar[str] = "layer"  # what class tokens stand before

    def __post_init__(self) -> None:
        """Refuse what cannot work, and keep tables and lists as they are now, whatever the caller does with them."""
        where = type(self).__name__
        for name in ("ssm_cfg", "layer_cfgs", "schedule", "class_tokens", "layer_class_tokens"):
            object.__setattr__(self, name, copy.deepcopy(getattr(self, name)))
        for name, kind in field_types(type(self)).items():
            if kind in (int, bool, float, int | None, float | None):
                coerce_value(f"{where}: {name}", getattr(self, name), kind, max_number=MAX_CONFIG_NUMBER)
        for name in ("d_model", "n_layer", "n_virtual"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{where}: {name} must be at least 1, got {value!r}")
        if self.d_intermediate < 0:
            raise ValueError(f"{where}: d_intermediate must be 0 or a width, got {self.d_intermediate!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"{where}: dropout must be at least 0 and below 1, got {self.dropout!r}")
        if self.gates_per not in ("layer", "pass"):
            raise ValueError(f'{where}: gates_per must be "layer" or "pass", got {self.gates_per!r}')
        self._check_layers(where)
        self._check_passes(where)
        self._check_class_tokens(where)

    def _check_layers(self, where: str) -> None:
        if not isinstance(self.layer_cfgs, list) or len(self.layer_cfgs) not in (0, self.n_layer):
            found = len(self.layer_cfgs) if isinstance(self.layer_cfgs, list) else repr(self.layer_cfgs)
            raise ValueError(f"{where}: layer_cfgs must be a list of {self.n_layer} tables, one per layer, got {found}")
        for index in range(max(1, len(self.layer_cfgs))):
            self.block_config(index)

    def _check_passes(self, where: str) -> None:
        if max(self.n_layer, self.n_virtual or 0) > MOST_PASSES:
            raise ValueError(
                f"{where}: at most {MOST_PASSES:,} passes are possible, got {max(self.n_layer, self.n_virtual or 0):,}"
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
        lists, groups = self.layer_class_tokens, self.layer_groups()
        if not isinstance(lists, list) or len(lists) not in (0, groups):
            found = len(lists) if isinstance(lists, list) else repr(lists)
            raise ValueError(f"{where}: layer_class_tokens must have {groups} lists, one per {self.GROUP}, got {found}")
        for index, positions in enumerate(lists):
            check_positions(f"{where}: layer_class_tokens[{index}]", positions)

    @property
    def layer(self) -> str:
        """Name of the block family; of all, joined by "+", where layers differ."""
        cfgs = self.layer_cfgs or [self.ssm_cfg]
        return "+".join(dict.fromkeys(map(family_name, cfgs)))

    @property
    def mlp_width(self) -> int:
        """F, `d_intermediate` rounded up to a multiple of 128; 0 without an MLP."""
        return -(-self.d_intermediate // 128) * 128

    def family(self, index: int = 0) -> type[Block]:
        """The class of a layer's block."""
        return family(family_name(self.layer_cfgs[index] if self.layer_cfgs else self.ssm_cfg))

    def block_config(self, index: int = 0) -> Any:
        """The config of a layer's block.

        Raises:
            ValueError: its table has entries that the block does not know, or values that cannot work.
        """
        where = type(self).__name__
        if self.layer_cfgs:
            return make_block_config(where, self.layer_cfgs[index], self.d_model, f"layer_cfgs[{index}]")
        return make_block_config(where, self.ssm_cfg, self.d_model)

    def layer_order(self) -> list[int]:
        """The layer that each pass uses.

        Raises:
            ValueError: the schedule does not fit.
        """
        where = type(self).__name__
        return layer_order(where, self.schedule, self.n_layer, self.n_virtual, self.SCHEDULES)

    def residual_passes(self) -> int:
        """How often a result is added to the residual stream."""
        return len(self.layer_order())

    def layer_groups(self) -> int:
        """How many layers class tokens can stand before."""
        return self.n_layer

    def groups_of_passes(self) -> list[int]:
        """The layer that class tokens before each pass belong to."""
        return self.layer_order()

    def class_tokens_of_passes(self) -> list[list[Position]]:
        """The places of the class tokens before each pass."""
        lists = self.layer_class_tokens or [[]] * self.layer_groups()
        return [lists[group] for group in self.groups_of_passes()]

    def has_class_tokens(self) -> bool:
        """Whether there are any."""
        return bool(self.class_tokens or any(self.layer_class_tokens))

    def gates_of_passes(self) -> list[int]:
        """The gates that follow each pass."""
        return list(range(self.residual_passes())) if self.gates_per == "pass" else self.layer_order()

    def initial_gate_bias(self) -> list[float]:
        """The initial bias of each stream's gate.

        Raises:
            ValueError: the paper's does not exist for this many streams and this few passes.
        """
        bias = self.gate_bias
        if bias is None:
            bias = default_gate_bias(type(self).__name__, self.residual_passes(), self.streams)
        return [bias + i * self.gate_bias_step for i in range(self.streams)]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Any:
        """The inverse of `to_dict`.

        Raises:
            ValueError: an unknown field, or one that is missing.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        needed = {f.name for f in dataclasses.fields(cls) if _is_needed(f)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"{cls.__name__}: expected fields among {sorted(known)}, got {unknown}")
        if missing := sorted(needed - set(values)):
            raise ValueError(f"{cls.__name__}: {', '.join(missing)} must be given")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Every field by its name."""
        return dataclasses.asdict(self)


def _is_needed(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def stack_config(where: str, kind: type[Any], config: Any, fields: dict[str, Any]) -> Any:
    """The config of a model: the one given, or one from its fields.

    Raises:
        TypeError: both, or a config of another kind.
        ValueError: unknown fields, or values that cannot work.
    """
    if config is not None and fields:
        raise TypeError(f"{where}: give a config or its fields, not both; got also {sorted(fields)}")
    if config is not None and not isinstance(config, kind):
        raise TypeError(f"{where}: config must be a {kind.__name__}, got {type(config).__name__}")
    return kind.from_dict(fields) if config is None else config
