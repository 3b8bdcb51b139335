"""Train a model to multiply in A5, with states that turn in planes and with states that turn in space.

    python -m examples.a5 [--seeds 0 1 2] [--out runs/a5]

A run that was stopped continues when the command is given again. The table is printed and written to OUT/a5.md, and a
plot of the accuracy after each generator to OUT/a5.png.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from examples.a5.task import TEST, A5Config, A5Section, A5Task, accuracy_per_position
from examples.runs import Given, command, markdown

ROTATIONS: tuple[Any, ...] = ("quaternion", "complex")
LONGEST, ROWS = 48, 1024
SHOWN = (4, 8, 12, 16, 24, 36, 48)


def plot(figure: Any, curves: dict[str, list[Tensor]], length: int) -> None:
    """Accuracy after each generator, a line for each seed, with the lengths of the training shaded."""
    axes = figure.add_subplot(xlabel="generators", ylabel="correct products, %", ylim=(-3, 103))
    for (rotation, seeds), color in zip(curves.items(), ("C0", "C1"), strict=True):
        for i, right in enumerate(seeds):
            axes.plot((100 * right).tolist(), color=color, alpha=0.8, label=None if i else rotation)
    axes.axvspan(0, length, color="gray", alpha=0.15, label="training")
    axes.legend()


def run(given: Given) -> None:
    """Train both models from every seed, and judge them by longer words."""
    curves: dict[str, list[Tensor]] = {rotation: [] for rotation in ROTATIONS}
    rows = []
    for seed in given.seeds:
        for rotation in ROTATIONS:
            config = A5Config(a5=A5Section(rotation=rotation)).run(seed, given.steps)
            found = given.trained(A5Task(config), rotation)
            right = accuracy_per_position(found.model, found.task.words(TEST, 0, ROWS, LONGEST))
            curves[rotation].append(right)
            percents = [f"{100 * right[n]:.1f}" for n in SHOWN]
            rows.append([rotation, seed, found.parameters, *percents, found.steps, f"{found.seconds:.0f}"])
    given.draw("a5", (8, 4.5), lambda figure: plot(figure, curves, A5Section().length))
    heads = ["rotation", "seed", "parameters", *(f"after {n}" for n in SHOWN), "steps", "seconds"]
    given.write("a5", markdown(heads, rows))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    return command("a5", __doc__, run, arguments, seeds=(0, 1, 2))


if __name__ == "__main__":
    raise SystemExit(main())
