"""`anymamba train`: a config in, a model in a directory out; and `anymamba predict`, with a model trained on files."""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from anymamba.cli.common import Progress, set_threads
from anymamba.cli.options import check_at_least
from anymamba.core.dtypes import parse_device
from anymamba.core.io import atomic_write
from anymamba.core.registry import describe_device
from anymamba.core.threads import configure_threads
from anymamba.training.api import create_run, open_run, to_stderr
from anymamba.training.config.run_config import read_config
from anymamba.training.distributed.process_group import World, init_distributed
from anymamba.training.optim.optimizer import plan_table
from anymamba.training.tasks.predict import Predictor
from anymamba.training.tasks.tabular_base import TabularTask
from anymamba.training.trainer import Trainer


def run_train(args: argparse.Namespace) -> None:
    """Train, and print where the result is."""
    configure_threads()  # the config may set another number later
    world = init_distributed()
    try:
        trainer = _create_trainer(args, _read_overrides(args), world)
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
    to_stderr(f"computing on {describe_device(next(model.parameters()).device)}")
    _print_result(trainer, trainer.run())


def _read_overrides(args: argparse.Namespace) -> dict[str, str | list[str]]:
    """Return the fields of the config that were given as options."""
    fields = {name.removeprefix("field:"): value for name, value in vars(args).items() if name.startswith("field:")}
    overrides = {name: value for name, value in fields.items() if value is not None}
    return overrides if args.task is None else {"task": args.task, **overrides}


def _create_trainer(args: argparse.Namespace, overrides: dict[str, str | list[str]], world: World) -> Trainer[Any]:
    """Return the trainer of a new run, or of one to resume."""
    if args.resume is None:
        return create_run(world.run_checked(lambda: _read_config(args, overrides)), Path(args.out), to_stderr, world)
    if args.config is not None:
        raise ValueError(f"--resume uses the config of the run; remove {args.config}")
    trainer = open_run(Path(args.resume), overrides, to_stderr, world)
    if world.is_main:
        finished = "; the run is finished" if trainer.finished else ""
        to_stderr(f"resuming after step {trainer.step}{finished}")
    return trainer


def _read_config(args: argparse.Namespace, overrides: dict[str, str | list[str]]) -> Any:
    """Return the config of a new run; raise ValueError if a list option before it has taken its file as a value."""
    for name, values in overrides.items():
        if isinstance(values, list) and values[-1].endswith(".toml"):
            raise ValueError(
                f"--{name} takes all values up to the next option, including {values[-1]}; put the config first:  "
                f"anymamba train {values[-1]} --{name} {' '.join(values[:-1])}"
            )
    return read_config(args.config, overrides)


def _print_result(trainer: Trainer[Any], finished: bool) -> None:
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
        comparison = "; ".join(f"{name} {x:.4f}" for name, x in baselines.items())
        print(f"held-out text: {bits:.4f} bits per byte, lower is better ({comparison})")
    print(f"model: {where}; every step: {where}/metrics.csv; samples: {where}/samples")
    print(f"anymamba generate {where} --prompt {shlex.quote(trainer.task.prompt)} --temperature 0.8")
    print(f"anymamba eval {where} FILE")


def run_predict(args: argparse.Namespace) -> None:
    """Read a file, predict, and write a line for each sequence."""
    set_threads(args)
    check_at_least(args, 1, "steps", "batch_size")
    device = parse_device(args.device, "--device")
    predictor = Predictor(args.model, device)
    if args.steps > 1 and predictor.metadata["task"] != "next-value":
        raise ValueError(f"--steps is for forecasts; this model was trained for {predictor.metadata['task']}")
    table = predictor.read(args.file)
    lines = predictor.predict(table, rows=args.batch_size, steps=args.steps)
    progress = Progress(len(table.sequences) * (args.steps if predictor.metadata["task"] == "next-value" else 1))
    as_csv = args.format == "csv" or (args.format is None and str(args.out or "").endswith(".csv"))
    with _open_output(args.out) as file:
        writer = csv.writer(file) if as_csv else None
        for number, line in enumerate(lines, 1):
            if writer is None:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            else:
                cells = _flatten(line)
                if number == 1:
                    writer.writerow(cells)
                writer.writerow(cells.values())
            progress.at(number)
    progress.close()
    to_stderr(f"computed on {describe_device(device)}")


@contextmanager
def _open_output(path: str | None) -> Iterator[TextIO]:
    """Yield stdout, or a file that appears when it is complete."""
    if path is None:
        yield sys.stdout
        return
    with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        yield file


def _flatten(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line as cells; values inside a table or list are named by key or number."""
    cells: dict[str, Any] = {}
    for name, value in line.items():
        if isinstance(value, dict):
            cells |= {f"{name}: {key}": x for key, x in value.items()}
        elif isinstance(value, list):
            cells |= {f"{name} {i}": x for i, x in enumerate(value)}
        else:
            cells[name] = value
    return cells
