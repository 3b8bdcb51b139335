"""The options of train and predict; like all options, without torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, get_args

from anymamba.cli.options import INTEGER, choice_of
from anymamba.core.config_fields import literal_choices, takes_list
from anymamba.training.config.run_config import RunConfig, TrainingConfig
from anymamba.training.config.tabular_config import KINDS, TabularConfig


def add_train(commands: Any) -> None:
    """Add the options of `anymamba train`: one for every field of the config, and a few more."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "train",
        usage="anymamba train [CONFIG] [--out DIR | --resume DIR] [--plan] [--FIELD VALUE ...]",
        help="train a model, or resume a run",
        description="Train a language model, or another kind of model with --task. Every field of the config can be "
        "given as an option of the same name; a field that is a list takes several values: --data.sources books notes.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="TOML file (default: all fields at their defaults)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", metavar="DIR", default="runs/train", help="directory of the run (default: %(default)s)")
    where.add_argument("--resume", metavar="DIR", help="continue the run in a directory")
    parser.add_argument(
        "--plan", action="store_true", help="show which optimizer updates which parameters, and do not train"
    )
    parser.add_argument(
        "--task",
        **choice_of(("language", *KINDS)),
        help="what to learn: to write text, or from tables, JSON lines and .npy files (default: language)",
    )
    _add_fields(parser.add_argument_group("fields of the config"), TrainingConfig, ())
    others = parser.add_argument_group("further fields of the other tasks' config")
    _add_fields(others, TabularConfig, (*TrainingConfig.fields_by_name(), "task"))


def _add_fields(fields: Any, config: type[RunConfig], known: Sequence[str]) -> None:
    """Add an option for every field of a config, except `known` ones."""
    hints = config.hints()
    for name, field in config.fields_by_name().items():
        if name in known:
            continue
        allowed = ("true", "false") if bool in (hints[name], *get_args(hints[name])) else literal_choices(hints[name])
        default = field.metadata.get("default") or _format_default(field.default)
        text = field.metadata["help"] + (f" (default: {default})" if default else "")
        several: dict[str, Any] = {"nargs": "+", "action": "extend"} if takes_list(hints[name]) else {}
        fields.add_argument(
            f"--{name}",
            metavar=f"{{{','.join(allowed)}}}" if allowed else "VALUE",
            dest=f"field:{name}",
            help=text.replace("%", "%%"),
            **several,
        )


def _format_default(value: Any) -> str:
    """Return a default as the command line takes it; empty if there is none."""
    if value is None or callable(value) or not isinstance(value, str | int | float | tuple):
        return ""
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def add_predict(commands: Any) -> None:
    """Add the options of `anymamba predict`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "predict",
        help="predict classes, numbers, forecasts or embeddings for the sequences of a file",
        description="Predict with a model of `anymamba train --task`: one line for each sequence of a file, or for "
        "each step of a forecast.",
    )
    parser.add_argument("model", metavar="MODEL", help="directory of the run, or of one of its checkpoints")
    parser.add_argument(
        "file", metavar="FILE", help=".csv, .jsonl or .npy file with the same inputs as the training files"
    )
    parser.add_argument("--out", metavar="FILE", help="where to write (default: stdout)")
    parser.add_argument(
        "--format",
        **choice_of(("jsonl", "csv")),
        help="format to write (default: jsonl, or csv if --out ends in .csv)",
    )
    parser.add_argument(
        "--steps", type=INTEGER, default=1, metavar="N", help="steps of a forecast (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=INTEGER, default=32, metavar="N", help="sequences computed together (default: %(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="device to compute on (default: cpu)")
    parser.add_argument(
        "--threads", type=INTEGER, metavar="N", help="CPU threads to compute with (default: torch's choice)"
    )
