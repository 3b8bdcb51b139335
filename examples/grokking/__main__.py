"""Train a model on half of all sums modulo a prime, until it can add the other half.

    python -m examples.grokking [--seed 0] [--out runs/grokking]

A run that was stopped continues when the command is given again. The table is printed and written to OUT/grokking.md,
and a plot of accuracies and participation ratios to OUT/grokking.png.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from anymamba.training import StepMetrics, read_metrics
from examples.command import Arguments, markdown_table, run_command
from examples.grokking.task import GrokkingConfig, GrokkingTask

_ACCURACIES = {"training_accuracy": "trained on", "test_accuracy": "held out"}
_RATIOS = ("ratio_of_states", "ratio_of_embedding", "ratio_of_head")


def plot(figure: Any, rows: list[StepMetrics]) -> None:
    """Draw accuracies above and participation ratios below, over the steps on a logarithmic axis."""
    above = figure.add_subplot(2, 1, 1, ylabel="correct sums, %", xscale="log")
    below = figure.add_subplot(2, 1, 2, ylabel="participation ratio", xlabel="step", xscale="log")
    steps = [row.step for row in rows]
    for name, label in _ACCURACIES.items():
        above.plot(steps, [100 * row.evaluation[name] for row in rows], label=label)
    for name in _RATIOS:
        below.plot(steps, [row.evaluation[name] for row in rows], label=name.removeprefix("ratio_of_"))
    above.legend()
    below.legend()


def table(rows: list[StepMetrics], levels: tuple[float, ...] = (0.5, 0.99)) -> str:
    """Return a table of the first evaluations at which each accuracy reached a level, and of the first and last."""
    moments = {"first": rows[0]}
    for name, label in _ACCURACIES.items():
        for level in levels:
            if reached := [row for row in rows if row.evaluation[name] >= level]:
                moments[f"{label}: {100 * level:.0f} %"] = reached[0]
    lines = []
    for label, row in {**moments, "last": rows[-1]}.items():
        values = [100 * row.evaluation[name] for name in _ACCURACIES] + [row.evaluation[name] for name in _RATIOS]
        lines.append([label, row.step, *(f"{x:.1f}" for x in values)])
    return markdown_table(["", "step", "trained on, %", "held out, %", "states", "embedding", "head"], lines)


def run(arguments: Arguments) -> None:
    """Train, and summarize the evaluations during training."""
    finished = arguments.train(GrokkingTask(GrokkingConfig().with_seed(arguments.seeds[0], arguments.steps)))
    rows = [row for row in read_metrics(finished.directory / "metrics.csv") if row.evaluation]
    arguments.draw("grokking", (8, 6), lambda figure: plot(figure, rows))
    arguments.write("grokking", f"{table(rows)}\n{finished}\n")


main = partial(run_command, "grokking", __doc__, run)


if __name__ == "__main__":
    raise SystemExit(main())
