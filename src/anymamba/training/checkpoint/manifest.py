"""The directories of checkpoints and their manifests.

    checkpoints/step-00000100/
        model.safetensors, config.json, …   the files of the task: `MambaLM.from_pretrained` opens the directory
        optimizer.safetensors               the optimizer's state, and that of torch's generator
        carried.safetensors                 the states of continuous streams, if there are any
        training.json                       the manifest, with a checksum of every file and of itself

Ranks that divide tensors write numbered files, each with its own rows (`sharded_tensors`). A checkpoint is complete or
absent: it is written under a temporary name, synced, and renamed. Older ones are removed only after that, so there is a
good one at any time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from anymamba.core.io import fsync, read_json, write_json

MANIFEST_FILE = "training.json"
_VERSION = 1
_NAME = re.compile("step-[0-9]{8,}")
_TEMPORARY_NAME = re.compile(r"\..+\.[0-9]+(-[0-9]+)?\.tmp")  # of `atomic_write`
_TYPES = {"step": int, "tokens": int, "data": str, "solved": bool, "config": dict, "changes": list, "files": dict}


class Manifest(NamedTuple):
    """Everything that a checkpoint states about a run, apart from tensors."""

    step: int  # number of steps taken
    tokens: int  # number of tokens these steps have read
    data: str  # fingerprint of the data
    solved: bool  # whether the task was found to be solved, which finishes a run before its last step
    config: dict[str, Any]  # config of the run, as nested tables
    changes: list[dict[str, Any]]  # changes of the config since the run began: the step, and old and new values by name
    files: dict[str, str] = {}  # checksum of every other file, by name; never changed  # noqa: RUF012

    def write(self, directory: Path, *, durable: bool = False) -> None:
        """Write the manifest into the directory of a checkpoint; a `durable` one survives a power cut."""
        fields = {"version": _VERSION, **self._asdict()}
        write_json(directory / MANIFEST_FILE, {**fields, "checksum": manifest_checksum(fields)}, durable=durable)


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint; raise `ValueError` if it is missing or damaged."""
    if not (directory / MANIFEST_FILE).is_file():
        raise ValueError(f"{directory}: damaged: {MANIFEST_FILE} is missing")
    fields = read_json(directory / MANIFEST_FILE)
    if fields.pop("checksum", None) != manifest_checksum(fields):
        raise ValueError(f"{directory}: damaged: {MANIFEST_FILE} does not have the checksum it states")
    if (version := fields.pop("version", None)) != _VERSION:
        raise ValueError(f"{directory}: expected a checkpoint of version {_VERSION}, got {version}")
    for name, kind in _TYPES.items():
        if type(value := fields.get(name)) is not kind:
            raise ValueError(
                f"{directory}: damaged: {MANIFEST_FILE} must have a {kind.__name__} {name}, got {value!r:.60}"
            )
    manifest = Manifest(**{name: fields[name] for name in _TYPES})
    if manifest.step != checkpoint_step(directory):
        raise ValueError(f"{directory}: damaged: {MANIFEST_FILE} must be of the step in the name, got {manifest.step}")
    return manifest


def manifest_checksum(fields: dict[str, Any]) -> str:
    """Return the checksum of a manifest's other fields."""
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step, whether or not it exists."""
    return directory / f"step-{step:08d}"


def checkpoint_step(path: Path) -> int:
    """Return the step of a checkpoint, by its name."""
    return int(path.name.removeprefix("step-"))


def list_checkpoints(directory: Path) -> list[Path]:
    """List the checkpoints in a directory, the latest first; files with other names are ignored."""
    paths = [path for path in directory.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=checkpoint_step, reverse=True)


def make_directory(directory: Path) -> None:
    """Make a directory, with its parents, that survives a power cut."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync(path.parent)


def remove_temporary_files(directory: Path) -> None:
    """Remove the files that killed writers have left in a directory, which this process must have locked."""
    for path in directory.glob(".*.tmp"):
        if _TEMPORARY_NAME.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


@contextmanager
def checkpoint_write_errors(target: Path) -> Iterator[None]:
    """Name the checkpoint in an `OSError` of the block."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{target}: cannot be written; earlier ones are kept ({error})") from error
