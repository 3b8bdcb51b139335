"""Checkpoints: directories that hold everything a run needs to continue, and are either complete or not there.

A checkpoint is written under a temporary name, brought to the disk, and renamed. Its `training.json` has a checksum of
every file and of itself. Others are removed only after that, so that a good one is there at any time.

    step-00000100/  model.safetensors and what else the task writes (config.json: `MambaLM.from_pretrained` opens it),
                    optimiser.safetensors, carried.safetensors (streams), training.json
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.ground.files import digest_file, read_json, read_tensors, write_json, write_tensors

_MANIFEST = "training.json"
_VERSION = 2
_NAME = re.compile("step-[0-9]{8,}")
_FIELDS = {"step": int, "tokens": int, "config": dict, "data": str, "solved": bool, "files": dict}  # of the manifest


class RunState(NamedTuple):
    """What a run needs to continue.

    Attributes:
        path: where it is.
        step: how many steps have been taken.
        tokens: how many tokens they have read.
        config: of the run, as tables.
        changes: of the config since the run began: the steps after which, and the values before and after, by name.
        data: fingerprint of what it learns from.
        solved: the task was found solved, so that the run is finished before its last step.
        model: parameters by name.
        optimiser: its state by name.
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
    model: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    rng: Tensor
    carried: dict[str, Tensor] | None


def save_checkpoint(
    directory: Path,
    write_model: Callable[[Path], None],
    optimiser: dict[str, Tensor],
    carried: dict[str, Tensor] | None,
    *,
    step: int,
    tokens: int,
    config: dict[str, Any],
    changes: list[dict[str, Any]],
    data: str,
    solved: bool,
    before: int,
    keep: int,
) -> Path:
    """Write a checkpoint, and then remove those that no longer count, and of the others all but the latest `keep`.

    `before` is the step of the one that the run wrote or was resumed from last, -1 if there is none. Those after it do
    not count: they are damaged, or the run would have been resumed from them.

    Raises:
        OSError: it cannot be written; those before it are as they were.
    """
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"step-{step:08d}"
    temporary = directory / f".{target.name}.{os.getpid()}.tmp"
    _remove_unfinished(directory)
    try:
        temporary.mkdir()
        write_model(temporary)
        write_tensors(temporary / "optimiser.safetensors", {**optimiser, "rng": torch.get_rng_state()}, {})
        if carried is not None:
            write_tensors(temporary / "carried.safetensors", carried, {})
        files = {path.name: digest_file(path) for path in sorted(temporary.iterdir())}
        values = {"step": step, "tokens": tokens, "data": data, "solved": solved, "config": config, "changes": changes}
        _write_manifest(temporary, {"version": _VERSION, **values, "files": files})
        for path in temporary.iterdir():
            _bring_to_disk(path)
        _bring_to_disk(temporary)
        if target.exists():  # a damaged one, or the same
            shutil.rmtree(target)
        temporary.rename(target)
        _bring_to_disk(directory)
    except OSError as error:
        raise OSError(f"{target}: cannot be written, those before it are kept ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    others = [path for path in checkpoints(directory) if path != target]
    good = [path for path in others if _step(path) <= before]
    for path in [path for path in others if path not in good] + good[keep - 1 :]:
        shutil.rmtree(path)
    return target


def checkpoints(directory: Path) -> list[Path]:
    """Those in a directory, the latest first; other files there, whatever their names begin with, are left alone."""
    found = [path for path in directory.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step, reverse=True)


def load_latest(directory: Path, report: Callable[[str], None]) -> RunState:
    """The latest whole checkpoint in a run's directory of them; `report` receives a line for each that is damaged.

    Raises:
        ValueError: there is none.
    """
    found = checkpoints(directory)
    for path in found:
        try:
            return load_checkpoint(path)
        except ValueError as error:  # noqa: PERF203
            report(f"{error}; going back to the checkpoint before it")
    if found:
        raise ValueError(f"{directory}: expected a checkpoint to resume from, found {len(found)}, all damaged")
    run = directory.parent
    raise ValueError(
        f"{run}: no such directory"
        if not run.is_dir()
        else f"{run}: no checkpoint to resume from: the run was stopped before its first one, or this is not a run; "
        f"start it again with --out {run}"
    )


def load_checkpoint(path: Path) -> RunState:
    """Read a checkpoint, checking every byte.

    Raises:
        ValueError: it is damaged.
    """
    manifest = _read_manifest(path)
    if manifest.get("version") != _VERSION:
        raise ValueError(f"{path}: expected a checkpoint of version {_VERSION}, got {manifest.get('version')}")
    for name, kind in _FIELDS.items():
        if type(value := manifest.get(name)) is not kind:
            raise ValueError(f"{path}: damaged: {_MANIFEST} should have a {kind.__name__} {name}, got {value!r:.60}")
    if manifest["step"] != _step(path):
        raise ValueError(f"{path}: damaged: {_MANIFEST} should be of the step in the name, got {manifest['step']}")
    files = manifest["files"]
    for name in {*files, "model.safetensors", "optimiser.safetensors"}:
        if (found := digest_file(path / name)) != files.get(name):
            raise ValueError(f"{path}: damaged: {name} should have the checksum {files.get(name)}, got {found}")
    optimiser = read_tensors(path / "optimiser.safetensors")
    rng, now = optimiser.pop("rng", torch.empty(0)), torch.get_rng_state()
    if rng.shape != now.shape or rng.dtype != now.dtype:
        raise ValueError(f"{path}: damaged: optimiser.safetensors should hold the state of torch's generator")
    return RunState(
        path,
        manifest["step"],
        manifest["tokens"],
        manifest["config"],
        manifest.get("changes", []),
        manifest["data"],
        manifest["solved"],
        read_tensors(path / "model.safetensors"),
        optimiser,
        rng,
        read_tensors(path / "carried.safetensors") if "carried.safetensors" in files else None,
    )


def amend_checkpoint(path: Path, config: dict[str, Any], changes: list[dict[str, Any]]) -> None:
    """Give a checkpoint another config, from which the run continues however often it is stopped; all or nothing."""
    _write_manifest(path, {**_read_manifest(path), "config": config, "changes": changes})
    _bring_to_disk(path)


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


def _write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    write_json(path / _MANIFEST, {**manifest, "checksum": _checksum(manifest)})


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _bring_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a directory, would survive a power cut."""
    if path.is_dir() and os.name == "nt":  # directories cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_unfinished(directory: Path) -> None:
    for path in directory.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
