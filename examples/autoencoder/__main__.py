"""Train an autoencoder of handwritten digits that reads and draws their patches in both directions.

    python -m examples.autoencoder [--seed 0] [--out runs/autoencoder]

A run that was stopped continues when the command is given again. The error on the test images, beside that of as many
principal components, is printed and written to OUT/autoencoder.md, and a picture of both to OUT/autoencoder.png.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from examples.autoencoder.model import SIDE
from examples.autoencoder.task import AutoencoderConfig, AutoencoderTask, drawn, mean_squared_error
from examples.digits.images import load_digits
from examples.runs import Given, command, markdown

SHOWN = 12


def by_components(training: Tensor, images: Tensor, count: int) -> Tensor:
    """Images drawn from the mean and the first principal components of others: the best linear code of that size."""
    mean = training.mean(0)
    directions = torch.linalg.svd((training - mean).double(), full_matrices=False).Vh[:count].to(images.dtype)
    return mean + (images - mean) @ directions.T @ directions


def plot(figure: Any, rows: dict[str, Tensor]) -> None:
    """A row of images for each name."""
    for i, (name, images) in enumerate(rows.items()):
        for k in range(SHOWN):
            axes = figure.add_subplot(len(rows), SHOWN, i * SHOWN + k + 1)
            axes.imshow(images[k].view(SIDE, SIDE).numpy(), cmap="gray_r", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            if not k:
                axes.set_title(name, loc="left", fontsize=9)


def run(given: Given) -> None:
    """Train, and draw the test images from their codes."""
    task = AutoencoderTask(AutoencoderConfig().run(given.seeds[0], given.steps), load_digits())
    found = given.trained(task)
    code, test = task.config.autoencoder.code, task.test
    rows = {
        f"autoencoder, {code} numbers": drawn(found.model, test),
        f"{code} principal components": by_components(task.training, test, code),
    }
    size = (0.8 * SHOWN, 1.05 * (1 + len(rows)))
    given.draw("autoencoder", size, lambda figure: plot(figure, {"test images": test, **rows}))
    errors = [[name, f"{mean_squared_error(x, test):.5f}"] for name, x in rows.items()]
    table = markdown(["code", "squared error of a pixel, test images"], errors)
    given.write("autoencoder", f"{table}\n{found}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    return command("autoencoder", __doc__, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
