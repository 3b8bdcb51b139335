"""Runs of `anymamba train`: how one begins in a directory, and how it continues from its latest checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anymamba.core.io import run_lock
from anymamba.training.checkpoint.resume import check_no_run, reopen
from anymamba.training.checkpoint.run_state import checkpoints
from anymamba.training.config.resolve import placed, settled
from anymamba.training.config.run_config import TrainingConfig
from anymamba.training.config.tabular_config import FileConfig
from anymamba.training.distributed.process_group import Workers, is_restarted, joined
from anymamba.training.tasks.language_model import LanguageTask
from anymamba.training.tasks.tabular_runs import begin_files, is_file_run, open_files
from anymamba.training.trainer import Callback, Trainer


def train(
    config: TrainingConfig | FileConfig | None = None,
    directory: str | os.PathLike[str] = "runs/train",
    *,
    callbacks: Iterable[Callback] = (),
    report: Callable[[str], None] | None = None,
) -> Trainer[Any]:
    """Train a language model, or a model on files: what `anymamba train CONFIG --out DIRECTORY` does.

        run = train(read_config("mine.toml", {"optimizer.lr": "1e-3"}), "runs/mine", callbacks=[print])
        run.finished, run.step, run.evaluated.values, run.model

    Args:
        config: of the run; all defaults if not given.
        directory: of the run.
        callbacks: called after every step with its `Row`; one that returns True ends the run there, as Ctrl-C does.
        report: receives lines about what happens; if not given, they go to stderr with live progress.

    Returns:
        The run, finished or stopped.

    Raises:
        ValueError: the directory has a run or a model already, or the config or the text cannot work.
        FloatingPointError: the loss or gradient is not finite.
    """
    trainer: Trainer[Any]
    workers = joined()
    if isinstance(config, FileConfig):
        workers.require_single_process()
        trainer = begin_files(config, Path(directory), report or to_stderr)
    else:
        trainer = begin(config or TrainingConfig(), Path(directory), report or to_stderr, workers)
    trainer.run(callbacks, shown=report is None)
    return trainer


def resume(
    directory: str | os.PathLike[str],
    changes: Mapping[str, str | Sequence[str]] | None = None,
    *,
    callbacks: Iterable[Callback] = (),
    report: Callable[[str], None] | None = None,
) -> Trainer[Any]:
    """Continue a run from its latest good checkpoint: what `anymamba train --resume DIRECTORY` does.

    Args:
        directory: of the run.
        changes: of its config, as texts by dotted name: {"optimizer.lr": "1e-4"}.
        callbacks: as for `train`.
        report: as for `train`.

    Returns:
        The run, finished or stopped.

    Raises:
        ValueError: there is none, or `changes` name what a run cannot change.
        FloatingPointError: the loss or gradient is not finite.
    """
    trainer: Trainer[Any]
    workers = joined()
    if is_file_run(Path(directory)):
        workers.require_single_process()
        trainer = open_files(Path(directory), changes or {}, report or to_stderr)
    else:
        trainer = open_run(Path(directory), changes or {}, report or to_stderr, workers)
    trainer.run(callbacks, shown=report is None)
    return trainer


def to_stderr(message: str) -> None:
    """Print a line for the user."""
    print(message, file=sys.stderr, flush=True)


def begin(
    config: TrainingConfig, directory: Path, report: Callable[[str], None], workers: Workers | None = None
) -> Trainer[LanguageTask]:
    """A run that is about to begin in a directory.

    If torchrun has restarted the workers because one of them was lost, the run continues if it has begun.

    Raises:
        ValueError: the directory has a run or a model already, or the config or the text cannot work.
    """
    workers = workers or Workers()
    if workers.any(is_restarted()) and workers.any(workers.leads and bool(checkpoints(directory / "checkpoints"))):
        return open_run(directory, {}, report, workers)
    config, task = workers.together(lambda: settled(placed(config, workers))), None

    def make() -> str:
        nonlocal task
        directory.mkdir(parents=True, exist_ok=True)
        with run_lock(directory):
            check_no_run(directory)
            if config.model.init is not None:
                report(f"starting from the weights of {config.model.init}")
            task = LanguageTask(config, directory, report, workers=workers)
        return ""

    workers.first(make)  # it tokenizes the text, once for all workers
    opened = workers.together(lambda: task or LanguageTask(config, directory, report, workers=workers, prepared=True))
    return Trainer(opened, directory, None, report, workers)


def open_run(
    directory: Path,
    overrides: Mapping[str, str | Sequence[str]],
    report: Callable[[str], None],
    workers: Workers | None = None,
) -> Trainer[LanguageTask]:
    """A run that is about to continue from its latest good checkpoint.

    Raises:
        ValueError: there is none, or `overrides` change what the run is.
    """
    instead = f"; to start another run from its weights: anymamba train --model.init {directory} --out DIR"
    workers = workers or Workers()
    quiet = report if workers.leads else lambda _: None
    reopened = reopen(directory, TrainingConfig, lambda config: config.replaced(overrides), quiet, instead, workers)

    def open_task() -> LanguageTask:
        placed(reopened.config, workers)
        return LanguageTask(reopened.config, directory, quiet, begun=reopened.checkpoint.path, workers=workers)

    return Trainer(workers.together(open_task), directory, reopened, quiet, workers)
