"""Runs of `anymamba train`: how one is created in a directory, and how it is opened again to continue."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from anymamba.checkpoints.open import open_checkpoint
from anymamba.core.dtypes import parse_device
from anymamba.core.io import read_json, run_lock
from anymamba.generation.tokenizers import FileTokenizer, load_tokenizer
from anymamba.models.config import warn_if_ambiguous
from anymamba.training.checkpoint.manifest import list_checkpoints, make_directory, remove_temporary_files
from anymamba.training.checkpoint.resume import check_no_run, reopen
from anymamba.training.config.run_config import RunConfig, TrainingConfig
from anymamba.training.config.tabular_config import TabularConfig
from anymamba.training.data.documents import bpe_vocab_size
from anymamba.training.distributed.process_group import World, init_distributed, is_restarted
from anymamba.training.layer_execution import check_compiler
from anymamba.training.metrics.loggers import check_loggers
from anymamba.training.tasks.language_model import LanguageTask
from anymamba.training.tasks.tabular_tasks import make_task
from anymamba.training.tasks.task import Task
from anymamba.training.trainer import Callback, Trainer

Report = Callable[[str], None]
T = TypeVar("T", bound=Task[Any])


def train(
    config: TrainingConfig | TabularConfig | None = None,
    directory: str | os.PathLike[str] = "runs/train",
    *,
    callbacks: Iterable[Callback] = (),
    report: Report | None = None,
) -> Trainer[Any]:
    """Train a language model, or a model on files, as `anymamba train CONFIG --out DIRECTORY` does.

        run = train(read_config("mine.toml", {"optimizer.lr": 1e-3}), "runs/mine", callbacks=[print])
        run.finished, run.step, run.evaluation.values, run.model

    Args:
        config: Config of the run; all defaults if omitted.
        directory: Directory of the run.
        callbacks: Functions called after every step with its `StepMetrics`. One that returns True stops the run, as
            Ctrl-C does.
        report: Receives lines about what happens. If omitted, they go to stderr with live progress.

    Returns:
        The run, finished or stopped.

    Raises:
        ValueError: The directory has a run or a model already, or the config or the data cannot work.
        FloatingPointError: The loss or the gradient is not finite.
    """
    trainer = create_run(config or TrainingConfig(), Path(directory), report or to_stderr, init_distributed())
    trainer.run(callbacks, shown=report is None)
    return trainer


def resume(
    directory: str | os.PathLike[str],
    changes: Mapping[str, Any] | None = None,
    *,
    callbacks: Iterable[Callback] = (),
    report: Report | None = None,
) -> Trainer[Any]:
    """Continue a run from its latest good checkpoint, as `anymamba train --resume DIRECTORY` does.

    Args:
        directory: Directory of the run.
        changes: Config fields to change, by dotted name: {"optimizer.lr": 1e-4}.
        callbacks: Functions called after every step, see `train`.
        report: Receives lines about what happens, see `train`.

    Returns:
        The run, finished or stopped.

    Raises:
        ValueError: There is no run, or `changes` name fields that a run cannot change.
        FloatingPointError: The loss or the gradient is not finite.
    """
    trainer = open_run(Path(directory), changes or {}, report or to_stderr, init_distributed())
    trainer.run(callbacks, shown=report is None)
    return trainer


def train_or_resume(task: T, directory: Path, report: Report) -> Trainer[T]:
    """Create the run of a task in a directory, or open the one that is there.

    Raises:
        ValueError: The run in the directory has another task or config.
    """
    if not list_checkpoints(directory / "checkpoints"):
        return Trainer(task, directory, None, report)
    reopened = reopen(directory, type(task.config), lambda _: task.config, report)
    return Trainer(task, directory, reopened, report)


def to_stderr(message: str) -> None:
    """Print a line for the user."""
    print(message, file=sys.stderr, flush=True)


def create_run(
    config: TrainingConfig | TabularConfig, directory: Path, report: Report, world: World | None = None
) -> Trainer[Any]:
    """Create a run in a directory, up to its first step.

    If torchrun has restarted the processes because one of them was lost, and the run has a checkpoint, it continues.
    """
    world = world or World()
    if isinstance(config, TabularConfig):
        world.run_checked(world.require_single_process)
        validate_run(config)
        with _claim_directory(directory):
            tabular_task = make_task(config, report)
        return Trainer(tabular_task, directory, None, report)
    if world.any_rank(is_restarted()) and world.any_rank(
        world.is_main and bool(list_checkpoints(directory / "checkpoints"))
    ):
        return open_run(directory, {}, report, world)
    # 1) Resolve the config before anything is read or written.
    resolved = world.run_checked(lambda: resolve_config(validate_mesh(config, world)))
    task: LanguageTask | None = None

    # 2) The main rank claims the directory and tokenizes the text for all ranks.
    def make() -> str:
        nonlocal task
        with _claim_directory(directory):
            if resolved.model.init is not None:
                report(f"starting from the weights of {resolved.model.init}")
            task = LanguageTask(resolved, directory, report, world=world)
        return ""

    world.run_on_main(make)
    # 3) The other ranks open what it has written.
    opened = world.run_checked(lambda: task or LanguageTask(resolved, directory, report, world=world, prepared=True))
    return Trainer(opened, directory, None, report, world)


def open_run(directory: Path, overrides: Mapping[str, Any], report: Report, world: World | None = None) -> Trainer[Any]:
    """Open a run at its latest good checkpoint, with changes of its config."""
    world = world or World()
    if _is_tabular_run(directory):
        world.run_checked(world.require_single_process)
        tabular_run = reopen(directory, TabularConfig, lambda config: config.with_overrides(overrides), report)
        return Trainer(make_task(tabular_run.config, report), directory, tabular_run, report)
    alternative = f"; to start another run from its weights: anymamba train --model.init {directory} --out DIR"
    report_once: Report = report if world.is_main else lambda _: None
    reopened = reopen(
        directory, TrainingConfig, lambda config: config.with_overrides(overrides), report_once, alternative, world
    )

    def open_task() -> LanguageTask:
        validate_mesh(reopened.config, world)
        return LanguageTask(reopened.config, directory, report_once, begun=reopened.checkpoint.path, world=world)

    return Trainer(world.run_checked(open_task), directory, reopened, report_once, world)


def validate_mesh(config: TrainingConfig, world: World) -> TrainingConfig:
    """Arrange the ranks in the mesh of a config, and check that its rows and layers fit the mesh."""
    device = parse_device(world.local_device(config.device), "device =")
    batch, parallel = config.batch, config.parallel
    world.set_mesh(parallel, device)
    if batch.rows % (batch.accumulation * world.dp_size):
        raise ValueError(
            f"batch: the rows of a microbatch, {batch.rows // batch.accumulation} (tokens / length / accumulation), "
            f"must be a multiple of the ranks that divide them, parallel.replicate · shard = {world.dp_size}"
        )
    if parallel.context > 1:
        if config.precision.compile:
            raise ValueError("precision.compile = true: torch cannot compile layers if ranks share a sequence")
        local_tokens = batch.tokens // batch.accumulation // world.dp_size // parallel.context
        min_tokens = 1 if config.model.init else getattr(config.model.lm_config(256).block_config(), "d_conv", 1)
        if local_tokens < min_tokens:
            raise ValueError(
                f"parallel.context = {parallel.context}: each rank's part of the rows must have {min_tokens} tokens "
                f"or more, got {local_tokens}"
            )
    return config


def validate_run(config: RunConfig) -> None:
    """Check what every run needs: its device, a compiler, and the libraries of its logs."""
    device = parse_device(config.device, "device =")
    if config.precision.compile:
        check_compiler(device)
    check_loggers(config)


def resolve_config(config: TrainingConfig) -> TrainingConfig:
    """Return a config with its tokenizer named; check its device, models and tokenizer before any text is read."""
    validate_run(config)
    name = config.data.tokenizer
    bpe_size = None if name is None else bpe_vocab_size(name)
    # 1) The model: a new one, or one to start from with its tokenizer.
    if config.model.init is None:
        config.model.lm_config(256)
        name = name or "bytes"
    elif bpe_size is not None:
        raise ValueError(
            f"data.tokenizer = {name}: model.init comes with the tokenizer that its weights were trained with"
        )
    else:
        source = open_checkpoint(config.model.init)
        if source.weights is not None:
            raise ValueError(
                f"{config.model.init}: weights in {source.weights} cannot be trained; start from the model that they "
                "were quantized from"
            )
        hint = "--block a_activation=softplus to `anymamba convert` first"
        warn_if_ambiguous(config.model.init, source.config, hint)
        config.model.check_matches(source.config)
        tokenizer = load_tokenizer(name, source.directory, source.config.padded_vocab_size)
        name = name or (str(tokenizer.path) if isinstance(tokenizer, FileTokenizer) else "bytes")
    # 2) The tokenizer: bytes, a file, or one that will be trained on the text.
    if bpe_size is not None:
        return config
    if name != "bytes":
        name = str(Path(name, "tokenizer.json") if Path(name).is_dir() else name)
        FileTokenizer(name, config.data.end_token)
    elif config.data.end_token is not None:
        raise ValueError(f"data.end_token = {config.data.end_token}: bytes have no token that ends a document")
    return replace(config, data=replace(config.data, tokenizer=name))


@contextmanager
def _claim_directory(directory: Path) -> Iterator[None]:
    """Lock the directory of a new run during the block; if the block rejects the run, remove what was added to it."""
    created = [path for path in (directory, *directory.parents) if not path.exists()]
    make_directory(directory)
    try:
        with run_lock(directory):
            check_no_run(directory)
            remove_temporary_files(directory)
            before = set(directory.iterdir())
            try:
                yield
            except ValueError:
                for path in set(directory.iterdir()) - before:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                if created:
                    (directory / ".lock").unlink(missing_ok=True)
                raise
            except OSError:  # text that is tokenized already stays, to go on from there
                if created and [path.name for path in directory.iterdir()] == [".lock"]:
                    (directory / ".lock").unlink()
                raise
    except (ValueError, OSError):
        with suppress(OSError):  # another process has begun to use it
            for path in created:
                path.rmdir()
        raise


def _is_tabular_run(directory: Path) -> bool:
    """Return whether a directory has a run on files, according to the first checkpoint that can be read."""
    for path in list_checkpoints(directory / "checkpoints"):
        try:
            config = read_json(path / "training.json").get("config")
        except (OSError, ValueError):
            continue
        return isinstance(config, dict) and "task" in config
    return False
