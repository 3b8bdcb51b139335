"""Train a model to recognize digits of 28 x 28 pixels that come in one fixed random order.

    python -m examples.permuted [--seed 0] [--out runs/permuted]

scikit-learn's digits of 8 x 8 pixels are enlarged, and their 784 pixels put into an order in which neighbors are far
apart. A run that was stopped continues when the command is given again. The table is printed and written to
OUT/permuted.md, and a picture of images as they are read to OUT/permuted.png.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from anymamba.training import TabularConfig, make_task
from examples.command import Arguments, markdown_table, predict_labels, print_progress, run_command, tabular_config
from examples.digits.images import BRIGHTEST, CLASSES, SIDE, load_digits
from examples.labeled import Labeled

LARGE, SHOWN = 28, 10


def order_of_pixels() -> np.ndarray:
    """Return the order in which pixels are read, which is always the same."""
    return np.random.default_rng(0).permutation(LARGE * LARGE)


def enlarge(images: torch.Tensor) -> np.ndarray:
    """Enlarge images (b, 64) with intensities from 0 to 16 to (b, 784) from 0 to 1, in reading order."""
    small = images.float().view(-1, 1, SIDE, SIDE) / BRIGHTEST
    return F.interpolate(small, size=(LARGE, LARGE), mode="bilinear", align_corners=False).flatten(1).numpy()


def write_images(part: Labeled, directory: Path, name: str) -> None:
    """Write the pixels in the order they are read, and the labels, as .npy files."""
    np.save(directory / f"{name}.npy", enlarge(part.inputs)[:, order_of_pixels()])
    np.save(directory / f"{name}-labels.npy", part.labels.numpy())


def run_config(arguments: Arguments) -> TabularConfig:
    """Return the config of a run on the images."""
    return tabular_config(
        arguments,
        arguments.seeds[0],
        "classification",
        500,
        model={"family": "Mamba2", "n_layer": 2, "d_model": 32, "d_state": 16, "headdim": 16, "pooling": "mean"},
        data={
            "sources": [str(arguments.out / "training.npy")],
            "targets": [str(arguments.out / "training-labels.npy")],
            "labels": [str(digit) for digit in range(CLASSES)],
        },
        batch={"rows": 16, "length": LARGE * LARGE},
        optimizer={"lr": 4e-3, "weight_decay": 0.05},
    )


def plot(figure: Any, images: np.ndarray, labels: list[str], predictions: list[str]) -> None:
    """Draw images, and their pixels in the order they are read, with the model's predictions."""
    for k in range(SHOWN):
        for row, pixels in enumerate((images[k], images[k][order_of_pixels()])):
            axes = figure.add_subplot(2, SHOWN, row * SHOWN + k + 1)
            axes.imshow(pixels.reshape(LARGE, LARGE), cmap="gray_r")
            axes.set_axis_off()
            if not row:
                axes.set_title(predictions[k], color="black" if predictions[k] == labels[k] else "red", fontsize=10)


def run(arguments: Arguments) -> None:
    """Train, and recognize the test images."""
    digits = load_digits()
    (seed,) = arguments.seeds
    arguments.out.mkdir(parents=True, exist_ok=True)
    for part, name in ((digits.training, "training"), (digits.test, "test")):
        write_images(part, arguments.out, name)
    finished = arguments.train(make_task(run_config(arguments), print_progress))
    predictions = predict_labels(finished, arguments.out / "test.npy")
    labels = [str(digit) for digit in digits.test.labels.tolist()]
    wrong, total = sum(a != b for a, b in zip(predictions, labels, strict=True)), len(labels)
    images = enlarge(digits.test.inputs)
    arguments.draw("permuted", (SHOWN, 2.4), lambda figure: plot(figure, images, labels, predictions))
    shares = [f"{100 * (1 - wrong / total):.1f} %", f"{wrong} of {total}"]
    row = [finished.parameters, seed, *shares, finished.steps, f"{finished.seconds:.0f}"]
    heads = ["parameters", "seed", "test accuracy", "mistakes", "steps", "seconds"]
    arguments.write("permuted", markdown_table(heads, [row]))


main = partial(run_command, "permuted", __doc__, run)


if __name__ == "__main__":
    raise SystemExit(main())
