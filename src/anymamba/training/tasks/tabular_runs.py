"""Runs on files: how one begins, and how it continues from its latest checkpoint.

§ The tasks on files, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anymamba.core.dtypes import parse_device
from anymamba.core.io import read_json, run_lock
from anymamba.training.checkpoint.resume import check_no_run, reopen
from anymamba.training.checkpoint.run_state import checkpoints
from anymamba.training.compile import check_compiler
from anymamba.training.config.tabular_config import FileConfig
from anymamba.training.data.tables import Table, read_tables
from anymamba.training.tasks.self_supervised import MaskedLanguage, NextValue
from anymamba.training.tasks.supervised import Classification, Regression
from anymamba.training.tasks.tabular import FileTask
from anymamba.training.trainer import Trainer

TASKS: dict[str, type[FileTask]] = {
    "classification": Classification,
    "regression": Regression,
    "masked-lm": MaskedLanguage,
    "next-value": NextValue,
}


def file_task(config: FileConfig, report: Callable[[str], None]) -> FileTask:
    """The task that a config asks for, with its files read.

    Raises:
        ValueError: the files or the model cannot work.
    """
    return TASKS[config.task](config, report)


def open_table(facts: dict[str, Any], path: str) -> Table:
    """The sequences of a file to predict for, read as in training; targets in it are ignored.

    Raises:
        ValueError: something in it cannot be used, or it has other inputs.
    """
    steps = TASKS[facts["task"]].STEPS
    columns = facts["columns"] if not path.endswith(".npy") else []
    table = read_tables([path], inputs=columns, sequence=facts["sequence"], steps=steps)
    if len(table.channels) != len(facts["channels"]) or table.is_text != (facts["channels"] == ["text"]):
        expected, found = " ".join(facts["channels"]), " ".join(table.channels)
        raise ValueError(f"{path}: expected the inputs that the model was trained on, {expected}, got {found}")
    return table


def begin_files(config: FileConfig, directory: Path, report: Callable[[str], None]) -> Trainer[FileTask]:
    """A run that is about to begin in a directory.

    Raises:
        ValueError: the directory has a run or a model already, or the config or the files cannot work.
    """
    device = parse_device(config.device, "device =")
    if config.precision.compile:
        check_compiler(device)
    directory.mkdir(parents=True, exist_ok=True)
    with run_lock(directory):
        check_no_run(directory)
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
