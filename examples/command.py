"""The frame of the examples: a command whose runs begin or continue, and a table and a picture of their results.

An example has a config with a section of its own, a task, and a function that trains, evaluates and writes. The last is
made a command by `main = partial(run_command, NAME, __doc__, function)`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from anymamba.training import (
    CheckpointSection,
    EvaluationSection,
    Predictor,
    RunConfig,
    TabularConfig,
    Task,
    Trainer,
    can_plot,
    check_at_least,
    option,
    read_metrics,
    train_or_resume,
)

T = TypeVar("T", bound=Task[Any])
C = TypeVar("C", bound="ExampleConfig")


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a small model and of a training step; an example adds its own fields."""

    n_layer: int = option(1, "layers")
    d_model: int = option(64, "width of the residual stream")
    d_state: int = option(16, "state size of a head")
    headdim: int = option(16, "width of a head")
    rows: int = option(64, "rows of a step")

    def __post_init__(self) -> None:
        """Raise for sizes below 1."""
        check_at_least(self, 1, "n_layer", "d_model", "d_state", "headdim", "rows")


@dataclass(frozen=True, kw_only=True)
class ExampleConfig(RunConfig):
    """The config of a run of a small model; an example adds its own section."""

    evaluation: EvaluationSection = field(default_factory=lambda: EvaluationSection(every=250, log_every=250))
    checkpoints: CheckpointSection = field(default_factory=lambda: CheckpointSection(every=250, keep=1))
    threads: int | None = option(1, "CPU threads; the model is too small for more")

    def with_seed(self: C, seed: int, steps: int | None) -> C:
        """Return the config with this seed and number of steps; None keeps the number of steps."""
        schedule = self.schedule if steps is None else replace(self.schedule, steps=steps)
        return replace(self, seed=seed, schedule=schedule)


@dataclass(frozen=True)
class FinishedRun(Generic[T]):
    """A run that is over.

    Attributes:
        task: Task that was learned.
        model: Trained model, in evaluation mode.
        steps: Number of steps taken.
        seconds: Seconds that the steps took.
        parameters: Number of parameters of the model.
        directory: Directory of the run.
    """

    task: T
    model: Any
    steps: int
    seconds: float
    parameters: int
    directory: Path

    def __str__(self) -> str:
        """Return the sizes and times as one line."""
        return f"{self.parameters:,} parameters, {self.steps} steps, {self.seconds:.0f} seconds"


class RunInterruptedError(Exception):
    """The user stopped a run; the same command continues it."""


class Arguments(NamedTuple):
    """The arguments of a command.

    Attributes:
        seeds: Seeds of the runs.
        steps: Steps of each run; None for the example's usual number.
        out: Directory of the runs and results.
        options: The example's own options, by name.
    """

    seeds: Sequence[int]
    steps: int | None
    out: Path
    options: Mapping[str, Any]

    def train(self, task: T, *names: str) -> FinishedRun[T]:
        """Train a task in OUT/NAMES/seed-N: begin the run, continue it, or read the one that is finished."""
        return train_task(task, self.out.joinpath(*names, f"seed-{task.config.seed}"))

    def draw(self, name: str, figsize: tuple[float, float], fill: Callable[[Any], None]) -> None:
        """Write OUT/NAME.png, a figure of matplotlib that `fill` draws into, if matplotlib is installed."""
        if can_plot():
            write_figure(figsize, fill, self.out / f"{name}.png")

    def write(self, name: str, text: str) -> None:
        """Print a result, and write it to OUT/NAME.md."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{name}.md").write_text(text, encoding="utf-8")
        print(text)


def run_command(
    module: str,
    description: str,
    body: Callable[[Arguments], None],
    command_line: Sequence[str] | None = None,
    *,
    seeds: Sequence[int] = (0,),
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> int:
    """Parse an example's command line and run the example.

    Args:
        module: Name of the example, as in `python -m examples.NAME`.
        description: Docstring of the example; its first line is shown as help.
        body: Function that trains, evaluates and writes.
        command_line: Arguments to parse; None for those of the process.
        seeds: Default seeds. An example with one default seed accepts one seed, the others any number.
        options: Further options, as keywords of argparse, by name.

    Returns:
        The exit code: 130 if a run was interrupted. A user's mistake exits with code 2 and one line.
    """
    parser = argparse.ArgumentParser(prog=f"python -m examples.{module}", description=description.split("\n")[0])
    for name, keywords in (options or {}).items():
        parser.add_argument(f"--{name}", **keywords)
    count: Any = "+" if len(seeds) > 1 else 1
    parser.add_argument("--seed", type=int, nargs=count, default=list(seeds), help="seed, one run each")
    parser.add_argument("--steps", type=int, help="steps of each run, instead of the usual number")
    out = Path("runs") / module
    parser.add_argument("--out", type=Path, default=out, help="directory of runs and results (default: %(default)s)")
    values = vars(parser.parse_args(command_line))
    try:
        body(Arguments(values.pop("seed"), values.pop("steps"), values.pop("out"), values))
    except ValueError as error:
        parser.error(str(error))
    except RunInterruptedError:
        print_progress("interrupted; the same command continues the run")
        return 130
    return 0


def print_progress(message: str) -> None:
    """Print a line for the reader, apart from the results."""
    print(message, file=sys.stderr, flush=True)


def train_task(task: T, directory: Path) -> FinishedRun[T]:
    """Train a task in a directory: begin the run, continue it, or read the one that is finished.

    Raises:
        RunInterruptedError: The run was stopped.
    """
    trainer: Trainer[T] = train_or_resume(task, directory, print_progress)
    if not trainer.finished and not trainer.run():
        raise RunInterruptedError
    model = trainer.model.eval()
    seconds = sum(row.seconds for row in read_metrics(directory / "metrics.csv"))
    return FinishedRun(task, model, trainer.step, seconds, sum(p.numel() for p in model.parameters()), directory)


def tabular_config(
    arguments: Arguments,
    seed: int,
    task: str,
    steps: int,
    *,
    model: dict[str, Any],
    data: dict[str, Any],
    batch: dict[str, int],
    optimizer: dict[str, float],
) -> TabularConfig:
    """Return the config of a run on files with this default number of steps, evaluated every hundred."""
    return TabularConfig.from_dict(
        {
            "task": task,
            "model": model,
            "data": data,
            "batch": batch,
            "optimizer": optimizer,
            "schedule": {"steps": steps if arguments.steps is None else arguments.steps, "final": 0.01},
            "evaluation": {"every": 100, "log_every": 50},
            "checkpoints": {"every": 50, "keep": 1},
            "seed": seed,
            "threads": 1,
        }
    )


def predict_labels(run: FinishedRun[Any], file: Path) -> list[str]:
    """Return the class that the model of a run on files predicts for each sequence of a file."""
    predictor = Predictor(run.directory)
    return [line["label"] for line in predictor.predict(predictor.read(str(file)))]


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def write_figure(figsize: tuple[float, float], fill: Callable[[Any], None], target: Path) -> None:
    """Write a figure of matplotlib that `fill` draws into as PNG; its size is in inches."""
    from matplotlib.figure import Figure  # slow, and an extra

    figure = Figure(figsize=figsize, layout="constrained")
    fill(figure)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, format="png")
