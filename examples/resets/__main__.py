"""Train the smallest models that need a selective decay, a rotation, or one that does not commute.

    python -m examples.resets --task majority|rotor|spinor [--seeds 0 1 2] [--out runs/resets]

Every variant of the task's model is trained from every seed; a line says how long that may take. A run that was stopped
continues when the command is given again, and one that is finished is only read. The table is printed and written to
OUT/TASK.md, and a plot of accuracy against length to OUT/TASK.png.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch: see the Makefile

from torch import nn

from anymamba.ground.files import replacing
from anymamba.training.loop import train_or_resume
from anymamba.training.report import can_plot, read_metrics
from examples.resets.by_hand import by_hand
from examples.resets.model import VARIANTS
from examples.resets.report import LENGTHS, Outcome, plot, table
from examples.resets.streams import LENGTH, STREAMS
from examples.resets.task import TEST, ResetConfig, ResetSection, ResetTask, accuracies

STEPS = {"majority": 4000, "rotor": 2000, "spinor": 2000}
SECONDS = {"majority": 0.009, "rotor": 0.014, "spinor": 0.023}  # of a step, on an idle core of an AMD EPYC (Zen 3)


def report(message: str) -> None:
    """A line for the reader."""
    print(message, file=sys.stderr, flush=True)


def judge(task: str, model: nn.Module, variant: str, seed: int | None, steps: int, seconds: float) -> Outcome:
    """Score a model on test streams of every length."""
    parameters = sum(p.numel() for p in model.parameters())
    rows = {length: 2048 if length == LENGTH else 128 for length in LENGTHS}
    found = {length: accuracies(model, task, TEST, length, rows[length]) for length in LENGTHS}
    return Outcome(variant, seed, parameters, steps, seconds, found)


def train(config: ResetConfig, directory: Path) -> Outcome | None:
    """Train a variant from a seed, or continue; None if it was interrupted."""
    c = config.reset
    report(f"{c.task}, {c.variant}, seed {config.seed}: {directory}")
    trainer = train_or_resume(ResetTask(config), directory, report)
    if not trainer.finished and not trainer.run():
        return None
    seconds = sum(row.seconds for row in read_metrics(directory / "metrics.csv"))
    return judge(c.task, trainer.model, c.variant, config.seed, trainer.step, seconds)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m examples.resets", description=__doc__.split("\n")[0])
    parser.add_argument("--task", required=True, choices=STREAMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--out", type=Path, default=Path("runs/resets"), help="directory of the runs and results")
    parser.add_argument("--steps", type=int, help="the most steps of a run (2000; majority 4000)")
    given = parser.parse_args(arguments)
    try:
        configs = [
            ResetConfig(
                reset=ResetSection(task=given.task, variant=variant),
                schedule=replace(
                    ResetConfig().schedule, steps=STEPS[given.task] if given.steps is None else given.steps
                ),
                seed=seed,
            )
            for variant in VARIANTS[given.task]
            for seed in given.seeds
        ]
        minutes = math.ceil(sum(config.schedule.steps for config in configs) * SECONDS[given.task] / 60)
        report(
            f"{len(configs)} runs, about {minutes} min on an idle core and several times as long on a busy one; a "
            "run ends early when its task is solved"
        )
        outcomes = [judge(given.task, by_hand(given.task), "by hand", None, 0, 0.0)]
        for config in configs:
            name = config.reset.variant.lower().replace(" ", "-")
            outcome = train(config, given.out / given.task / name / f"seed-{config.seed}")
            if outcome is None:
                report("interrupted; the same command continues")
                return 130
            outcomes.append(outcome)
    except ValueError as error:
        parser.error(str(error))
    text = table(given.task, outcomes)
    with replacing(given.out / f"{given.task}.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    if can_plot():
        plot(given.task, outcomes, given.out / f"{given.task}.png")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
