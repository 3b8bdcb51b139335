"""What the commands of the examples share: a run that begins or continues, and a figure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TypeVar

from anymamba.ground.files import replacing
from anymamba.training.loop import Trainer, train_or_resume
from anymamba.training.report import read_metrics
from anymamba.training.task import Task

T = TypeVar("T", bound=Task[Any])


def report(message: str) -> None:
    """A line for the reader."""
    print(message, file=sys.stderr, flush=True)


def trained(task: T, directory: Path) -> Trainer[T] | None:
    """The finished run of a task, which begins, continues, or is only read; None if it was interrupted."""
    trainer = train_or_resume(task, directory, report)
    if not trainer.finished and not trainer.run():
        report("interrupted; the same command continues the run")
        return None
    trainer.model.eval()
    return trainer


def seconds_of(directory: Path) -> float:
    """That the steps of a run took."""
    return sum(row.seconds for row in read_metrics(directory / "metrics.csv"))


def parameters_of(model: Any) -> int:
    """How many numbers a model has."""
    return sum(p.numel() for p in model.parameters())


def write_text(text: str, target: Path) -> None:
    """Print a result, and write it to a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(text)


def write_figure(figure: Any, target: Path) -> None:
    """Write a figure of matplotlib as PNG."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        figure.savefig(temporary, format="png")
