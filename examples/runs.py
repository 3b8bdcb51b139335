"""What the examples share: a command, runs that begin or continue, and a table and a picture of the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from anymamba.core.io import atomic_write
from anymamba.training.api import train_or_resume
from anymamba.training.config.run_config import RunConfig
from anymamba.training.config.sections import CheckpointSection, EvaluationSection, check_at_least, option
from anymamba.training.config.tabular_config import TabularConfig
from anymamba.training.metrics.loggers import can_plot, read_metrics
from anymamba.training.tasks.predict import Predictor
from anymamba.training.tasks.task import Task
from anymamba.training.trainer import Trainer

T = TypeVar("T", bound=Task[Any])
C = TypeVar("C", bound="ExampleConfig")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a small model, and of a step; an example adds its own fields."""

    n_layer: int = option(1, "layers")
    d_model: int = option(64, "width of the residual stream")
    d_state: int = option(16, "state size of a head")
    headdim: int = option(16, "width of a head")
    rows: int = option(64, "rows of a step")

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        check_at_least(self, 1, "n_layer", "d_model", "d_state", "headdim", "rows")


@dataclass(frozen=True, kw_only=True)
class ExampleConfig(RunConfig):
    """A run of a small model; an example adds its own section."""

    evaluation: EvaluationSection = field(default_factory=lambda: EvaluationSection(every=250, log_every=250))
    checkpoints: CheckpointSection = field(default_factory=lambda: CheckpointSection(every=250, keep=1))
    threads: int | None = option(1, "CPU threads; the model is too small for more")

    def run(self: C, seed: int, steps: int | None) -> C:
        """With this seed and number of steps; None keeps the config's number."""
        schedule = self.schedule if steps is None else replace(self.schedule, steps=steps)
        return replace(self, seed=seed, schedule=schedule)


@dataclass(frozen=True)
class Finished(Generic[T]):
    """A run that is over.

    Attributes:
        task: what was learned.
        model: ready to be judged.
        steps: the number taken.
        seconds: the time they took.
        parameters: of the model.
        directory: of the run.
    """

    task: T
    model: Any
    steps: int
    seconds: float
    parameters: int
    directory: Path

    def __str__(self) -> str:
        """A line of facts."""
        return f"{self.parameters:,} parameters, {self.steps} steps, {self.seconds:.0f} seconds"


class RunInterruptedError(Exception):
    """The user stopped a run, which can be continued."""


class Given(NamedTuple):
    """What a command was given.

    Attributes:
        seeds: of the runs.
        steps: of each run; None for the example's usual number.
        out: directory of the runs and results.
        choices: the example's own options, by name.
    """

    seeds: Sequence[int]
    steps: int | None
    out: Path
    choices: Mapping[str, Any]

    def trained(self, task: T, *names: str) -> Finished[T]:
        """The run of a task in OUT/NAMES/seed-N, which begins, continues, or is only read."""
        return trained(task, self.out.joinpath(*names, f"seed-{task.config.seed}"))

    def draw(self, name: str, figsize: tuple[float, float], fill: Callable[[Any], None]) -> None:
        """Write OUT/NAME.png, a figure of matplotlib that `fill` draws into, where that is installed."""
        if can_plot():
            write_figure(figsize, fill, self.out / f"{name}.png")

    def write(self, name: str, text: str) -> None:
        """Print a result, and write it to OUT/NAME.md."""
        self.out.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.out / f"{name}.md") as temporary:
            temporary.write_text(text, encoding="utf-8")
        print(text)


def command(
    module: str,
    about: str,
    body: Callable[[Given], None],
    arguments: Sequence[str] | None,
    *,
    seeds: Sequence[int] = (0,),
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> int:
    """Parse an example's arguments and run it.

    Args:
        module: its name, as in `python -m examples.NAME`.
        about: its documentation, whose first line is shown.
        body: trains, judges and writes.
        arguments: of the command line; None: those of the process.
        seeds: of the runs, if none are given; with a single one, the command takes one.
        options: further ones, as argparse takes them, by name.

    Returns:
        The exit code: 130 if a run was interrupted; a user's mistake exits with 2 and one line.
    """
    parser = argparse.ArgumentParser(prog=f"python -m examples.{module}", description=about.split("\n")[0])
    for name, facts in (options or {}).items():
        parser.add_argument(f"--{name}", **facts)
    if len(seeds) > 1:
        parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds), metavar="SEED")
    else:
        parser.add_argument("--seed", type=int, nargs=1, default=list(seeds), dest="seeds")
    parser.add_argument("--steps", type=int, help="of each run, in place of the usual number")
    out = Path("runs") / module
    parser.add_argument("--out", type=Path, default=out, help="directory of runs and results (default: %(default)s)")
    given = vars(parser.parse_args(arguments))
    try:
        body(Given(given.pop("seeds"), given.pop("steps"), given.pop("out"), given))
    except ValueError as error:
        parser.error(str(error))
    except RunInterruptedError:
        report("interrupted; the same command continues the run")
        return 130
    return 0


def report(message: str) -> None:
    """A line for the reader."""
    print(message, file=sys.stderr, flush=True)


def trained(task: T, directory: Path) -> Finished[T]:
    """The run of a task in a directory, which begins, continues, or is only read.

    Raises:
        RunInterruptedError: it was stopped.
    """
    trainer: Trainer[T] = train_or_resume(task, directory, report)
    if not trainer.finished and not trainer.run():
        raise RunInterruptedError
    model = trainer.model.eval()
    seconds = sum(row.seconds for row in read_metrics(directory / "metrics.csv"))
    return Finished(task, model, trainer.step, seconds, sum(p.numel() for p in model.parameters()), directory)


def file_config(
    given: Given,
    seed: int,
    task: str,
    steps: int,
    *,
    model: dict[str, Any],
    data: dict[str, Any],
    batch: dict[str, int],
    optimizer: dict[str, float],
) -> TabularConfig:
    """A run on files with this default number of steps, evaluated every hundred."""
    return TabularConfig.from_dict(
        {
            "task": task,
            "model": model,
            "data": data,
            "batch": batch,
            "optimizer": optimizer,
            "schedule": {"steps": steps if given.steps is None else given.steps, "final": 0.01},
            "evaluation": {"every": 100, "log_every": 50},
            "checkpoints": {"every": 50, "keep": 1},
            "seed": seed,
            "threads": 1,
        }
    )


def labels_of(run: Finished[Any], file: Path) -> list[str]:
    """The class that the model of a run on files finds for each sequence of a file."""
    predictor = Predictor(run.directory)
    return [line["label"] for line in predictor.predict(predictor.read(str(file)))]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def write_figure(figsize: tuple[float, float], fill: Callable[[Any], None], target: Path) -> None:
    """Write a figure of matplotlib as PNG, in inches, that `fill` draws into."""
    from matplotlib.figure import Figure  # slow, and an extra

    figure = Figure(figsize=figsize, layout="constrained")
    fill(figure)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as temporary:
        figure.savefig(temporary, format="png")
