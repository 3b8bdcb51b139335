"""Logs of a run: the table metrics.csv, plots, TensorBoard, and Weights & Biases."""

from __future__ import annotations

import csv
import importlib.util
import math
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from anymamba.core.io import atomic_write, with_filename
from anymamba.training.config.run_config import RunConfig


class StepMetrics(NamedTuple):
    """Metrics of a step.

    Attributes:
        step: Number of the step, counted from 1.
        tokens: Number of tokens read so far.
        loss: Mean over the step's targets, in nats.
        learning_rate: Learning rate of the step.
        gradient_norm: Norm of the gradient before clipping.
        seconds: Duration of the step.
        evaluation: Results of the evaluation after the step, by name; empty if there was none.
    """

    step: int
    tokens: int
    loss: float
    learning_rate: float
    gradient_norm: float
    seconds: float
    evaluation: dict[str, float]

    def to_scalars(self) -> dict[str, int | float]:
        """Return all metrics but the step, by name, with those of the evaluation."""
        values = self._asdict()
        return {name: values[name] for name in _COLUMNS if name != "step"} | self.evaluation


_COLUMNS = StepMetrics._fields[:-1]  # of the file


class MetricsTable:
    """The file metrics.csv: a row for each step, and after a resume exactly the rows of the steps that count.

    Attributes:
        missing: Number of steps taken that the file has no rows of, because somebody has changed or removed it.
    """

    def __init__(self, path: Path, step: int, names: Sequence[str] = ()) -> None:
        """Open the table and keep the rows of the `step` steps taken; `names` are those of the results of evaluations.

        Raise `ValueError` if a row is not readable, or a column has none of the names.
        """
        self._path = path
        self._names = names
        rows = [row for row in read_metrics(path) if row.step <= step] if path.is_file() and step else []
        self.missing = step - len(rows)
        if unknown := sorted({name for row in rows for name in row.evaluation} - set(names)):
            raise ValueError(f"{path}, line 1: expected the columns {', '.join(names)}, got {', '.join(unknown)}")
        with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([[*_COLUMNS, *names], *map(self._format_row, rows)])
        self._file = path.open("a", newline="", encoding="utf-8")

    def add(self, row: StepMetrics) -> None:
        """Write a row."""
        try:
            csv.writer(self._file).writerow(self._format_row(row))
            self._file.flush()
        except OSError as error:
            raise with_filename(self._path, error) from error

    def close(self) -> None:
        """Close the file; what could not be written has been reported."""
        with suppress(OSError):
            self._file.close()

    def _format_row(self, row: StepMetrics) -> list[str]:
        values = [*row[:-1], *(row.evaluation.get(name) for name in self._names)]
        return ["" if x is None else repr(x) for x in values]


def read_metrics(path: Path) -> list[StepMetrics]:
    """Read the rows of a table; an incomplete one at its end, as a crash may leave it, is left out.

    Raises:
        ValueError: Another row is not readable, or not of a later step than the row before it.
    """
    *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")  # a whole line has an end
    header = lines[0].rstrip("\r").split(",") if lines else []
    if tuple(header[: len(_COLUMNS)]) != _COLUMNS and lines:
        raise ValueError(f"{path}, line 1: expected the columns {', '.join(_COLUMNS)}, got {lines[0][:80]!r}")
    rows, last = [], 0
    for number, line in enumerate(lines[1:], 2):
        try:
            row = _parse_row(header, line.split(","))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(
                    f"{path}, line {number}: expected {len(header)} numbers, got {line[:80]!r}; fix or remove the line"
                ) from error
            continue
        if row.step <= last:
            raise ValueError(
                f"{path}, line {number}: expected a step after {last}, got {row.step}; fix or remove the line"
            )
        rows.append(row)
        last = row.step
    return rows


def _parse_row(header: list[str], values: list[str]) -> StepMetrics:
    n = len(_COLUMNS)
    evaluation = {name: float(x) for name, x in zip(header[n:], values[n:], strict=True) if x}
    loss, rate, norm, seconds = map(float, values[2:n])
    return StepMetrics(int(values[0]), int(values[1]), loss, rate, norm, seconds, evaluation)


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_metrics(metrics: Path, target: Path, name: str, baselines: dict[str, float]) -> None:
    """Draw the training loss and, next to it, a metric of evaluations and its baselines."""
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left = figure.add_subplot(1, 2, 1, xlabel="step", ylabel="training loss")
    left.plot([r.step for r in rows], [r.loss for r in rows], lw=0.8)
    right = figure.add_subplot(1, 2, 2, xlabel="step", ylabel=name.replace("_", " "))
    _add_evaluations(right, rows, name, baselines)
    with atomic_write(target) as temporary:
        figure.savefig(temporary, format="png")


def plot_losses(metrics: Path, target: Path, baselines: dict[str, float], bytes_per_token: float) -> None:
    """Draw training and held-out bits per byte, and those of the baselines, over the steps."""
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="bits per byte")
    axes.plot([r.step for r in rows], [r.loss / math.log(2) / bytes_per_token for r in rows], lw=0.8, label="training")
    labeled = {f"{name}, held out": bits for name, bits in baselines.items()}
    _add_evaluations(axes, rows, "held_out_bits_per_byte", labeled)
    with atomic_write(target) as temporary:
        figure.savefig(temporary, format="png")


def _add_evaluations(axes: Any, rows: list[StepMetrics], name: str, baselines: dict[str, float]) -> None:
    """Draw a metric of evaluations, its baselines, and the legend."""
    points = [(r.step, r.evaluation[name]) for r in rows if name in r.evaluation]
    axes.plot([step for step, _ in points], [value for _, value in points], marker="o", label="held out")
    for (label, value), style in zip(baselines.items(), ("--", ":"), strict=False):
        axes.axhline(value, color="gray", ls=style, label=label)
    axes.legend()


@runtime_checkable
class Log(Protocol):
    """The interface of a log."""

    def add(self, row: StepMetrics) -> None:
        """Log a step."""

    def close(self) -> None:
        """Write what is left."""


def check_loggers(config: RunConfig) -> None:
    """Raise `ValueError` if a library for the logs that a config names is not installed."""
    if config.evaluation.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "evaluation.tensorboard = true needs TensorBoard: pip install 'anymamba[train]', or set it to false"
        )
    if config.evaluation.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"evaluation.wandb = {config.evaluation.wandb} needs Weights & Biases: pip install 'anymamba[wandb]'"
        )


def open_logs(config: RunConfig, directory: Path, step: int) -> list[Log]:
    """Open the logs that a config names; `step` steps have been taken."""
    check_loggers(config)
    logs: list[Log] = []
    if config.evaluation.tensorboard:
        logs.append(TensorBoard(directory / "tensorboard", step))
    if config.evaluation.wandb is not None:
        logs.append(WeightsAndBiases(config.evaluation.wandb, directory, config.flat()))
    return logs


class TensorBoard:
    """A log for TensorBoard."""

    def __init__(self, directory: Path, step: int) -> None:
        """Open the log; what was written after `step`, before a resume, no longer counts."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory), purge_step=step + 1)

    def add(self, row: StepMetrics) -> None:
        """Log a step."""
        for name, value in row.to_scalars().items():
            self._writer.add_scalar(name, value, row.step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run on wandb.ai, or on disk only with WANDB_MODE=offline; a resumed run continues the same log."""

    def __init__(self, project: str, directory: Path, config: dict[str, Any]) -> None:
        """Open the run."""
        import wandb

        file = directory / "wandb-id.txt"
        if not file.is_file():
            file.write_text(f"{secrets.token_hex(4)}\n", encoding="utf-8")
        try:
            self._run: Any = wandb.init(
                project=project,
                dir=str(directory),
                name=directory.name,
                id=file.read_text(encoding="utf-8").strip(),
                resume="allow",
                config=config,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            raise ValueError(
                f"evaluation.wandb = {project}: {error} (WANDB_MODE=offline logs to the run's directory only)"
            ) from error

    def add(self, row: StepMetrics) -> None:
        """Log a step."""
        self._run.log(row.to_scalars(), step=row.step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()
