"""Progress on stderr: live on a terminal, and a plain line every few steps elsewhere.

━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸─────────────────────────────────────────  step 312/700   0:41 left
loss 1.4321 █▆▅▄▃▃▂▂▂▁▁▁   held out bits per byte 2.0123   9,712 tokens/s   312 MiB
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from time import perf_counter

import torch

from anymamba.training.metrics.loggers import StepMetrics

_BLOCKS = "▁▂▃▄▅▆▇█"
_GAP = "   "
_CYAN = "\x1b[36m"
_DIM = "\x1b[2m"
_BOLD = "\x1b[1m"
_PLAIN = "\x1b[0m"


class ProgressDisplay:
    """The progress of a run on stderr."""

    def __init__(self, steps: int, done: int, every: int, shown: bool = True) -> None:
        """Begin to show progress, `done` of `steps` steps; without a terminal, a line after `every` steps."""
        self._is_shown = shown
        self._steps = steps
        self._first = done
        self._every = every
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._began = perf_counter()
        self._drawn = 0.0  # when the live lines were last drawn
        self._lines = 0  # live lines on the screen
        self._losses = _History()
        self._scores = ""
        self._row: StepMetrics | None = None
        # Of the last steps; earlier ones count less.
        self._seconds = 0.0
        self._tokens = 0.0

    def at(self, row: StepMetrics, tokens: int) -> None:
        """Show a step that read `tokens` tokens."""
        self._row = row
        self._losses.add(row.loss)
        self._seconds = 0.95 * self._seconds + row.seconds
        self._tokens = 0.95 * self._tokens + tokens
        if self._live:
            if perf_counter() - self._drawn >= 0.1 or row.step == self._steps:
                self._draw(row)
        elif row.step % self._every == 0 or row.step == self._steps:
            self.report("  ".join([f"step {row.step}/{self._steps}", f"loss {row.loss:.4f}", *self._statistics(row)]))

    def begin_evaluation(self) -> None:
        """Show that the model is being evaluated, which may take longer than a step."""
        if self._row is None:
            return
        if self._live:
            self._draw(self._row, "evaluating")
        else:
            self.report(f"step {self._row.step}: evaluating")

    def score(self, values: Mapping[str, float]) -> None:
        """Show the results of the last evaluation, by name."""
        self._scores = _GAP.join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
        if self._live and self._row is not None:
            self._draw(self._row)

    def report(self, message: str) -> None:
        """Print lines that stay, without control characters."""
        self._write("".join(x if x.isprintable() or x in "\n\t" else "?" for x in message) + "\n")
        if self._live and self._row is not None:
            self._draw(self._row)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._lines and self._row is not None:
            self._draw(self._row)
            self._lines = 0
            self._write("\n")

    def _statistics(self, row: StepMetrics) -> list[str]:
        pace = (perf_counter() - self._began) / max(1, row.step - self._first)
        speed = f"{self._tokens / max(self._seconds, 1e-9):,.0f} tokens/s"
        return [speed, f"{_clock(pace * (self._steps - row.step))} left", memory()]

    def _draw(self, row: StepMetrics, activity: str = "") -> None:
        """Draw the two live lines over those that are there; an activity takes the place of the time left."""
        self._drawn = perf_counter()
        width = _columns() - 1
        speed, left, used = self._statistics(row)
        plain = not _can_write(_BLOCKS + "━╸─")
        counts = f"  step {row.step}/{self._steps}{_GAP}{activity or left}"
        bar = _bar(row.step / self._steps, max(0, width - len(counts)), plain)
        loss = f"loss {row.loss:.4f}" + ("" if plain else f" {_spark(self._losses.values(16))}")
        texts = [loss, *filter(None, (self._scores, speed, used))]
        while len(texts) > 1 and len(_GAP.join(texts)) > width:
            texts.pop()
        lines = [(bar[0], _CYAN), (bar[1], _DIM), (counts, "")], [(_GAP.join(texts)[:width], _BOLD)]
        self._write("\n".join("".join(_paint(text, style) for text, style in line) for line in lines))
        self._lines = len(lines)

    def _write(self, text: str) -> None:
        """Write over the live lines."""
        if not self._is_shown:
            return
        erased = "\r\x1b[K" + "\x1b[1A\x1b[K" * (self._lines - 1) if self._lines else ""
        self._lines = 0
        print(f"{erased}{text}", end="", file=sys.stderr, flush=True)


class _History:
    """A series of any length in at most a few hundred values, each the mean of equally many."""

    def __init__(self) -> None:
        """Start with no values."""
        self._means: list[float] = []
        self._sum = 0.0
        self._count = 0
        self._stride = 1

    def add(self, value: float) -> None:
        """Add a value."""
        self._sum += value
        self._count += 1
        if self._count == self._stride:
            self._means.append(self._sum / self._stride)
            self._sum = 0.0
            self._count = 0
        if len(self._means) == 512:
            self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
            self._stride *= 2

    def values(self, most: int) -> list[float]:
        """Return the series in at most `most` values."""
        size = -(-len(self._means) // most)
        return [sum(part) / len(part) for i in range(most) if (part := self._means[i * size : (i + 1) * size])]


def memory() -> str:
    """Return the peak memory of the process so far, on the accelerator if it uses one; empty if unknown."""
    if torch.cuda.is_initialized():
        return f"{torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB"
    try:
        import resource
    except ImportError:  # Windows
        return ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{peak / (2**20 if sys.platform == 'darwin' else 2**10):,.0f} MiB"


def _bar(fraction: float, width: int, plain: bool) -> tuple[str, str]:
    """Return the part that is done and the part that is not."""
    halves = round(2 * width * min(1.0, fraction))
    if plain:
        return "#" * (halves // 2), "-" * (width - halves // 2)
    done = "━" * (halves // 2) + "╸" * (halves % 2)
    return done, "─" * (width - len(done))


def _spark(values: Sequence[float]) -> str:
    """Return a line of blocks whose heights are the values."""
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    return "".join(_BLOCKS[round((x - low) / span * (len(_BLOCKS) - 1)) if span > 0 else 0] for x in values)


def _paint(text: str, style: str) -> str:
    return text if not style or not text or "NO_COLOR" in os.environ else f"{style}{text}{_PLAIN}"


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


def _can_write(text: str) -> bool:
    try:
        text.encode(sys.stderr.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
