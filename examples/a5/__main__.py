"""Train a model to multiply in A5, with states that turn in planes and with states that turn in space.

    python -m examples.a5 [--seeds 0 1 2] [--out runs/a5]

A run that was stopped continues when the command is given again. The table is printed and written to OUT/a5.md, and a
plot of the accuracy after each generator to OUT/a5.png.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch: see the Makefile

from torch import Tensor

from anymamba.training.report import can_plot
from examples.a5.task import TEST, A5Config, A5Section, A5Task, accuracy_per_position
from examples.runs import parameters_of, seconds_of, trained, write_figure, write_text

ROTATIONS: tuple[Any, ...] = ("quaternion", "complex")
LONGEST, ROWS = 48, 1024
SHOWN = (4, 8, 12, 16, 24, 36, 48)


def draw(curves: dict[str, list[Tensor]], length: int, target: Path) -> None:
    """Accuracy after each generator, a line for each seed, with the lengths of the training shaded."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="generators", ylabel="right products, %", ylim=(-3, 103))
    for (rotation, seeds), colour in zip(curves.items(), ("C0", "C1"), strict=True):
        for i, right in enumerate(seeds):
            axes.plot((100 * right).tolist(), color=colour, alpha=0.8, label=None if i else rotation)
    axes.axvspan(0, length, color="grey", alpha=0.15, label="training")
    axes.legend()
    write_figure(figure, target)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m examples.a5", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--out", type=Path, default=Path("runs/a5"), help="directory of the runs and results")
    parser.add_argument("--steps", type=int, default=A5Config().schedule.steps)
    given = parser.parse_args(arguments)
    heads = " | ".join(f"after {n}" for n in SHOWN)
    lines = [f"| rotation | seed | parameters | {heads} | steps | seconds |", "|---" * (len(SHOWN) + 5) + "|"]
    curves: dict[str, list[Tensor]] = {rotation: [] for rotation in ROTATIONS}
    try:
        for seed in given.seeds:
            for rotation in ROTATIONS:
                schedule = replace(A5Config().schedule, steps=given.steps)
                task = A5Task(A5Config(a5=A5Section(rotation=rotation), schedule=schedule, seed=seed))
                directory = given.out / rotation / f"seed-{seed}"
                if (trainer := trained(task, directory)) is None:
                    return 130
                right = accuracy_per_position(trainer.model, task.words(TEST, 0, ROWS, LONGEST))
                curves[rotation].append(right)
                cells = " | ".join(f"{100 * right[n]:.1f}" for n in SHOWN)
                facts = f"{trainer.step} | {seconds_of(directory):.0f}"
                lines.append(f"| {rotation} | {seed} | {parameters_of(trainer.model)} | {cells} | {facts} |")
    except ValueError as error:
        parser.error(str(error))
    if can_plot():
        draw(curves, A5Section().length, given.out / "a5.png")
    write_text("\n".join(lines) + "\n", given.out / "a5.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
