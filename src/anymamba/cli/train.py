"""`anymamba train`: a config in, a model in a directory out."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from anymamba.training.api import create_run, open_run, to_stderr
from anymamba.training.config.run_config import read_config
from anymamba.training.distributed.process_group import World, init_distributed
from anymamba.training.optim.optimizer import plan_table
from anymamba.training.tasks.tabular import TabularTask
from anymamba.training.trainer import Trainer


def run(args: argparse.Namespace) -> None:
    """Train, and say where the result is."""
    _train(args, _overrides(args), init_distributed())


def _train(args: argparse.Namespace, overrides: dict[str, str | list[str]], world: World) -> None:
    try:
        trainer = _prepared(args, overrides, world)
    except KeyboardInterrupt:
        to_stderr("stopped before the first step: there is nothing to save; the text tokenized so far is kept")
        raise
    if not world.is_main:
        if not args.plan:
            trainer.run()
        return
    if args.plan:
        print(plan_table(trainer.optimizer.plan()))
        return
    model: Any = trainer.model
    parameters = sum(p.numel() for p in model.parameters())
    family = model.config.stack_config().layer
    to_stderr(f"{family}, {parameters:,} parameters, in {trainer.directory}")
    _conclude(trainer, trainer.run())


def _overrides(args: argparse.Namespace) -> dict[str, str | list[str]]:
    """The fields that were given as options."""
    given = {name.removeprefix("field:"): value for name, value in vars(args).items() if name.startswith("field:")}
    overrides = {name: value for name, value in given.items() if value is not None}
    return overrides if args.task is None else {"task": args.task, **overrides}


def _prepared(args: argparse.Namespace, overrides: dict[str, str | list[str]], world: World) -> Trainer[Any]:
    if args.resume is None:
        return create_run(world.run_checked(lambda: _config(args, overrides)), Path(args.out), to_stderr, world)
    if args.config is not None:
        raise ValueError(f"--resume uses the config of the run; remove {args.config}")
    trainer = open_run(Path(args.resume), overrides, to_stderr, world)
    if world.is_main:
        finished = "; the run is finished" if trainer.finished else ""
        to_stderr(f"resuming after step {trainer.step}{finished}")
    return trainer


def _config(args: argparse.Namespace, overrides: dict[str, str | list[str]]) -> Any:
    _check_no_config_among(overrides)
    return read_config(args.config, overrides)


def _check_no_config_among(overrides: dict[str, str | list[str]]) -> None:
    """Refuse a config file that a list option before it has taken as a value."""
    for name, values in overrides.items():
        if isinstance(values, list) and values[-1].endswith(".toml"):
            raise ValueError(
                f"--{name} takes all values up to the next option, including {values[-1]}; put the config first:  "
                f"anymamba train {values[-1]} --{name} {' '.join(values[:-1])}"
            )


def _conclude(trainer: Trainer[Any], finished: bool) -> None:
    where = shlex.quote(str(trainer.directory))
    if not finished:
        print(f"stopped after step {trainer.step}; continue with: anymamba train --resume {where}")
        return
    if isinstance(trainer.task, TabularTask):
        print(f"model: {where}; every step: {where}/metrics.csv")
        print(f"anymamba predict {where} FILE")
        return
    if trainer.task.held_out is not None:
        bits, baselines = trainer.task.held_out
        beside = "; ".join(f"{name} {x:.4f}" for name, x in baselines.items())
        print(f"held-out text: {bits:.4f} bits per byte, lower is better ({beside})")
    print(f"model: {where}; every step: {where}/metrics.csv; samples: {where}/samples")
    print(f"anymamba generate {where} --prompt {shlex.quote(trainer.task.prompt)} --temperature 0.8")
    print(f"anymamba eval {where} FILE")
