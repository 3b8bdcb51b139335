"""Opening a run again: its latest good checkpoint, and the config to continue with."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from anymamba.core.io import digest_file, run_lock
from anymamba.training.checkpoint.manifest import MANIFEST_FILE, Manifest, list_checkpoints, read_manifest
from anymamba.training.checkpoint.sharded_tensors import StoredTensors, list_shard_files
from anymamba.training.config.run_config import RunConfig
from anymamba.training.config.sections import ScheduleSection
from anymamba.training.distributed.process_group import World
from anymamba.training.optim.optimizer import learning_rate

_RESULTS = ("config.json", "model.safetensors", "metrics.csv")

C = TypeVar("C", bound=RunConfig)


class Checkpoint(NamedTuple):
    """A checkpoint that was opened and found to be good."""

    path: Path
    manifest: Manifest
    model: StoredTensors  # parameters by name, not yet read
    optimizer: StoredTensors  # state of the optimizer by name, not yet read
    rng: Tensor  # state of torch's generator
    carried: StoredTensors | None  # state of each stream by name, not yet read; None if there are none

    def close(self) -> None:
        """Close the files once everything needed has been read."""
        for tensors in (self.model, self.optimizer, self.carried):
            if tensors is not None:
                tensors.close()


@dataclass(frozen=True)
class Reopened(Generic[C]):
    """A run to continue."""

    checkpoint: Checkpoint  # the latest good checkpoint
    config: C  # the config to continue with
    changes: dict[str, tuple[Any, Any]]  # old and new values of changed config fields, by name, for all further steps
    snapshot: dict[str, int]  # all checkpoints of the run when it was opened, see `check_unchanged`


def check_no_run(directory: Path) -> None:
    """Raise `ValueError` if a directory has a run, or a model or metrics that a run would replace."""
    if list_checkpoints(directory / "checkpoints"):
        raise ValueError(
            f"{directory}: there is a run already; continue it with --resume {directory}, or name another directory"
        )
    if results := [name for name in _RESULTS if (directory / name).exists()]:
        raise ValueError(
            f"{directory}: expected a directory without a run or a model, found {', '.join(results)} and no "
            "checkpoints to resume from; name another directory, or remove them"
        )


def snapshot_checkpoints(directory: Path) -> dict[str, int]:
    """Return the names of a run's checkpoints with the times of their manifests; to be called under its lock."""
    files = [path / MANIFEST_FILE for path in list_checkpoints(directory / "checkpoints")]
    return {file.parent.name: file.stat().st_mtime_ns if file.is_file() else 0 for file in files}


def check_unchanged(directory: Path, snapshot: dict[str, int]) -> None:
    """Raise `ValueError` if another process has saved a run since a snapshot; to be called under its lock."""
    current = snapshot_checkpoints(directory)
    if current != snapshot:
        latest = max(current, default="no checkpoint")
        raise ValueError(
            f"{directory}: another process has used this run since it was opened, which is now at {latest}; "
            f"resume it again: --resume {directory}"
        )


def reopen(
    directory: Path,
    config_type: type[C],
    change_config: Callable[[C], C],
    report: Callable[[str], None],
    alternative: str = "",
    world: World | None = None,
) -> Reopened[C]:
    """Open a run at its latest good checkpoint.

    The config may differ from that of the run in fields that change no weight, in fields that may change on the way
    (such as learning rates), and in its schedule if the steps already taken keep their learning rates.

    `change_config` returns the config to continue with, given that of the run. If it differs in more, the error ends
    with `alternative`: what to do instead. `report` receives a line for each damaged checkpoint and each change.
    """
    # 1) Open the latest good checkpoint, while no other process writes one.
    world, lock = world or World(), ExitStack()
    with lock:
        world.run_checked(lambda: lock.enter_context(run_lock(directory)) if world.is_main else None)
        checkpoint = load_latest(directory / "checkpoints", report, world)
        snapshot = snapshot_checkpoints(directory)
    # 2) Compare the config to continue with to that of the run.
    old_config = config_type.from_dict(checkpoint.manifest.config, str(directory))
    config, step = change_config(old_config), checkpoint.manifest.step
    changes, fields = old_config.changed_fields(config), config_type.fields_by_name()
    keeps_rates = _has_rates_of(old_config.schedule, config.schedule, step)
    # 3) Reject changes of fields that would make the steps already taken wrong.
    rejected = [
        f"{name} (was {old!r}, got {new!r})"
        for name, (old, new) in changes.items()
        if not fields[name].metadata.get("mutable_on_resume") and not (name.startswith("schedule.") and keeps_rates)
    ]
    if rejected:
        why = "" if keeps_rates else f"; the {step} steps taken would have had other learning rates"
        why = f"; {step} steps have been taken" if config.schedule.steps < step else why
        raise ValueError(
            f"{directory}: a run continues with the config it started with; "
            f"changed: {', '.join(rejected)}{why}{alternative}"
        )
    for name, (old, new) in changes.items():
        report(f"{name} changes from {old} to {new} after step {step}")
    return Reopened(checkpoint, config, changes, snapshot)


def _has_rates_of(old: ScheduleSection, new: ScheduleSection, steps: int) -> bool:
    """Return whether the steps already taken have the same learning rates in a new schedule as in the old one."""
    same = (learning_rate(step, 1.0, old) == learning_rate(step, 1.0, new) for step in range(steps))
    return new.steps >= steps and (new == old or all(same))


def load_latest(directory: Path, report: Callable[[str], None], world: World | None = None) -> Checkpoint:
    """Open the latest good checkpoint in a directory; `report` receives a line for each damaged one.

    A checkpoint that cannot be read raises `OSError`: it may be good, so it is not skipped like a damaged one.
    """
    world = world or World()
    names = json.loads(world.run_on_main(lambda: json.dumps([path.name for path in list_checkpoints(directory)])))
    for name in names:
        try:
            checkpoint = world.run_checked(partial(_load_or_error, directory / name, world))
        except ValueError as error:
            report(f"{error}; using the checkpoint before it")
            continue
        world.run_checked(partial(_raise_if_unreadable, checkpoint))
        assert isinstance(checkpoint, Checkpoint)
        return checkpoint
    world.run_checked(lambda: _raise_no_checkpoint(directory, len(names)))
    raise AssertionError("unreachable")


def _load_or_error(path: Path, world: World) -> Checkpoint | OSError:
    try:
        return load_checkpoint(path, world)
    except OSError as error:
        return error


def _raise_if_unreadable(checkpoint: Checkpoint | OSError) -> None:
    if isinstance(checkpoint, OSError):
        raise checkpoint


def _raise_no_checkpoint(directory: Path, damaged: int) -> None:
    if damaged:
        raise ValueError(f"{directory}: expected a checkpoint to resume from, found {damaged}, all damaged")
    run = directory.parent
    if not run.is_dir():
        raise ValueError(f"{run}: no such directory")
    raise ValueError(
        f"{run}: no checkpoint to resume from: the run was stopped before its first one, or this is not a run; "
        f"start it again with --out {run}"
    )


def load_checkpoint(path: Path, world: World | None = None) -> Checkpoint:
    """Open a checkpoint and check every byte; each of several ranks checks some of the files."""
    manifest, world = read_manifest(path), world or World()
    names = sorted(manifest.files)
    for name in names[world.rank :: world.size]:
        expected, digest = manifest.files[name], digest_file(path / name)
        if digest != expected:
            raise ValueError(f"{path}: damaged: {name} must have the checksum {expected}, got {digest}")
    try:
        model, optimizer, carried = (_open_tensors(path, kind, names) for kind in ("model", "optimizer", "carried"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}") from error
    if model is None or optimizer is None:
        raise ValueError(f"{path}: damaged: the manifest must list files of the model and the optimizer, got {names}")
    rng, current_rng = optimizer.pop("rng", None), torch.get_rng_state()
    if rng is None or rng.shape != current_rng.shape or rng.dtype != current_rng.dtype:
        raise ValueError(f"{path}: damaged: optimizer.safetensors must hold the state of torch's generator")
    rng_state = rng[...]
    optimizer.close()
    return Checkpoint(path, manifest, model, optimizer, rng_state, carried)


def _open_tensors(path: Path, kind: str, names: list[str]) -> StoredTensors | None:
    """Open the tensors of a kind, if there are any."""
    files = list_shard_files(kind, names)
    return StoredTensors([path / name for name in files]) if files else None
