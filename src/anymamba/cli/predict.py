"""`anymamba predict`: what a model that was trained on files predicts for another file."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import torch

from anymamba.cli.common import Progress
from anymamba.core.dtypes import parse_device
from anymamba.core.io import atomic_write
from anymamba.training.tasks.predict import Predictor


def run(args: argparse.Namespace) -> None:
    """Read, predict, and write a line for each sequence."""
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {args.threads}")
        torch.set_num_threads(args.threads)
    for name in ("steps", "batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    predictor = Predictor(args.model, parse_device(args.device, "--device"))
    if args.steps > 1 and predictor.facts["task"] != "next-value":
        raise ValueError(f"--steps is for forecasts; this model was trained for {predictor.facts['task']}")
    table = predictor.read(args.file)
    lines = predictor.predict(table, rows=args.batch_size, steps=args.steps)
    progress = Progress(len(table.sequences) * (args.steps if predictor.facts["task"] == "next-value" else 1))
    as_csv = args.format == "csv" or (args.format is None and str(args.out or "").endswith(".csv"))
    with _opened(args.out) as file:
        writer = csv.writer(file) if as_csv else None
        for number, line in enumerate(lines, 1):
            if writer is None:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            else:
                flat = _flat(line)
                if number == 1:
                    writer.writerow(flat)
                writer.writerow(flat.values())
            progress.at(number)
    progress.close()


@contextmanager
def _opened(path: str | None) -> Iterator[TextIO]:
    """Stdout, or a file that appears when it is complete."""
    if path is None:
        yield sys.stdout
        return
    with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        yield file


def _flat(line: dict[str, Any]) -> dict[str, Any]:
    """A line as cells; values inside a table or list are named by key or number."""
    cells: dict[str, Any] = {}
    for name, value in line.items():
        if isinstance(value, dict):
            cells |= {f"{name}: {key}": x for key, x in value.items()}
        elif isinstance(value, list):
            cells |= {f"{name} {i}": x for i, x in enumerate(value)}
        else:
            cells[name] = value
    return cells
