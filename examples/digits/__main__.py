"""Train a small model to recognize handwritten digits that it reads pixel by pixel.

    python -m examples.digits --family mamba2|mamba3 [--seed 0] [--out runs/digits]

A run that was stopped continues when the command is given again. The accuracy on the test images is printed and written
to OUT/FAMILY.md, and a picture of predictions to OUT/FAMILY.png.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from examples.command import Arguments, markdown_table, run_command
from examples.digits.images import SIDE, load_digits
from examples.digits.task import DigitsConfig, DigitsSection, DigitsTask
from examples.labeled import Labeled

_FAMILIES: dict[str, Literal["Mamba2", "Mamba3"]] = {"mamba2": "Mamba2", "mamba3": "Mamba3"}
ROWS, COLUMNS = 6, 12


def plot(figure: Any, images: Labeled, predicted: Tensor) -> None:
    """Draw images with the model's predictions; mistakes come first, in red, with the label after a slash."""
    wrong = (predicted != images.labels).int()
    for panel, i in enumerate(wrong.argsort(descending=True, stable=True)[: ROWS * COLUMNS].tolist()):
        axes = figure.add_subplot(ROWS, COLUMNS, panel + 1)
        axes.imshow(images.inputs[i].reshape(SIDE, SIDE).numpy(), cmap="gray_r")
        axes.set_axis_off()
        if wrong[i]:
            axes.set_title(f"{predicted[i]} / {images.labels[i]}", color="red", fontsize=10)
        else:
            axes.set_title(f"{predicted[i]}", fontsize=10)


def run(arguments: Arguments) -> None:
    """Train, and recognize the test images."""
    family = arguments.options["family"]
    (seed,) = arguments.seeds
    config = DigitsConfig(digits=DigitsSection(family=_FAMILIES[family])).with_seed(seed, arguments.steps)
    finished = arguments.train(DigitsTask(config, load_digits()), family)
    test = finished.task.digits.test
    with torch.no_grad():
        predicted = finished.model(test.inputs).argmax(-1)
    wrong, total = int((predicted != test.labels).sum()), len(predicted)
    arguments.draw(family, (0.8 * COLUMNS, ROWS), lambda figure: plot(figure, test, predicted))
    shares = [f"{100 * (1 - wrong / total):.1f} %", f"{wrong} of {total}"]
    row = [family, finished.parameters, seed, *shares, finished.steps, f"{finished.seconds:.0f}"]
    heads = ["family", "parameters", "seed", "test accuracy", "mistakes", "steps", "seconds"]
    arguments.write(family, markdown_table(heads, [row]))


main = partial(run_command, "digits", __doc__, run, options={"family": {"required": True, "choices": _FAMILIES}})


if __name__ == "__main__":
    raise SystemExit(main())
