"""The results of a task's runs: a table of accuracies, and a plot of them against the length of the streams."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from examples.command import markdown_table
from examples.resets.streams import LENGTH, STREAMS
from examples.resets.task import TEST

LENGTHS = (8, 16, 32, 64, 128, 256)


class Outcome(NamedTuple):
    """The result of a run.

    Attributes:
        variant: Variant of the model; "by hand" for hand-written weights.
        seed: Seed of the run; None for hand-written weights.
        parameters: Number of parameters of the model.
        steps: Number of steps taken.
        seconds: Seconds that the steps took.
        accuracies: Accuracies on the test streams, by length and family.
    """

    variant: str
    seed: int | None
    parameters: int
    steps: int
    seconds: float
    accuracies: dict[int, dict[str, float]]


def memoryless(task: str, rows: int = 2048) -> dict[str, float]:
    """Return the accuracy of the best guess from the current symbol alone, for each family of test streams."""
    accuracies = {}
    for number, family in enumerate(STREAMS[task].families):
        symbols, labels = STREAMS[task].draw(family, np.random.default_rng([TEST, LENGTH, number]), rows, LENGTH)
        scored = labels >= 0
        counts = np.zeros((3, len(STREAMS[task].classes)))
        np.add.at(counts, (symbols[scored], labels[scored]), 1)
        accuracies[family] = float(counts.max(1).sum() / counts.sum())
    return accuracies


def table(task: str, outcomes: list[Outcome]) -> str:
    """Return a Markdown table of accuracies in percent on streams of the trained length, one row per run."""
    families = list(STREAMS[task].families)
    rows: list[list[object]] = [["best guess without memory", "", "", *_percents(memoryless(task)), "", ""]]
    for o in outcomes:
        run = ["", "", ""] if o.seed is None else [o.seed, o.steps, f"{o.seconds:.0f}"]
        rows.append([o.variant, o.parameters, run[0], *_percents(o.accuracies[LENGTH]), *run[1:]])
    return markdown_table([task, "parameters", "seed", *families, "steps", "seconds"], rows)


def _percents(accuracies: dict[str, float]) -> list[str]:
    """Format accuracies in percent, rounded down, so that 100 means no mistake."""
    return ["100" if x == 1 else f"{np.floor(1000 * x) / 10:.1f}" for x in accuracies.values()]


def plot(figure: Any, task: str, outcomes: list[Outcome]) -> None:
    """Draw each run's accuracy on its worst family over the length; the training lengths are shaded."""
    axes = figure.add_subplot(xlabel="length of the streams", ylabel="accuracy in the worst family, %", title=task)
    axes.axvspan(LENGTHS[0], LENGTH, color="0.9", label="lengths up to that of training")
    axes.axhline(100 / len(STREAMS[task].classes), color="0.5", ls=":", label="chance")
    colors: dict[str, str] = {}
    for o in outcomes:
        new = o.variant not in colors
        color = colors.setdefault(o.variant, f"C{len(colors)}")
        worst = [100 * min(o.accuracies[length].values()) for length in LENGTHS]
        style = "--" if o.seed is None else "-"
        axes.plot(LENGTHS, worst, style, color=color, marker="o", ms=3, label=o.variant if new else None)
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.set_ylim(0, 102)
    figure.legend(loc="outside right upper")
