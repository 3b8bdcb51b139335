"""Train a model on half of all sums modulo a prime, until it can do the other half.

    python -m examples.grokking [--seed 0] [--out runs/grokking]

A run that was stopped continues when the command is given again. The table is printed and written to OUT/grokking.md,
and a plot of accuracies and participation ratios to OUT/grokking.png.
"""

from __future__ import annotations

from typing import Any

from anymamba.training.metrics.loggers import StepMetrics, read_metrics
from examples.grokking.task import GrokkingConfig, GrokkingTask
from examples.runs import Given, command, markdown

_ACCURACIES = {"training_accuracy": "trained on", "test_accuracy": "held out"}
_RATIOS = ("ratio_of_states", "ratio_of_embedding", "ratio_of_head")


def plot(figure: Any, rows: list[StepMetrics]) -> None:
    """Accuracies above, participation ratios below, over the steps on a logarithmic axis."""
    above = figure.add_subplot(2, 1, 1, ylabel="right sums, %", xscale="log")
    below = figure.add_subplot(2, 1, 2, ylabel="participation ratio", xlabel="step", xscale="log")
    steps = [row.step for row in rows]
    for name, label in _ACCURACIES.items():
        above.plot(steps, [100 * row.evaluation[name] for row in rows], label=label)
    for name in _RATIOS:
        below.plot(steps, [row.evaluation[name] for row in rows], label=name.removeprefix("ratio_of_"))
    above.legend()
    below.legend()


def table(rows: list[StepMetrics], shares: tuple[float, ...] = (0.5, 0.99)) -> str:
    """The first evaluations at which each accuracy reached a share, and the first and last evaluation."""
    moments = {"first": rows[0]}
    for name, label in _ACCURACIES.items():
        for share in shares:
            if found := [row for row in rows if row.evaluation[name] >= share]:
                moments[f"{label}: {100 * share:.0f} %"] = found[0]
    lines = []
    for label, row in {**moments, "last": rows[-1]}.items():
        values = [100 * row.evaluation[name] for name in _ACCURACIES] + [row.evaluation[name] for name in _RATIOS]
        lines.append([label, row.step, *(f"{x:.1f}" for x in values)])
    return markdown(["", "step", "trained on, %", "held out, %", "states", "embedding", "head"], lines)


def run(given: Given) -> None:
    """Train, and look back at the evaluations on the way."""
    found = given.trained(GrokkingTask(GrokkingConfig().run(given.seeds[0], given.steps)))
    rows = [row for row in read_metrics(found.directory / "metrics.csv") if row.evaluation]
    given.draw("grokking", (8, 6), lambda figure: plot(figure, rows))
    given.write("grokking", f"{table(rows)}\n{found}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    return command("grokking", __doc__, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
