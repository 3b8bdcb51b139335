"""Runs on files: how one begins, and how it continues from its latest checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from anymamba.ground.devices import find_device
from anymamba.ground.files import locked, read_json
from anymamba.training.checkpoint import checkpoints
from anymamba.training.file_config import FileConfig
from anymamba.training.file_kinds import file_task
from anymamba.training.file_task import FileTask
from anymamba.training.layers import expect_compiler
from anymamba.training.loop import Trainer
from anymamba.training.reopening import expect_no_run, reopen


def begin_files(config: FileConfig, directory: Path, report: Callable[[str], None]) -> Trainer[FileTask]:
    """A run that is about to begin in a directory.

    Raises:
        ValueError: the directory has a run or a model already, or the config or the files cannot work.
    """
    device = find_device(config.device, "device =")
    if config.precision.compile:
        expect_compiler(device)
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        expect_no_run(directory)
        task = file_task(config, report)
    return Trainer(task, directory, None, report)


def open_files(
    directory: Path, overrides: Mapping[str, str | Sequence[str]], report: Callable[[str], None]
) -> Trainer[FileTask]:
    """A run that is about to continue from its latest good checkpoint; its files are read again.

    Raises:
        ValueError: there is none, `overrides` change what the run is, or the files have changed.
    """
    reopened = reopen(directory, FileConfig, lambda config: config.replaced(overrides), report)
    return Trainer(file_task(reopened.config, report), directory, reopened, report)


def is_file_run(directory: Path) -> bool:
    """Whether a directory has a run on files, by the first checkpoint that can be read."""
    for path in checkpoints(directory / "checkpoints"):
        try:
            config = read_json(path / "training.json").get("config")
        except (OSError, ValueError):
            continue
        return isinstance(config, dict) and "task" in config
    return False
