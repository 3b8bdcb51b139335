"""Train a model to multiply in A5, with states that rotate in planes and with states that rotate in space.

    python -m examples.a5 [--seed 0 1 2] [--out runs/a5]

A run that was stopped continues when the command is given again. The table is printed and written to OUT/a5.md, and a
plot of the accuracy after each generator to OUT/a5.png.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from examples.a5.task import TEST, A5Config, A5Section, A5Task, accuracy_per_position
from examples.command import Arguments, markdown_table, run_command

ROTATIONS: tuple[Any, ...] = ("quaternion", "complex")
LONGEST, ROWS = 48, 1024
SHOWN = (4, 8, 12, 16, 24, 36, 48)


def plot(figure: Any, curves: dict[str, list[Tensor]], length: int) -> None:
    """Draw the accuracy after each generator, one line per seed, with the training lengths shaded."""
    axes = figure.add_subplot(xlabel="generators", ylabel="correct products, %", ylim=(-3, 103))
    for (rotation, seeds), color in zip(curves.items(), ("C0", "C1"), strict=True):
        for i, accuracy_t in enumerate(seeds):
            axes.plot((100 * accuracy_t).tolist(), color=color, alpha=0.8, label=None if i else rotation)
    axes.axvspan(0, length, color="gray", alpha=0.15, label="training")
    axes.legend()


def run(arguments: Arguments) -> None:
    """Train both models from every seed, and evaluate them on longer words."""
    curves: dict[str, list[Tensor]] = {rotation: [] for rotation in ROTATIONS}
    rows = []
    for seed in arguments.seeds:
        for rotation in ROTATIONS:
            config = A5Config(a5=A5Section(rotation=rotation)).with_seed(seed, arguments.steps)
            finished = arguments.train(A5Task(config), rotation)
            accuracy_t = accuracy_per_position(finished.model, finished.task.words(TEST, 0, ROWS, LONGEST))
            curves[rotation].append(accuracy_t)
            percents = [f"{100 * accuracy_t[n]:.1f}" for n in SHOWN]
            rows.append([rotation, seed, finished.parameters, *percents, finished.steps, f"{finished.seconds:.0f}"])
    arguments.draw("a5", (8, 4.5), lambda figure: plot(figure, curves, A5Section().length))
    heads = ["rotation", "seed", "parameters", *(f"after {n}" for n in SHOWN), "steps", "seconds"]
    arguments.write("a5", markdown_table(heads, rows))


main = partial(run_command, "a5", __doc__, run, seeds=(0, 1, 2))


if __name__ == "__main__":
    raise SystemExit(main())
