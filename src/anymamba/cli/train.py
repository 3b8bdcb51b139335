"""`anymamba train`: a config in, a model in a directory out."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from anymamba.training.config import TrainingConfig, read_config
from anymamba.training.language import LanguageTask, resume, train
from anymamba.training.loop import Trainer
from anymamba.training.values import choices


def add_parser(commands: Any) -> None:
    """Add the command, with an option for every field of the config."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "train",
        help="train a language model, or go on with a run",
        description="Train a language model. Every field of the config can be given as an option of the same name.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="TOML file (default: all defaults)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", metavar="DIR", default="runs/train", help="directory of the run (default: %(default)s)")
    where.add_argument("--resume", metavar="DIR", help="go on with the run in a directory")
    fields = parser.add_argument_group("fields of the config")
    hints = TrainingConfig.hints()
    for name, field in TrainingConfig.fields_by_name().items():
        allowed = f"{{{','.join(choices(hints[name]))}}}" if choices(hints[name]) else "VALUE"
        default = "" if callable(field.default_factory) else f" (default: {_shown(field.default)})"
        text = (field.metadata["help"] + default).replace("%", "%%")
        fields.add_argument(f"--{name}", metavar=allowed, dest=f"field:{name}", help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Train, and say where the result is."""
    values = {name: getattr(args, f"field:{name}") for name in TrainingConfig.fields_by_name()}
    overrides = {name: value for name, value in values.items() if value is not None}
    try:
        trainer = _prepared(args, overrides)
    except KeyboardInterrupt:
        _tell("stopped before the first step: there is nothing to save, and what is tokenised need not be again")
        raise
    model: Any = trainer.model
    parameters = sum(p.numel() for p in model.parameters())
    _tell(f"{model.config.layer}, {parameters:,} parameters, in {trainer.directory}")
    _conclude(trainer, trainer.run())


def _prepared(args: argparse.Namespace, overrides: dict[str, str]) -> Trainer[LanguageTask]:
    if args.resume is None:
        return train(read_config(args.config, overrides), Path(args.out), _tell)
    if args.config is not None:
        raise ValueError(f"--resume goes on with the config of the run; got also {args.config}")
    trainer = resume(Path(args.resume), overrides, _tell)
    _tell(f"going on behind step {trainer.step}")
    return trainer


def _conclude(trainer: Trainer[LanguageTask], finished: bool) -> None:
    where = shlex.quote(str(trainer.directory))
    if not finished:
        print(f"stopped behind step {trainer.step}; go on with: anymamba train --resume {where}")
        return
    if trainer.task.held_out is not None:
        model, xz = trainer.task.held_out
        print(f"held-out text: {model:.4f} bits per byte, xz -9 {xz:.4f}")
    print(f"model: {where}; every step: {where}/metrics.csv; samples: {where}/samples")
    print(f"anymamba generate {where} --prompt {shlex.quote(trainer.task.prompt)} --temperature 0.8")
    print(f"anymamba eval {where} FILE")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if value is None or isinstance(value, bool) else repr(value)


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
