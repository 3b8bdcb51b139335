"""`anymamba train`: a config in, a model in a directory out."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from anymamba.training.config import TrainingConfig, read_config
from anymamba.training.language import LanguageTask, begin, open_run, to_stderr
from anymamba.training.loop import Trainer
from anymamba.training.optim import plan_table


def run(args: argparse.Namespace) -> None:
    """Train, and say where the result is."""
    _expect_one_process()
    values = {name: getattr(args, f"field:{name}") for name in TrainingConfig.fields_by_name()}
    overrides = {name: value for name, value in values.items() if value is not None}
    try:
        trainer = _prepared(args, overrides)
    except KeyboardInterrupt:
        to_stderr("stopped before the first step: there is nothing to save; text that is tokenised stays so")
        raise
    if args.plan:
        print(plan_table(trainer.optimiser.plan()))
        return
    model: Any = trainer.model
    parameters = sum(p.numel() for p in model.parameters())
    to_stderr(f"{model.config.layer}, {parameters:,} parameters, in {trainer.directory}")
    _conclude(trainer, trainer.run())


def _prepared(args: argparse.Namespace, overrides: dict[str, str | list[str]]) -> Trainer[LanguageTask]:
    if args.resume is None:
        _expect_no_config_among(overrides)
        return begin(read_config(args.config, overrides), Path(args.out), to_stderr)
    if args.config is not None:
        raise ValueError(f"--resume takes the config of the run; got also {args.config}")
    trainer = open_run(Path(args.resume), overrides, to_stderr)
    to_stderr(f"resuming after step {trainer.step}")
    return trainer


def _expect_no_config_among(overrides: dict[str, str | list[str]]) -> None:
    """Refuse a config that a list before it has taken for one of its values."""
    for name, values in overrides.items():
        if isinstance(values, list) and values[-1].endswith(".toml"):
            raise ValueError(
                f"--{name} takes all values up to the next option, also {values[-1]}; put the config first: "
                f"anymamba train {values[-1]} --{name} {' '.join(values[:-1])}"
            )


def _expect_one_process() -> None:
    """Refuse to train in several processes, with one line of the first of them."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(2)
        raise ValueError(
            "this version cannot train in several processes, as torchrun starts them; run anymamba train without it: "
            "one process uses all cores of a machine"
        )


def _conclude(trainer: Trainer[LanguageTask], finished: bool) -> None:
    where = shlex.quote(str(trainer.directory))
    if not finished:
        print(f"stopped after step {trainer.step}; continue with: anymamba train --resume {where}")
        return
    if trainer.task.held_out is not None:
        bits, neighbours = trainer.task.held_out
        beside = "; ".join(f"{name} {x:.4f}" for name, x in neighbours.items())
        print(f"held-out text: {bits:.4f} bits per byte, lower is better ({beside})")
    print(f"model: {where}; every step: {where}/metrics.csv; samples: {where}/samples")
    print(f"anymamba generate {where} --prompt {shlex.quote(trainer.task.prompt)} --temperature 0.8")
    print(f"anymamba eval {where} FILE")
