"""Train a model to recognize digits of 28 x 28 pixels that come in one fixed random order.

    python -m examples.permuted [--seed 0] [--out runs/permuted]

scikit-learn's digits of 8 x 8 pixels are enlarged, and their 784 pixels put into an order in which neighbors are far
apart. A run that was stopped continues when the command is given again. The table is printed and written to
OUT/permuted.md, and a picture of images as they are read to OUT/permuted.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from anymamba.training.config.tabular_config import TabularConfig
from anymamba.training.tasks.tabular_tasks import make_task
from examples.digits.images import BRIGHTEST, CLASSES, SIDE, load_digits
from examples.labeled import Labeled
from examples.runs import Given, command, file_config, labels_of, markdown, report

LARGE, SHOWN = 28, 10


def order_of_pixels() -> np.ndarray:
    """The order in which pixels are read, always the same."""
    return np.random.default_rng(0).permutation(LARGE * LARGE)


def enlarged(images: torch.Tensor) -> np.ndarray:
    """Images (b, 64) with intensities from 0 to 16 as (b, 784) from 0 to 1, in reading order."""
    small = images.float().view(-1, 1, SIDE, SIDE) / BRIGHTEST
    return F.interpolate(small, size=(LARGE, LARGE), mode="bilinear", align_corners=False).flatten(1).numpy()


def write_images(part: Labeled, directory: Path, name: str) -> None:
    """Pixels as they are read, and digits, as .npy files."""
    np.save(directory / f"{name}.npy", enlarged(part.inputs)[:, order_of_pixels()])
    np.save(directory / f"{name}-labels.npy", part.labels.numpy())


def config_of(given: Given) -> TabularConfig:
    """A run on the images."""
    return file_config(
        given,
        given.seeds[0],
        "classification",
        500,
        model={"family": "Mamba2", "n_layer": 2, "d_model": 32, "d_state": 16, "headdim": 16, "pooling": "mean"},
        data={
            "sources": [str(given.out / "training.npy")],
            "targets": [str(given.out / "training-labels.npy")],
            "labels": [str(digit) for digit in range(CLASSES)],
        },
        batch={"rows": 16, "length": LARGE * LARGE},
        optimizer={"lr": 4e-3, "weight_decay": 0.05},
    )


def plot(figure: Any, images: np.ndarray, labels: list[str], said: list[str]) -> None:
    """Images as they are, and as they are read, with the model's predictions."""
    for k in range(SHOWN):
        for row, pixels in enumerate((images[k], images[k][order_of_pixels()])):
            axes = figure.add_subplot(2, SHOWN, row * SHOWN + k + 1)
            axes.imshow(pixels.reshape(LARGE, LARGE), cmap="gray_r")
            axes.set_axis_off()
            if not row:
                axes.set_title(said[k], color="black" if said[k] == labels[k] else "red", fontsize=10)


def run(given: Given) -> None:
    """Train, and recognize the test images."""
    digits, (seed,) = load_digits(), given.seeds
    given.out.mkdir(parents=True, exist_ok=True)
    for part, name in ((digits.training, "training"), (digits.test, "test")):
        write_images(part, given.out, name)
    found = given.trained(make_task(config_of(given), report))
    said, labels = labels_of(found, given.out / "test.npy"), [str(digit) for digit in digits.test.labels.tolist()]
    wrong, total = sum(a != b for a, b in zip(said, labels, strict=True)), len(labels)
    images = enlarged(digits.test.inputs)
    given.draw("permuted", (SHOWN, 2.4), lambda figure: plot(figure, images, labels, said))
    shares = [f"{100 * (1 - wrong / total):.1f} %", f"{wrong} of {total}"]
    row = [found.parameters, seed, *shares, found.steps, f"{found.seconds:.0f}"]
    given.write("permuted", markdown(["parameters", "seed", "test accuracy", "mistakes", "steps", "seconds"], [row]))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    return command("permuted", __doc__, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
