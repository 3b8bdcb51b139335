"""Train a model on half of all sums modulo a prime, until it can do the other half.

    python -m examples.grokking [--seed 0] [--out runs/grokking]

A run that was stopped continues when the command is given again. The table is printed and written to OUT/grokking.md,
and a plot of accuracies and participation ratios to OUT/grokking.png.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch: see the Makefile

from anymamba.training.report import Row, can_plot, read_metrics
from examples.grokking.task import GrokkingConfig, GrokkingTask
from examples.runs import parameters_of, seconds_of, trained, write_figure, write_text

_RATIOS = ("ratio_of_states", "ratio_of_embedding", "ratio_of_head")


def draw(rows: list[Row], target: Path) -> None:
    """Accuracies above, participation ratios below, over the steps on a logarithmic axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above = figure.add_subplot(2, 1, 1, ylabel="right sums, %", xscale="log")
    below = figure.add_subplot(2, 1, 2, ylabel="participation ratio", xlabel="step", xscale="log")
    steps = [row.step for row in rows]
    for name, label in (("training_accuracy", "trained on"), ("test_accuracy", "held out")):
        above.plot(steps, [100 * row.evaluated[name] for row in rows], label=label)
    for name in _RATIOS:
        below.plot(steps, [row.evaluated[name] for row in rows], label=name.removeprefix("ratio_of_"))
    above.legend()
    below.legend()
    write_figure(figure, target)


def table(rows: list[Row], shares: tuple[float, ...] = (0.5, 0.99)) -> str:
    """The first evaluations at which each accuracy reached a share, and the first and last evaluation."""
    heads = ("training_accuracy", "test_accuracy", *_RATIOS)
    lines = ["| | step | trained on, % | held out, % | states | embedding | head |", "|---" * 7 + "|"]
    moments = {"first": rows[0]}
    for name, label in (("training_accuracy", "trained on"), ("test_accuracy", "held out")):
        for share in shares:
            if found := [row for row in rows if row.evaluated[name] >= share]:
                moments[f"{label}: {100 * share:.0f} %"] = found[0]
    for label, row in {**moments, "last": rows[-1]}.items():
        values = [100 * row.evaluated[name] for name in heads[:2]] + [row.evaluated[name] for name in heads[2:]]
        lines.append(f"| {label} | {row.step} | " + " | ".join(f"{x:.1f}" for x in values) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m examples.grokking", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/grokking"), help="directory of the run and results")
    parser.add_argument("--steps", type=int, default=GrokkingConfig().schedule.steps)
    given = parser.parse_args(arguments)
    directory = given.out / f"seed-{given.seed}"
    try:
        schedule = replace(GrokkingConfig().schedule, steps=given.steps)
        trainer = trained(GrokkingTask(GrokkingConfig(schedule=schedule, seed=given.seed)), directory)
    except ValueError as error:
        parser.error(str(error))
    if trainer is None:
        return 130
    rows = [row for row in read_metrics(directory / "metrics.csv") if row.evaluated]
    if can_plot():
        draw(rows, given.out / "grokking.png")
    facts = f"{parameters_of(trainer.model):,} parameters, {trainer.step} steps, {seconds_of(directory):.0f} seconds"
    write_text(f"{table(rows)}\n\n{facts}\n", given.out / "grokking.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
