"""Whether a directory has a run, and how it is opened again, perhaps with another config."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from anymamba.core.io import run_lock
from anymamba.training.checkpoint.run_state import RunState, checkpoints, load_latest
from anymamba.training.config.run_config import RunConfig
from anymamba.training.config.sections import ScheduleSection
from anymamba.training.distributed.process_group import World
from anymamba.training.optim.optimizer import learning_rate

_RESULTS = ("config.json", "model.safetensors", "metrics.csv")

C = TypeVar("C", bound=RunConfig)


def check_no_run(directory: Path) -> None:
    """Refuse a directory that has a run, or a model or metrics that a run would replace.

    Raises:
        ValueError: it has one of these.
    """
    if checkpoints(directory / "checkpoints"):
        raise ValueError(
            f"{directory}: there is a run already; continue it with --resume {directory}, or name another directory"
        )
    if found := [name for name in _RESULTS if (directory / name).exists()]:
        raise ValueError(
            f"{directory}: expected a directory without a run or a model, found {', '.join(found)} and no checkpoints "
            "to resume from; name another directory, or remove them"
        )


@dataclass(frozen=True)
class Reopened(Generic[C]):
    """A run to continue.

    Attributes:
        checkpoint: the latest good one.
        config: to continue with.
        changes: of the config, before and after, by name; they apply from the next step on.
    """

    checkpoint: RunState
    config: C
    changes: dict[str, tuple[Any, Any]]


def reopen(
    directory: Path,
    kind: type[C],
    wanted: Callable[[C], C],
    report: Callable[[str], None],
    instead: str = "",
    world: World | None = None,
) -> Reopened[C]:
    """Open a run at its latest good checkpoint.

    A config may differ in fields that change no weight, in fields that may change on the way (such as learning rates),
    and in its schedule if the steps taken keep the rates that they had.

    Args:
        directory: of the run.
        kind: of its config.
        wanted: the config to continue with, given that of the run.
        report: receives a line for each damaged checkpoint and each change.
        instead: what to do instead if the config differs in more.
        workers: which open it together.

    Raises:
        ValueError: there is no checkpoint, another process is using the run, or the config differs in more.
    """
    world, lock = world or World(), ExitStack()
    with lock:
        world.run_checked(lambda: lock.enter_context(run_lock(directory)) if world.is_main else None)
        checkpoint = load_latest(directory / "checkpoints", report, world)
    began = kind.from_dict(checkpoint.config, str(directory))
    config, step = wanted(began), checkpoint.step
    changes, fields = began.changed(config), kind.fields_by_name()
    keeps_rates = _has_rates_of(began.schedule, config.schedule, step)
    refused = [
        f"{name} (was {was!r}, got {new!r})"
        for name, (was, new) in changes.items()
        if not fields[name].metadata.get("onwards") and not (name.startswith("schedule.") and keeps_rates)
    ]
    if refused:
        why = "" if keeps_rates else f"; the {step} steps taken would have had other learning rates"
        why = f"; {step} steps have been taken" if config.schedule.steps < step else why
        raise ValueError(
            f"{directory}: a run continues with the config it started with; changed: {', '.join(refused)}{why}{instead}"
        )
    for name, (was, new) in changes.items():
        report(f"{name} changes from {was} to {new} after step {step}")
    return Reopened(checkpoint, config, changes)


def _has_rates_of(old: ScheduleSection, new: ScheduleSection, steps: int) -> bool:
    """Whether the steps taken have the same rates in a new schedule as in the old one."""
    rates = (learning_rate(step, 1.0, old) == learning_rate(step, 1.0, new) for step in range(steps))
    return new.steps >= steps and (new == old or all(rates))
