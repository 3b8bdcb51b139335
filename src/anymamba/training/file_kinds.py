"""The tasks on files, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anymamba.training.file_answers import Classification, Regression
from anymamba.training.file_config import FileConfig
from anymamba.training.file_task import FileTask
from anymamba.training.file_values import MaskedLanguage, NextValue
from anymamba.training.tables import Table, read_tables

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
