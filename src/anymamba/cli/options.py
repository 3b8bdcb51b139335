"""The options of every command. Nothing here imports torch, so that help and mistakes do not wait for it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, get_args

from anymamba.cli.serve_options import add_bench_serve, add_serve
from anymamba.training.config import RunConfig, TrainingConfig
from anymamba.training.file_config import KINDS, FileConfig
from anymamba.training.values import choices, expect_known, is_list
from anymamba.version import __version__

DTYPES = ("float32", "bfloat16", "float16", "float64")
WEIGHTS = ("bfloat16", "float16", "int8", "int4")  # `anymamba.ground.narrow.FORMATS`, without torch
FORMATS = ("official", "transformers", "codestral", "anymamba")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print below its usage."""
        raise ValueError(f"{message} ({self.prog} --help lists the options)")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command and its options.

    Raises:
        ValueError: there is no such command or option, or a value cannot be read.
        SystemExit: help or the version was asked for, and is printed.
    """
    parser, commands = _build()
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    if name is not None:
        expect_known(name, commands, "", "command")
    elif arguments:
        expect_known(arguments[0].partition("=")[0], parser._option_string_actions, "", "option")
    args, unknown = parser.parse_known_args(arguments)
    for argument in unknown:
        if argument.startswith("-"):
            known = [option for option in commands[args.command]._option_string_actions if option.startswith("--")]
            otherwise = f"anymamba {args.command} --help lists the options"
            expect_known(argument.partition("=")[0], known, "", "option", otherwise)
    if unknown:
        raise ValueError(f"{unknown[0]}: one argument too many")
    return args


def _build() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and that of each command."""
    parser = Parser(prog="anymamba", description="Mamba-1, Mamba-2 and Mamba-3 on any machine.")
    parser.add_argument("--version", action="version", version=f"anymamba {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for add in (_add_train, _add_predict, _add_generate, _add_eval, _add_inspect, _add_convert, _add_push, _add_info):
        add(commands)
    add_serve(commands, _add_model, _WHOLE, _REAL)
    add_bench_serve(commands, _WHOLE, _REAL, _option)
    return parser, dict(commands.choices)


def _one_of(names: Sequence[str]) -> dict[str, Any]:
    """Arguments of an option that takes one of `names`."""

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}, got {text!r}")
        return text

    return {"type": read, "metavar": f"{{{','.join(names)}}}"}


def _number(kind: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    """Reads a number; `what` says of which kind."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}") from None

    return read


_WHOLE, _REAL = _number(int, "a whole number"), _number(float, "a number")


def _add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, --tokenizer, --dtype, --weights, --device and --threads."""
    parser.add_argument("model", metavar="MODEL", help="directory with config and weights, or hub id (owner/name)")
    parser.add_argument(
        "--tokenizer", metavar="FILE", help='tokenizer.json, a directory or hub id with one, or "bytes"'
    )
    parser.add_argument("--dtype", **_one_of(DTYPES), help="dtype to compute in (default: that of the file)")
    _add_weights(parser)
    parser.add_argument("--device", default="cpu", help="device to compute on (default: cpu)")
    parser.add_argument(
        "--threads", type=_WHOLE, metavar="N", help="CPU threads to compute with (default: torch's choice)"
    )
    _add_block(parser)


def _add_block(parser: argparse.ArgumentParser) -> None:
    """--block."""
    parser.add_argument(
        "--block",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override an option of the blocks, such as a_activation=softplus; repeatable",
    )


def _option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON spells it, or else a word."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        **_one_of(WEIGHTS),
        help="keep the weights in fewer bits, so that less is read for each token (default: as stored)",
    )


def _add_special_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-special-tokens",
        dest="special_tokens",
        action="store_false",
        help="do not begin with the tokens that the tokenizer puts before a text",
    )


def _add_train(commands: Any) -> None:
    """CONFIG, --out, --resume, and an option for every field of the config."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "train",
        usage="anymamba train [CONFIG] [--out DIR | --resume DIR] [--plan] [--FIELD VALUE ...]",
        help="train a language model, or resume a run",
        description="Train a language model. Every field of the config can be given as an option of the same name; one "
        "that is a list takes several values: --data.sources books notes.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="TOML file (default: the default of every field)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", metavar="DIR", default="runs/train", help="directory of the run (default: %(default)s)")
    where.add_argument("--resume", metavar="DIR", help="continue the run in a directory")
    parser.add_argument(
        "--plan", action="store_true", help="show which optimiser moves which parameters, and train nothing"
    )
    parser.add_argument(
        "--task",
        **_one_of(("language", *KINDS)),
        help="what to learn: to write text, or from tables, JSON lines and .npy files (default: language)",
    )
    _add_fields(parser.add_argument_group("fields of the config"), TrainingConfig, ())
    others = parser.add_argument_group("fields of the other tasks' config, where it differs")
    _add_fields(others, FileConfig, (*TrainingConfig.fields_by_name(), "task"))


def _add_fields(fields: Any, config: type[RunConfig], known: Sequence[str]) -> None:
    """An option for every field of a config, without those that are known."""
    hints = config.hints()
    for name, field in config.fields_by_name().items():
        if name in known:
            continue
        allowed = ("true", "false") if bool in (hints[name], *get_args(hints[name])) else choices(hints[name])
        default = field.metadata.get("default") or _shown(field.default)
        text = field.metadata["help"] + (f" (default: {default})" if default else "")
        several: dict[str, Any] = {"nargs": "+", "action": "extend"} if is_list(hints[name]) else {}
        fields.add_argument(
            f"--{name}",
            metavar=f"{{{','.join(allowed)}}}" if allowed else "VALUE",
            dest=f"field:{name}",
            help=text.replace("%", "%%"),
            **several,
        )


def _shown(value: Any) -> str:
    """A default as the command line takes it, nothing for none."""
    if value is None or callable(value) or not isinstance(value, str | int | float | tuple):
        return ""
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _add_predict(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "predict",
        help="classes, numbers, forecasts or embeddings of the sequences of a file",
        description="What a model of `anymamba train --task` says of each sequence of a file, a line each.",
    )
    parser.add_argument("model", metavar="MODEL", help="directory of the run, or of one of its checkpoints")
    parser.add_argument("file", metavar="FILE", help=".csv, .jsonl or .npy, with the inputs of the training's files")
    parser.add_argument("--out", metavar="FILE", help="where to write (default: stdout)")
    parser.add_argument(
        "--format",
        **_one_of(("jsonl", "csv")),
        help="format to write (default: jsonl, or csv where --out is named .csv)",
    )
    parser.add_argument(
        "--steps", type=_WHOLE, default=1, metavar="N", help="steps of a forecast (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=_WHOLE, default=32, metavar="N", help="sequences computed together (default: %(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--threads", type=_WHOLE, metavar="N", help="CPU threads to compute with")


def _add_generate(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("generate", help="continue a text, or a file of prompts")
    _add_model(parser)
    text = parser.add_mutually_exclusive_group()
    text.add_argument(
        "--prompt", metavar="TEXT", help="the text to continue (default: stdin, without a newline at its end)"
    )
    text.add_argument("--file", metavar="FILE", help="continue the text of a file, including a newline at its end")
    text.add_argument(
        "--prompts",
        metavar="FILE",
        help='continue each line of a file ("-": stdin), or the "prompt" of each object of a .jsonl; prints JSON lines',
    )
    text.add_argument(
        "--interactive",
        action="store_true",
        help="read prompts from stdin, one a line, and keep the state between them; an empty line continues the text, "
        "Ctrl-D leaves",
    )
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="the text is a message, to be answered in the model's chat template, or a plain one where there is none "
        "(default: for --interactive, if the model has a template)",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of a conversation")
    _add_special_tokens(parser)
    parser.add_argument(
        "--max-new-tokens", type=_WHOLE, default=128, metavar="N", help="most tokens to write (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=_REAL,
        metavar="T",
        help="of draws (default: 0, the most likely token; 1 with --seed, --top-k, --top-p or --min-p)",
    )
    parser.add_argument("--top-k", type=_WHOLE, metavar="K", help="draw from the K most likely tokens")
    parser.add_argument(
        "--top-p", type=_REAL, default=1.0, metavar="P", help="draw from the most likely that together reach P"
    )
    parser.add_argument(
        "--min-p", type=_REAL, default=0.0, metavar="P", help="draw from those at least P times as likely as the first"
    )
    parser.add_argument("--repetition-penalty", type=_REAL, default=1.0, metavar="R", help="above 1: repeat less")
    parser.add_argument("--seed", type=_WHOLE, metavar="N", help="draw at random, the same text each time")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; repeatable")
    parser.add_argument("--ignore-end", action="store_true", help="do not stop at the tokenizer's end token")
    parser.add_argument("--load-state", metavar="FILE", help="continue from a saved state")
    parser.add_argument("--save-state", metavar="FILE", help="save the state at the end")
    several = parser.add_argument_group("with --prompts")
    several.add_argument(
        "--samples", type=_WHOLE, default=1, metavar="N", help="samples of each prompt (default: %(default)s)"
    )
    several.add_argument(
        "--logprobs", type=_WHOLE, metavar="K", help="add log-probabilities, and those of the K most likely tokens"
    )
    several.add_argument(
        "--batch-size", type=_WHOLE, default=16, metavar="N", help="rows computed together (default: %(default)s)"
    )


def _add_eval(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "eval",
        help="bits per byte and perplexity of texts",
        description="Bits per byte and perplexity of texts, each from a fresh start, and of all together. The first "
        "token of a text is read but not predicted, so its bytes do not count (one byte, if it is part of a "
        "character). Workers that torchrun starts divide the texts between them.",
    )
    _add_model(parser)
    _add_special_tokens(parser)
    parser.add_argument("files", metavar="FILE", nargs="+", help='a text, or a directory of texts; "-": stdin')


def _add_inspect(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="a page that shows what a model does with a text",
        description="Write one HTML page that shows what a model does with a text: the matrix of each head's scan, how "
        "long it remembers, what its state holds, and how likely each token was. It opens in any browser, without a "
        "network.",
    )
    _add_model(parser)
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help="the text (default: stdin)")
    text.add_argument("--file", metavar="FILE", help="file with the text")
    parser.add_argument(
        "--out", metavar="FILE", default="report.html", help="where to write the page (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=_WHOLE, default=256, metavar="N", help="most tokens of the text to show (default: %(default)s)"
    )


def _add_convert(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("convert", help="convert a checkpoint to another format")
    parser.add_argument("source", metavar="SRC", help="directory or hub id")
    parser.add_argument("target", metavar="DST", help="directory to write")
    parser.add_argument(
        "--format", **_one_of(FORMATS), default="official", help="format to write (default: %(default)s)"
    )
    parser.add_argument("--dtype", **_one_of(DTYPES), help="dtype of the weights (default: as they are)")
    _add_weights(parser)
    _add_block(parser)
    parser.add_argument("--force", action="store_true", help="write into a directory that is not empty")


def _add_push(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("push", help="write a model to the Hugging Face hub")
    parser.add_argument("model", metavar="MODEL", help="directory with config and weights, such as that of a run")
    parser.add_argument("name", metavar="OWNER/NAME", help="repository, created if there is none")
    parser.add_argument(
        "--format",
        **_one_of(FORMATS),
        help="format to write (default: official, or anymamba where that cannot hold the model)",
    )
    parser.add_argument("--private", action="store_true", help="make a new repository private")


def _add_info(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("info", help="what this machine offers, or what a model is")
    parser.add_argument("model", metavar="MODEL", nargs="?", help="directory or hub id (default: this machine)")
    parser.add_argument("--dtype", **_one_of(DTYPES), help="dtype to load the model in (default: that of the file)")
    _add_weights(parser)
    _add_block(parser)
