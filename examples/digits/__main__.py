"""Train a small model to report handwritten digits that it reads pixel by pixel.

    python -m examples.digits --family mamba2|mamba3 [--seed 0] [--out runs/digits]

A run that was stopped continues when the command is given again. The accuracy on the test images is printed and written
to OUT/FAMILY.md, and a picture of predictions to OUT/FAMILY.png.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch: see the Makefile

import torch

from anymamba.ground.files import replacing
from anymamba.training.loop import train_or_resume
from anymamba.training.report import can_plot, read_metrics
from examples.digits.images import SIDE, load_digits
from examples.digits.task import DigitsConfig, DigitsSection, DigitsTask
from examples.labelled import Labelled

_FAMILIES: dict[str, Literal["Mamba2", "Mamba3"]] = {"mamba2": "Mamba2", "mamba3": "Mamba3"}


def report(message: str) -> None:
    """A line for the reader."""
    print(message, file=sys.stderr, flush=True)


def draw_predictions(images: Labelled, predicted: torch.Tensor, target: Path, rows: int = 6, columns: int = 12) -> None:
    """Draw images with what the model takes them for; mistakes come first, in red, with the truth after a slash."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * 0.8, rows), layout="constrained")
    wrong = (predicted != images.labels).int()
    for place, i in enumerate(wrong.argsort(descending=True, stable=True)[: rows * columns].tolist()):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.imshow(images.inputs[i].reshape(SIDE, SIDE).numpy(), cmap="gray_r")
        axes.set_axis_off()
        if wrong[i]:
            axes.set_title(f"{predicted[i]} / {images.labels[i]}", color="red", fontsize=10)
        else:
            axes.set_title(f"{predicted[i]}", fontsize=10)
    with replacing(target) as temporary:
        figure.savefig(temporary, format="png")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m examples.digits", description=__doc__.split("\n")[0])
    parser.add_argument("--family", required=True, choices=_FAMILIES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="directory of the runs and results")
    parser.add_argument("--steps", type=int, default=DigitsConfig().schedule.steps)
    given = parser.parse_args(arguments)
    directory = given.out / given.family / f"seed-{given.seed}"
    try:
        config = DigitsConfig(
            digits=DigitsSection(family=_FAMILIES[given.family]),
            schedule=replace(DigitsConfig().schedule, steps=given.steps),
            seed=given.seed,
        )
        task = DigitsTask(config, load_digits())
        trainer = train_or_resume(task, directory, report)
        if not trainer.finished and not trainer.run():
            report("interrupted; the same command continues the run")
            return 130
    except ValueError as error:
        parser.error(str(error))
    test = task.digits.test
    with torch.no_grad():
        predicted = trainer.model(test.inputs).argmax(-1)
    mistakes = int((predicted != test.labels).sum())
    seconds = sum(row.seconds for row in read_metrics(directory / "metrics.csv"))
    text = (
        "| family | parameters | seed | test accuracy | mistakes | steps | seconds |\n|---|---|---|---|---|---|---|\n"
        f"| {given.family} | {sum(p.numel() for p in trainer.model.parameters())} | {given.seed} "
        f"| {100 * (1 - mistakes / len(predicted)):.1f} % | {mistakes} of {len(predicted)} | {trainer.step} "
        f"| {seconds:.0f} |\n"
    )
    with replacing(given.out / f"{given.family}.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    if can_plot():
        draw_predictions(test, predicted, given.out / f"{given.family}.png")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
