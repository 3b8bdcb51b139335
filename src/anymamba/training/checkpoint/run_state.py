"""Checkpoints: directories that hold everything a run needs to continue, and are either complete or absent.

A checkpoint is written under a temporary name, brought to the disk, and renamed. Its `training.json` has a checksum of
every file and of itself. Older ones are removed only after that, so there is a good one at any time.

    step-00000100/  model.safetensors and other files of the task (config.json: `MambaLM.from_pretrained` opens it),
                    optimizer.safetensors, carried.safetensors (streams), training.json

Workers that divide tensors between them write numbered files, each with its own rows (`pieces`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.core.io import digest_file, fsync, read_json, write_json
from anymamba.training.checkpoint.sharded_tensors import StoredTensors, is_divided, list_files
from anymamba.training.distributed.process_group import World

_MANIFEST = "training.json"
_VERSION = _DIVIDED = 1
_NAME = re.compile("step-[0-9]{8,}")
_NUMBERS = itertools.count()  # of the temporary directories of this process
_FIELDS = {"step": int, "tokens": int, "config": dict, "data": str, "solved": bool, "files": dict}  # of the manifest


class RunState(NamedTuple):
    """What a run needs to continue.

    Attributes:
        path: its directory.
        step: how many steps have been taken.
        tokens: how many tokens they have read.
        config: of the run, as tables.
        changes: of the config since the run began: after which step, and the values before and after, by name.
        data: fingerprint of what the run learns from.
        solved: whether the task was found to be solved, which finishes a run before its last step.
        model: parameters by name, not yet read.
        optimizer: its state by name.
        rng: state of torch's generator.
        carried: the state of each stream, if there are any.
    """

    path: Path
    step: int
    tokens: int
    config: dict[str, Any]
    changes: list[dict[str, Any]]
    data: str
    solved: bool
    model: StoredTensors
    optimizer: StoredTensors
    rng: Tensor
    carried: StoredTensors | None

    def close(self) -> None:
        """Close the files once everything needed has been read."""
        for tensors in (self.model, self.optimizer, self.carried):
            if tensors is not None:
                tensors.close()


class Manifest(NamedTuple):
    """What the manifest of a checkpoint says: the attributes of `RunState` that are not tensors."""

    step: int
    tokens: int
    data: str
    solved: bool
    config: dict[str, Any]
    changes: list[dict[str, Any]]


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or will be."""
    return directory / f"step-{step:08d}"


def begin_checkpoint(directory: Path, step: int) -> Path:
    """Make a temporary directory for the files of a checkpoint.

    Raises:
        OSError: it cannot be made.
    """
    target = checkpoint_path(directory, step)
    with checkpoint_write_errors(target):
        directory.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(directory)
        # A number, since one that was given up may still be written to under its own name.
        temporary = directory / f".{target.name}.{os.getpid()}-{next(_NUMBERS)}.tmp"
        temporary.mkdir()
    return temporary


def finish_checkpoint(temporary: Path, facts: Manifest, digests: dict[str, str], *, before: int, keep: int) -> Path:
    """Give a checkpoint its name; then remove those that no longer count, and all but the latest `keep` of the others.

    Args:
        temporary: its directory, with all files but the manifest.
        facts: for the manifest.
        digests: of the files that other workers wrote and brought to the disk.
        before: the step of the checkpoint that the run wrote or was resumed from last, -1 if there is none. Later ones
            do not count: they are damaged, or the run would have been resumed from them.
        keep: how many of the latest to keep.

    Raises:
        OSError: it cannot be written; earlier ones are as they were.
    """
    directory = temporary.parent
    target = checkpoint_path(directory, facts.step)
    with checkpoint_write_errors(target):
        found = sorted(path.name for path in temporary.iterdir())
        if missing := sorted(digests.keys() - set(found)):
            raise FileNotFoundError(f"{', '.join(missing)}, which other workers wrote, cannot be found")
        files = {name: digests.get(name) or digest_file(temporary / name) for name in found}
        version = _DIVIDED if is_divided(found) else _VERSION
        _write_manifest(temporary, {"version": version, **facts._asdict(), "files": files})
        for path in temporary.iterdir():
            fsync(path)
        fsync(temporary)
        if target.exists():  # a damaged one, or the same
            shutil.rmtree(target)
        temporary.rename(target)
        fsync(directory)
    others = [path for path in checkpoints(directory) if path != target]
    good = [path for path in others if _step(path) <= before]
    for path in [path for path in others if path not in good] + good[keep - 1 :]:
        shutil.rmtree(path)
    return target


@contextmanager
def checkpoint_write_errors(target: Path) -> Iterator[None]:
    """Raise an error that names the checkpoint if it cannot be written in the block.

    Raises:
        OSError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise OSError(f"{target}: cannot be written; earlier ones are kept ({error})") from error


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, the latest first; files with other names are ignored."""
    found = [path for path in directory.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step, reverse=True)


def load_latest(directory: Path, report: Callable[[str], None], world: World | None = None) -> RunState:
    """The latest good checkpoint in a directory; `report` receives a line for each that is damaged.

    Raises:
        ValueError: there is none.
    """
    world = world or World()
    found = json.loads(world.run_on_main(lambda: json.dumps([path.name for path in checkpoints(directory)])))
    for name in found:
        try:
            state = world.run_checked(partial(_load_or_error, directory / name, world))
        except ValueError as error:
            report(f"{error}; using the checkpoint before it")
            continue
        world.run_checked(partial(_check_read, state))
        assert isinstance(state, RunState)
        return state
    world.run_checked(lambda: _refuse(directory, len(found)))
    raise AssertionError("unreachable")


def _load_or_error(path: Path, world: World) -> RunState | OSError:
    """A checkpoint, or why it cannot be read here: it may be good, so it must not be skipped like a damaged one."""
    try:
        return load_checkpoint(path, world)
    except OSError as error:
        return error


def _check_read(state: RunState | OSError) -> None:
    if isinstance(state, OSError):
        raise state


def _refuse(directory: Path, damaged: int) -> None:
    if damaged:
        raise ValueError(f"{directory}: expected a checkpoint to resume from, found {damaged}, all damaged")
    run = directory.parent
    raise ValueError(
        f"{run}: no such directory"
        if not run.is_dir()
        else f"{run}: no checkpoint to resume from: the run was stopped before its first one, or this is not a run; "
        f"start it again with --out {run}"
    )


def load_checkpoint(path: Path, world: World | None = None) -> RunState:
    """Open a checkpoint and check every byte; each of several workers checks some of the files.

    Raises:
        ValueError: it is damaged.
    """
    manifest, world = _read_manifest(path), world or World()
    for name, kind in _FIELDS.items():
        if type(value := manifest.get(name)) is not kind:
            raise ValueError(f"{path}: damaged: {_MANIFEST} should have a {kind.__name__} {name}, got {value!r:.60}")
    if manifest["step"] != _step(path):
        raise ValueError(f"{path}: damaged: {_MANIFEST} should be of the step in the name, got {manifest['step']}")
    files, version = manifest["files"], manifest.get("version")
    if version != (expected := _DIVIDED if is_divided(list(files)) else _VERSION):
        raise ValueError(f"{path}: expected a checkpoint of version {expected}, got {version}")
    for name in sorted(files)[world.rank :: world.size]:
        if (found := digest_file(path / name)) != files[name]:
            raise ValueError(f"{path}: damaged: {name} should have the checksum {files[name]}, got {found}")
    try:
        model, optimizer, carried = (_stored(path, kind, list(files)) for kind in ("model", "optimizer", "carried"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}") from error
    if model is None or optimizer is None:
        raise ValueError(f"{path}: damaged: {_MANIFEST} should list the files of model and optimizer, got {[*files]}")
    rng, now = optimizer.pop("rng"), torch.get_rng_state()
    if rng is None or rng.shape != now.shape or rng.dtype != now.dtype:
        raise ValueError(f"{path}: damaged: optimizer.safetensors should hold the state of torch's generator")
    state = rng[...]
    optimizer.close()
    return RunState(
        path,
        manifest["step"],
        manifest["tokens"],
        manifest["config"],
        manifest.get("changes", []),
        manifest["data"],
        manifest["solved"],
        model,
        optimizer,
        state,
        carried,
    )


def _stored(path: Path, kind: str, names: list[str]) -> StoredTensors | None:
    """The tensors of a kind, if there are any."""
    files = list_files(kind, names)
    return StoredTensors([path / name for name in files]) if files else None


def replace_config(path: Path, config: dict[str, Any], changes: list[dict[str, Any]]) -> None:
    """Give a checkpoint another config, with which the run continues however often it is stopped; all or nothing."""
    _write_manifest(path, {**_read_manifest(path), "config": config, "changes": changes}, durable=True)
    fsync(path)


def _read_manifest(path: Path) -> dict[str, Any]:
    """What `_write_manifest` wrote, without its checksum.

    Raises:
        ValueError: it is damaged.
    """
    if not (path / _MANIFEST).is_file():
        raise ValueError(f"{path}: damaged: {_MANIFEST} is missing")
    manifest = read_json(path / _MANIFEST)
    if manifest.pop("checksum", None) != _checksum(manifest):
        raise ValueError(f"{path}: damaged: {_MANIFEST} does not have the checksum it states")
    return manifest


def _write_manifest(path: Path, manifest: dict[str, Any], *, durable: bool = False) -> None:
    write_json(path / _MANIFEST, {**manifest, "checksum": _checksum(manifest)}, durable=durable)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _remove_unfinished(directory: Path) -> None:
    for path in directory.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
