"""Train the smallest models that need a selective decay, a rotation, or rotations that do not commute.

    python -m examples.resets --task majority|rotor|spinor [--seeds 0 1 2] [--out runs/resets]

Every variant of the task's model is trained from every seed; a line says how long that may take. A run that was stopped
continues when the command is given again, and one that is finished is only read. The table is printed and written to
OUT/TASK.md, and a plot of accuracy against length to OUT/TASK.png.
"""

from __future__ import annotations

import math

from torch import nn

from examples.resets.by_hand import by_hand
from examples.resets.model import VARIANTS
from examples.resets.report import LENGTHS, Outcome, plot, table
from examples.resets.streams import LENGTH, STREAMS
from examples.resets.task import TEST, ResetConfig, ResetSection, ResetTask, accuracies
from examples.runs import Given, command, report

STEPS = {"majority": 4000, "rotor": 2000, "spinor": 2000}
SECONDS = {"majority": 0.009, "rotor": 0.014, "spinor": 0.023}  # of a step, on an idle core of an AMD EPYC (Zen 3)


def judge(task: str, model: nn.Module, variant: str, seed: int | None, steps: int, seconds: float) -> Outcome:
    """Score a model on test streams of every length."""
    parameters = sum(p.numel() for p in model.parameters())
    rows = {length: 2048 if length == LENGTH else 128 for length in LENGTHS}
    found = {length: accuracies(model, task, TEST, length, rows[length]) for length in LENGTHS}
    return Outcome(variant, seed, parameters, steps, seconds, found)


def run(given: Given) -> None:
    """Train every variant from every seed, and judge them beside the weights written by hand."""
    task = given.choices["task"]
    steps = STEPS[task] if given.steps is None else given.steps
    configs = [
        ResetConfig(reset=ResetSection(task=task, variant=variant)).run(seed, steps)
        for variant in VARIANTS[task]
        for seed in given.seeds
    ]
    minutes = math.ceil(len(configs) * steps * SECONDS[task] / 60)
    report(
        f"{len(configs)} runs, about {minutes} min on an idle core and several times as long on a busy one; a "
        "run ends early when its task is solved"
    )
    outcomes = [judge(task, by_hand(task), "by hand", None, 0, 0.0)]
    for config in configs:
        variant = config.reset.variant
        found = given.trained(ResetTask(config), task, variant.lower().replace(" ", "-"))
        outcomes.append(judge(task, found.model, variant, config.seed, found.steps, found.seconds))
    given.draw(task, (9, 4.5), lambda figure: plot(figure, task, outcomes))
    given.write(task, table(task, outcomes))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 130 if it was interrupted."""
    options = {"task": {"required": True, "choices": STREAMS}}
    return command("resets", __doc__, run, arguments, seeds=(0, 1, 2), options=options)


if __name__ == "__main__":
    raise SystemExit(main())
