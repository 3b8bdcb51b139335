"""The configuration of a training run: typed, frozen, read from TOML, and overridden field by field.

`RunConfig` has the sections of every run, and `TrainingConfig` adds those of a language model.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from anymamba.core.config_fields import check_known, coerce_value, describe_unknown, parse_text
from anymamba.training.config.sections import (
    BatchSection,
    CheckpointSection,
    DataSection,
    EvaluationSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    PrecisionSection,
    ScheduleSection,
    TextEvaluationSection,
    check_at_least,
    option,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

C = TypeVar("C", bound="RunConfig")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The sections that runs of all tasks have; a task adds its own in a subclass."""

    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoints: CheckpointSection = field(default_factory=CheckpointSection)
    seed: int = option(0, "seed of the weights and of the order of the data")
    device: str = option("auto", "device to compute on; auto is the first of cuda, mps and cpu")
    threads: int | None = option(
        None,
        "CPU threads; another number rounds differently",
        default_text="torch's choice, within the process's quota of cores",
    )

    def __post_init__(self) -> None:
        """Validate the fields."""
        check_at_least(self, 1, "threads")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be at least 0 and below 2^63, got {self.seed}")

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any], where: str = "config") -> C:
        """Build a config from nested tables, as in a TOML file.

        Raises:
            ValueError: An unknown key, or a value of the wrong type or out of its range.
        """
        config: C = _build(cls, values, where, "", [*_annotations(cls), *cls.hints()])
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return nested tables of every field, as `from_dict` takes them."""
        return dataclasses.asdict(self)

    def with_overrides(self: C, overrides: Mapping[str, Any]) -> C:
        """Return a copy with fields replaced.

        Args:
            overrides: Values, or strings to parse, by dotted name: {"optimizer.lr": 3e-4} or {"optimizer.lr": "3e-4"}.

        Raises:
            ValueError: An unknown name, or a value that cannot work.
        """
        return self.from_dict(self.merge_overrides(self.to_dict(), overrides), "config")

    @classmethod
    def merge_overrides(cls, values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return nested tables with fields replaced by values or their texts.

        Raises:
            ValueError: An unknown name, or a text that is not readable.
        """
        tables = {name: dict(x) if isinstance(x, Mapping) else x for name, x in values.items()}
        hints = cls.hints()
        for name, value in overrides.items():
            check_known(name, hints, "--")
            section, _, key = name.rpartition(".")
            table = tables.setdefault(section, {}) if section else tables
            table[key] = parse_text(name, value, hints[name]) if _is_text(value) else value
        return tables

    def flat(self) -> dict[str, Any]:
        """Return every value by its dotted name: "optimizer.lr"."""
        return {name: attrgetter(name)(self) for name in self.fields_by_name()}

    def changed_fields(self: C, other: C) -> dict[str, tuple[Any, Any]]:
        """Return the fields that differ, with both values, except those that change no weight."""
        old, new, fields = self.flat(), other.flat(), self.fields_by_name()
        names = [name for name, f in fields.items() if not f.metadata["ignored_on_resume"]]
        return {name: (old[name], new[name]) for name in names if old[name] != new[name]}

    @classmethod
    def fields_by_name(cls) -> dict[str, dataclasses.Field[Any]]:
        """Return every field by its dotted name, as the command line offers them."""
        return {name: f for name, f, _ in cls._typed_fields()}

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """Return the annotation of every field by its dotted name."""
        return {name: hint for name, _, hint in cls._typed_fields()}

    @classmethod
    def _typed_fields(cls) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
        """Yield every field with its dotted name and its annotation."""
        for name, kind in _annotations(cls).items():
            if dataclasses.is_dataclass(kind):
                hints = get_type_hints(kind)
                yield from ((f"{name}.{f.name}", f, hints[f.name]) for f in dataclasses.fields(kind))
            else:
                yield name, cls.__dataclass_fields__[name], kind


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(RunConfig):
    """A run that trains a language model on text."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    batch: BatchSection = field(default_factory=BatchSection)
    evaluation: TextEvaluationSection = field(default_factory=TextEvaluationSection)


def read_config(path: str | os.PathLike[str] | None, overrides: Mapping[str, Any] | None = None) -> Any:
    """Read the config of a TOML file, with fields replaced.

    It is a `TrainingConfig`, or a `TabularConfig` if its `task` is not "language".

    Args:
        path: The file; None for the defaults.
        overrides: Values, or strings to parse, by dotted name: {"optimizer.lr": 3e-4} or {"optimizer.lr": "3e-4"}.

    Raises:
        ValueError: No such file, not TOML, an unknown key, or a value that cannot work.
    """
    values: dict[str, Any] = {}
    if path is not None:
        if not Path(path).is_file():
            raise ValueError(f"{path}: no such file")
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except RecursionError:
            raise ValueError(f"{path}: not readable TOML (nested too deeply)") from None
        except ValueError as error:
            raise ValueError(f"{path}: not readable TOML ({error})") from error
    from anymamba.training.config.tabular_config import TabularConfig  # which imports this module

    overrides = dict(overrides or {})
    task = overrides.pop("task", values.pop("task", "language"))
    where = str(path or "config")
    if task == "language":
        return TrainingConfig.from_dict(values, where).with_overrides(overrides)
    return TabularConfig.from_dict({**TabularConfig.merge_overrides(values, overrides), "task": task}, where)


def _annotations(config: type[RunConfig]) -> dict[str, Any]:
    """Return the types of the fields by name, in the order of the help: the task's own sections come first."""
    kinds = get_type_hints(config)
    names = dict.fromkeys(name for kind in config.__mro__ for name in inspect.get_annotations(kind))
    return {name: kinds[name] for name in names}


def _is_text(value: Any) -> bool:
    """Return whether a value is a text, or texts, as from the command line."""
    is_list = isinstance(value, list | tuple)
    return isinstance(value, str) or (is_list and all(isinstance(entry, str) for entry in value))


def _build(kind: Any, values: Any, where: str, prefix: str, names: list[str]) -> Any:
    """Build a config or a section of it from a table; `names` are those of all sections and fields."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: {prefix.rstrip('.')} must be a table, got {values!r}")
    hints, fields = get_type_hints(kind), {}
    for key, value in values.items():
        if key not in hints:
            raise ValueError(describe_unknown(f"{prefix}{key}", names, f"{where}: "))
        if dataclasses.is_dataclass(hints[key]):
            fields[key] = _build(hints[key], value, where, f"{prefix}{key}.", names)
        else:
            fields[key] = coerce_value(f"{where}: {prefix}{key}", value, hints[key])
    try:
        return kind(**fields)
    except ValueError as error:
        raise ValueError(f"{where}: {prefix}{error}") from error
