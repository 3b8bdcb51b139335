"""What the runs of a task come to: a table of accuracies, and a plot of them against the length of the streams."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from anymamba.ground.files import replacing
from examples.resets.streams import LENGTH, STREAMS
from examples.resets.task import TEST

LENGTHS = (8, 16, 32, 64, 128, 256)


class Outcome(NamedTuple):
    """What a run reached.

    Attributes:
        variant: of the model; "by hand" for the weights that were written down.
        seed: of the run, if it was one.
        parameters: of the model.
        steps: taken.
        seconds: that they took.
        accuracies: on the test streams, by length and family.
    """

    variant: str
    seed: int | None
    parameters: int
    steps: int
    seconds: float
    accuracies: dict[int, dict[str, float]]


def memoryless(task: str, rows: int = 2048) -> dict[str, float]:
    """The accuracy of the best guess from the current symbol alone, for each family of test streams."""
    found = {}
    for number, family in enumerate(STREAMS[task].families):
        symbols, labels = STREAMS[task].draw(family, np.random.default_rng([TEST, LENGTH, number]), rows, LENGTH)
        scored = labels >= 0
        counts = np.zeros((3, len(STREAMS[task].classes)))
        np.add.at(counts, (symbols[scored], labels[scored]), 1)
        found[family] = float(counts.max(1).sum() / counts.sum())
    return found


def table(task: str, outcomes: list[Outcome]) -> str:
    """A Markdown table: accuracies in percent on streams of the trained length, a row for each run."""
    families = list(STREAMS[task].families)
    lines = [
        f"| {task} | parameters | seed | {' | '.join(families)} | steps | seconds |",
        f"|---|---|---|{'---|' * len(families)}---|---|",
        f"| best guess without memory | | | {_percents(memoryless(task))} | | |",
    ]
    for o in outcomes:
        run = f"{o.steps} | {o.seconds:.0f}" if o.seed is not None else " | "
        seed = "" if o.seed is None else o.seed
        lines.append(f"| {o.variant} | {o.parameters} | {seed} | {_percents(o.accuracies[LENGTH])} | {run} |")
    return "\n".join(lines) + "\n"


def _percents(accuracies: dict[str, float]) -> str:
    """Rounded down, so that 100 means without a mistake."""
    return " | ".join("100" if x == 1 else f"{np.floor(1000 * x) / 10:.1f}" for x in accuracies.values())


def plot(task: str, outcomes: list[Outcome], target: Path) -> None:
    """Draw each run's accuracy, of its worst family, against the length; the trained length is shaded."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="length of the streams", ylabel="accuracy in the worst family, %", title=task)
    axes.axvspan(LENGTHS[0], LENGTH, color="0.9", label="lengths up to that of training")
    axes.axhline(100 / len(STREAMS[task].classes), color="0.5", ls=":", label="chance")
    colours: dict[str, str] = {}
    for o in outcomes:
        new = o.variant not in colours
        colour = colours.setdefault(o.variant, f"C{len(colours)}")
        worst = [100 * min(o.accuracies[length].values()) for length in LENGTHS]
        style = "--" if o.seed is None else "-"
        axes.plot(LENGTHS, worst, style, color=colour, marker="o", ms=3, label=o.variant if new else None)
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.set_ylim(0, 102)
    figure.legend(loc="outside right upper")
    with replacing(target) as temporary:
        figure.savefig(temporary, format="png")
