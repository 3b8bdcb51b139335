"""Train a small model to recognize handwritten digits that it reads pixel by pixel.

    python -m examples.digits --family mamba2|mamba3 [--seed 0] [--out runs/digits]

A run that was stopped continues when the command is given again. The accuracy on the test images is printed and written
to OUT/FAMILY.md, and a picture of predictions to OUT/FAMILY.png.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from examples.digits.images import SIDE, load_digits
from examples.digits.task import DigitsConfig, DigitsSection, DigitsTask
from examples.labeled import Labeled
from examples.runs import Given, command, markdown

_FAMILIES: dict[str, Literal["Mamba2", "Mamba3"]] = {"mamba2": "Mamba2", "mamba3": "Mamba3"}
ROWS, COLUMNS = 6, 12


def plot(figure: Any, images: Labeled, predicted: Tensor) -> None:
    """Images with the model's predictions; mistakes come first, in red, with the truth after a slash."""
    wrong = (predicted != images.labels).int()
    for place, i in enumerate(wrong.argsort(descending=True, stable=True)[: ROWS * COLUMNS].tolist()):
        axes = figure.add_subplot(ROWS, COLUMNS, place + 1)
        axes.imshow(images.inputs[i].reshape(SIDE, SIDE).numpy(), cmap="gray_r")
        axes.set_axis_off()
        if wrong[i]:
            axes.set_title(f"{predicted[i]} / {images.labels[i]}", color="red", fontsize=10)
        else:
            axes.set_title(f"{predicted[i]}", fontsize=10)


def run(given: Given) -> None:
    """Train, and recognize the test images."""
    family, (seed,) = given.choices["family"], given.seeds
    config = DigitsConfig(digits=DigitsSection(family=_FAMILIES[family])).run(seed, given.steps)
    found = given.trained(DigitsTask(config, load_digits()), family)
    test = found.task.digits.test
    with torch.no_grad():
        predicted = found.model(test.inputs).argmax(-1)
    wrong, total = int((predicted != test.labels).sum()), len(predicted)
    given.draw(family, (0.8 * COLUMNS, ROWS), lambda figure: plot(figure, test, predicted))
    shares = [f"{100 * (1 - wrong / total):.1f} %", f"{wrong} of {total}"]
    row = [family, found.parameters, seed, *shares, found.steps, f"{found.seconds:.0f}"]
    heads = ["family", "parameters", "seed", "test accuracy", "mistakes", "steps", "seconds"]
    given.write(family, markdown(heads, [row]))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    options = {"family": {"required": True, "choices": _FAMILIES}}
    return command("digits", __doc__, run, arguments, options=options)


if __name__ == "__main__":
    raise SystemExit(main())
