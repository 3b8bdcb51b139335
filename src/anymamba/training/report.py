"""What a run leaves to read: a table of metrics, a plot, TensorBoard logs, and lines or a live line of progress."""

from __future__ import annotations

import csv
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from anymamba.files import replacing


class Row(NamedTuple):
    """The metrics of a step.

    Attributes:
        step: counted from 1.
        tokens: read so far.
        loss: mean over the step's targets, in nats.
        learning_rate: of the step.
        gradient_norm: before clipping.
        seconds: that the step took.
        evaluated: what the evaluation found, by name, if there was one behind the step.
    """

    step: int
    tokens: int
    loss: float
    learning_rate: float
    gradient_norm: float
    seconds: float
    evaluated: dict[str, float]


_COLUMNS = Row._fields[:-1]


class MetricsTable:
    """metrics.csv: a row a step, and after a resume exactly the rows of the steps that count."""

    def __init__(self, path: Path, step: int, names: Sequence[str] = ()) -> None:
        """Open the table, keeping the rows up to `step`; `names` are those of what evaluations find."""
        rows, self._names, columns = [], names, [*_COLUMNS, *names]
        if path.is_file() and step:
            with path.open(newline="", encoding="utf-8") as file:
                rows = [row for row in list(csv.reader(file))[1:] if len(row) == len(columns) and int(row[0]) <= step]
        with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *rows])
        self._file = path.open("a", newline="", encoding="utf-8")

    def add(self, row: Row) -> None:
        """Write a row."""
        values = [*row[:-1], *(row.evaluated.get(name) for name in self._names)]
        csv.writer(self._file).writerow(["" if x is None else repr(x) for x in values])
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[Row]:
    """The rows of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    found, n = [], len(_COLUMNS)
    for r in rows:
        evaluated = {name: float(x) for name, x in zip(header[n:], r[n:], strict=True) if x}
        loss, rate, norm, seconds = map(float, r[2:n])
        found.append(Row(int(r[0]), int(r[1]), loss, rate, norm, seconds, evaluated))
    return found


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_losses(metrics: Path, target: Path, xz_bits_per_byte: float, bytes_per_token: float) -> None:
    """Draw training and held-out bits per byte, and those of xz, over the steps."""
    from matplotlib.figure import Figure

    rows, nats = read_metrics(metrics), 0.6931471805599453
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="bits per byte")
    axes.plot([r.step for r in rows], [r.loss / nats / bytes_per_token for r in rows], lw=0.8, label="training")
    seen = [(r.step, r.evaluated["held_out_bits_per_byte"]) for r in rows if r.evaluated]
    axes.plot([s for s, _ in seen], [b for _, b in seen], marker="o", label="held out")
    axes.axhline(xz_bits_per_byte, color="grey", ls="--", label="xz -9, held out")
    axes.legend()
    with replacing(target) as temporary:
        figure.savefig(temporary, format="png")


class TensorBoard:
    """Logs for TensorBoard."""

    def __init__(self, directory: Path, step: int) -> None:
        """Open the logs; what an earlier run wrote behind `step` no longer counts.

        Raises:
            ValueError: TensorBoard is not installed.
        """
        if importlib.util.find_spec("tensorboard") is None:
            raise ValueError(
                "evaluation.tensorboard = true needs TensorBoard: pip install 'anymamba[train]', or set it to false"
            )
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory), purge_step=step + 1)

    def add(self, row: Row) -> None:
        """Log a row."""
        values = {name: getattr(row, name) for name in ("loss", "learning_rate", "gradient_norm")}
        for name, value in {**values, **row.evaluated}.items():
            self._writer.add_scalar(name, value, row.step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Display:
    """Progress on stderr: one live line on a terminal, now and then a plain line elsewhere."""

    def __init__(self, steps: int, done: int, every: int) -> None:
        """Begin behind `done` of `steps`."""
        self._steps, self._first, self._every = steps, done, every
        self._live, self._width, self._began, self._shown = sys.stderr.isatty(), 0, perf_counter(), 0.0

    def tell(self, message: str) -> None:
        """A line that stays."""
        erased = f"\r{'':<{self._width}}\r" if self._width else ""  # the live line
        print(f"{erased}{message}", file=sys.stderr, flush=True)
        self._width = 0

    def at(self, row: Row, tokens: int) -> None:
        """Show a step that read `tokens`."""
        now, done = perf_counter(), row.step - self._first
        last = row.step == self._steps
        if self._live:
            if now - self._shown < 0.1 and not last:
                return
        elif row.step % self._every and not last:
            return
        self._shown = now
        pace = (now - self._began) / done
        line = (
            f"step {row.step}/{self._steps}  loss {row.loss:.4f}  {tokens / pace:,.0f} tokens/s  "
            f"{_clock(pace * (self._steps - row.step))} left  {_memory()}"
        )
        if self._live:
            print(f"\r{line:<{self._width}}", end="\n" if last else "", file=sys.stderr, flush=True)
            self._width = 0 if last else len(line)
        else:
            self.tell(line)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _memory() -> str:
    """The most memory that the process had so far, where the system tells."""
    try:
        import resource
    except ImportError:  # Windows
        return ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{peak / (2**20 if sys.platform == 'darwin' else 2**10):.0f} MiB"
