"""Train the smallest models that need a selective decay, a rotation, or rotations that do not commute.

    python -m examples.resets --task majority|rotor|spinor [--seed 0 1 2] [--out runs/resets]

Every variant of the task's model is trained from every seed; a line estimates the time. A run that was stopped
continues when the command is given again, and one that is finished is only read. The table is printed and written to
OUT/TASK.md, and a plot of accuracy against length to OUT/TASK.png.
"""

from __future__ import annotations

import math
from functools import partial

from torch import nn

from examples.command import Arguments, print_progress, run_command
from examples.resets.by_hand import by_hand
from examples.resets.model import VARIANTS
from examples.resets.report import LENGTHS, Outcome, plot, table
from examples.resets.streams import LENGTH, STREAMS
from examples.resets.task import TEST, ResetConfig, ResetSection, ResetTask, accuracies

STEPS = {"majority": 4000, "rotor": 2000, "spinor": 2000}
SECONDS = {"majority": 0.009, "rotor": 0.014, "spinor": 0.023}  # of a step, on an idle core of an AMD EPYC (Zen 3)


def evaluate(task: str, model: nn.Module, variant: str, seed: int | None, steps: int, seconds: float) -> Outcome:
    """Evaluate a model on test streams of every length."""
    parameters = sum(p.numel() for p in model.parameters())
    rows = {length: 2048 if length == LENGTH else 128 for length in LENGTHS}
    by_length = {length: accuracies(model, task, TEST, length, rows[length]) for length in LENGTHS}
    return Outcome(variant, seed, parameters, steps, seconds, by_length)


def run(arguments: Arguments) -> None:
    """Train every variant from every seed, and compare them with the weights written by hand."""
    task = arguments.options["task"]
    steps = STEPS[task] if arguments.steps is None else arguments.steps
    configs = [
        ResetConfig(reset=ResetSection(task=task, variant=variant)).with_seed(seed, steps)
        for variant in VARIANTS[task]
        for seed in arguments.seeds
    ]
    minutes = math.ceil(len(configs) * steps * SECONDS[task] / 60)
    print_progress(
        f"{len(configs)} runs, about {minutes} min on an idle core and several times as long on a busy one; a "
        "run ends early when its task is solved"
    )
    outcomes = [evaluate(task, by_hand(task), "by hand", None, 0, 0.0)]
    for config in configs:
        variant = config.reset.variant
        finished = arguments.train(ResetTask(config), task, variant.lower().replace(" ", "-"))
        outcomes.append(evaluate(task, finished.model, variant, config.seed, finished.steps, finished.seconds))
    arguments.draw(task, (9, 4.5), lambda figure: plot(figure, task, outcomes))
    arguments.write(task, table(task, outcomes))


main = partial(
    run_command, "resets", __doc__, run, seeds=(0, 1, 2), options={"task": {"required": True, "choices": STREAMS}}
)


if __name__ == "__main__":
    raise SystemExit(main())
