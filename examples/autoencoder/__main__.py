"""Train an autoencoder of handwritten digits that reads and draws their patches in both directions.

    python -m examples.autoencoder [--seed 0] [--out runs/autoencoder]

A run that was stopped continues when the command is given again. The error on the test images, compared with that of as
many principal components, is printed and written to OUT/autoencoder.md, and a picture of both to OUT/autoencoder.png.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from examples.autoencoder.model import SIDE
from examples.autoencoder.task import AutoencoderConfig, AutoencoderTask, mean_squared_error, reconstruct
from examples.command import Arguments, markdown_table, run_command
from examples.digits.images import load_digits

SHOWN = 12


def reconstruct_by_components(training: Tensor, images: Tensor, count: int) -> Tensor:
    """Reconstruct images from the first principal components of others: the best linear code of that size."""
    mean = training.mean(0)
    directions = torch.linalg.svd((training - mean).double(), full_matrices=False).Vh[:count].to(images.dtype)
    return mean + (images - mean) @ directions.T @ directions


def plot(figure: Any, rows: dict[str, Tensor]) -> None:
    """Draw one row of images per name."""
    for i, (name, images) in enumerate(rows.items()):
        for k in range(SHOWN):
            axes = figure.add_subplot(len(rows), SHOWN, i * SHOWN + k + 1)
            axes.imshow(images[k].view(SIDE, SIDE).numpy(), cmap="gray_r", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            if not k:
                axes.set_title(name, loc="left", fontsize=9)


def run(arguments: Arguments) -> None:
    """Train, and reconstruct the test images from their codes."""
    task = AutoencoderTask(AutoencoderConfig().with_seed(arguments.seeds[0], arguments.steps), load_digits())
    finished = arguments.train(task)
    code, test = task.config.autoencoder.code, task.test
    rows = {
        f"autoencoder, {code} numbers": reconstruct(finished.model, test),
        f"{code} principal components": reconstruct_by_components(task.training, test, code),
    }
    size = (0.8 * SHOWN, 1.05 * (1 + len(rows)))
    arguments.draw("autoencoder", size, lambda figure: plot(figure, {"test images": test, **rows}))
    errors = [[name, f"{mean_squared_error(x, test):.5f}"] for name, x in rows.items()]
    table = markdown_table(["code", "squared error of a pixel, test images"], errors)
    arguments.write("autoencoder", f"{table}\n{finished}\n")


main = partial(run_command, "autoencoder", __doc__, run)


if __name__ == "__main__":
    raise SystemExit(main())
