"""Train an autoencoder of handwritten digits that reads and draws their patches in both directions.

    python -m examples.autoencoder [--seed 0] [--out runs/autoencoder]

A run that was stopped continues when the command is given again. The error on the test images, beside that of as many
principal components, is printed and written to OUT/autoencoder.md, and a picture of both to OUT/autoencoder.png.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch: see the Makefile

import torch
from torch import Tensor

from anymamba.training.report import can_plot
from examples.autoencoder.model import SIDE
from examples.autoencoder.task import AutoencoderConfig, AutoencoderTask, drawn, mean_squared_error
from examples.digits.images import load_digits
from examples.runs import parameters_of, seconds_of, trained, write_figure, write_text

SHOWN = 12


def by_components(training: Tensor, images: Tensor, count: int) -> Tensor:
    """Images drawn from the mean and the first principal components of others: the best linear code of that size."""
    mean = training.mean(0)
    directions = torch.linalg.svd((training - mean).double(), full_matrices=False).Vh[:count].to(images.dtype)
    return mean + (images - mean) @ directions.T @ directions


def draw(rows: dict[str, Tensor], target: Path) -> None:
    """A row of images for each name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.8 * SHOWN, 1.05 * len(rows)), layout="constrained")
    for i, (name, images) in enumerate(rows.items()):
        for k in range(SHOWN):
            axes = figure.add_subplot(len(rows), SHOWN, i * SHOWN + k + 1)
            axes.imshow(images[k].view(SIDE, SIDE).numpy(), cmap="gray_r", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            if not k:
                axes.set_title(name, loc="left", fontsize=9)
    write_figure(figure, target)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m examples.autoencoder", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/autoencoder"), help="directory of the run and results")
    parser.add_argument("--steps", type=int, default=AutoencoderConfig().schedule.steps)
    given = parser.parse_args(arguments)
    directory = given.out / f"seed-{given.seed}"
    try:
        schedule = replace(AutoencoderConfig().schedule, steps=given.steps)
        task = AutoencoderTask(AutoencoderConfig(schedule=schedule, seed=given.seed), load_digits())
        trainer = trained(task, directory)
    except ValueError as error:
        parser.error(str(error))
    if trainer is None:
        return 130
    code, test = task.config.autoencoder.code, task.test
    rows = {
        "test images": test,
        f"autoencoder, {code} numbers": drawn(trainer.model, test),
        f"{code} principal components": by_components(task.training, test, code),
    }
    if can_plot():
        draw(rows, given.out / "autoencoder.png")
    lines = ["| code | squared error of a pixel, test images |", "|---|---|"]
    lines += [f"| {name} | {mean_squared_error(x, test):.5f} |" for name, x in list(rows.items())[1:]]
    facts = f"{parameters_of(trainer.model):,} parameters, {trainer.step} steps, {seconds_of(directory):.0f} seconds"
    write_text("\n".join(lines) + f"\n\n{facts}\n", given.out / "autoencoder.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
