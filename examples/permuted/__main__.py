"""Train a model to recognise digits of 28 x 28 pixels that come in one fixed random order.

    python -m examples.permuted [--seed 0] [--out runs/permuted]

scikit-learn's digits of 8 x 8 pixels are enlarged, and their 784 pixels put into an order in which neighbours are far
apart. A run that was stopped continues when the command is given again. The table is printed and written to
OUT/permuted.md, and a picture of images as they are read to OUT/permuted.png.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch: see the Makefile

import numpy as np
import torch
import torch.nn.functional as F

from anymamba.training.file_config import FileConfig
from anymamba.training.file_task import file_task
from anymamba.training.predictions import Predictor
from anymamba.training.report import can_plot
from examples.digits.images import BRIGHTEST, CLASSES, SIDE, load_digits
from examples.labelled import Labelled
from examples.runs import parameters_of, report, seconds_of, trained, write_figure, write_text

LARGE = 28


def order_of_pixels() -> np.ndarray:
    """The order in which pixels are read, always the same."""
    return np.random.default_rng(0).permutation(LARGE * LARGE)


def enlarged(images: torch.Tensor) -> np.ndarray:
    """Images (b, 64) with intensities from 0 to 16 as (b, 784) from 0 to 1, in reading order."""
    small = images.float().view(-1, 1, SIDE, SIDE) / BRIGHTEST
    return F.interpolate(small, size=(LARGE, LARGE), mode="bilinear", align_corners=False).flatten(1).numpy()


def write_images(part: Labelled, directory: Path, name: str) -> Path:
    """Pixels as they are read, and digits, as .npy files; the former's path."""
    np.save(directory / f"{name}.npy", enlarged(part.inputs)[:, order_of_pixels()])
    np.save(directory / f"{name}-labels.npy", part.labels.numpy())
    return directory / f"{name}.npy"


def config_of(directory: Path, seed: int, steps: int) -> FileConfig:
    """A run on the images."""
    return FileConfig.from_dict(
        {
            "task": "classification",
            "model": {"family": "Mamba2", "n_layer": 2, "d_model": 32, "d_state": 16, "headdim": 16, "pooling": "mean"},
            "data": {
                "sources": [str(directory / "training.npy")],
                "targets": [str(directory / "training-labels.npy")],
                "labels": [str(digit) for digit in range(CLASSES)],
            },
            "batch": {"rows": 16, "length": LARGE * LARGE},
            "optimiser": {"lr": 4e-3, "weight_decay": 0.05},
            "schedule": {"steps": steps, "final": 0.01},
            "evaluation": {"every": 100, "log_every": 50},
            "checkpoints": {"every": 50, "keep": 1},
            "seed": seed,
            "threads": 1,
        }
    )


def draw(images: np.ndarray, labels: list[int], found: list[str], target: Path, shown: int = 10) -> None:
    """Images as they are, and as they are read, with what the model says."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(shown, 2.4), layout="constrained")
    for k in range(shown):
        for row, pixels in enumerate((images[k], images[k][order_of_pixels()])):
            axes = figure.add_subplot(2, shown, row * shown + k + 1)
            axes.imshow(pixels.reshape(LARGE, LARGE), cmap="gray_r")
            axes.set_axis_off()
            if not row:
                axes.set_title(found[k], color="black" if found[k] == str(labels[k]) else "red", fontsize=10)
    write_figure(figure, target)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m examples.permuted", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/permuted"), help="directory of the run and results")
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args(arguments)
    directory = given.out / f"seed-{given.seed}"
    try:
        digits = load_digits()
        given.out.mkdir(parents=True, exist_ok=True)
        for part, name in ((digits.training, "training"), (digits.test, "test")):
            write_images(part, given.out, name)
        if (trainer := trained(file_task(config_of(given.out, given.seed, given.steps), report), directory)) is None:
            return 130
        predictor = Predictor(directory)
        table = predictor.read(str(given.out / "test.npy"))
        found = [line["label"] for line in predictor.predict(table)]
    except ValueError as error:
        parser.error(str(error))
    labels = digits.test.labels.tolist()
    mistakes = sum(said != str(label) for said, label in zip(found, labels, strict=True))
    lines = ["| parameters | seed | test accuracy | mistakes | steps | seconds |", "|---|---|---|---|---|---|"]
    share = f"{100 * (1 - mistakes / len(labels)):.1f} % | {mistakes} of {len(labels)}"
    facts = f"{trainer.step} | {seconds_of(directory):.0f}"
    lines.append(f"| {parameters_of(trainer.model)} | {given.seed} | {share} | {facts} |")
    if can_plot():
        draw(enlarged(digits.test.inputs), labels, found, given.out / "permuted.png")
    write_text("\n".join(lines) + "\n", given.out / "permuted.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
