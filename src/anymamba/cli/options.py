"""The options of every command. Nothing here imports torch, so that help and errors do not wait for it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from anymamba.cli.argtypes import REAL, WHOLE, name_and_value, one_of
from anymamba.cli.serve_options import add_bench_serve, add_serve
from anymamba.cli.train_options import add_predict, add_train
from anymamba.core.config_fields import check_known
from anymamba.version import __version__

DTYPES = ("float32", "bfloat16", "float16", "float64")
WEIGHTS = ("bfloat16", "float16", "int8", "int4")  # `anymamba.core.weight_formats.FORMAT_SPECS`, without torch
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
        check_known(name, commands, "", "command")
    elif arguments:
        check_known(arguments[0].partition("=")[0], parser._option_string_actions, "", "option")
    args, unknown = parser.parse_known_args(arguments)
    for argument in unknown:
        if argument.startswith("-"):
            known = [option for option in commands[args.command]._option_string_actions if option.startswith("--")]
            otherwise = f"anymamba {args.command} --help lists the options"
            check_known(argument.partition("=")[0], known, "", "option", otherwise)
    if unknown:
        raise ValueError(f"{unknown[0]}: unexpected argument")
    return args


def _build() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and the one of each command."""
    parser = Parser(prog="anymamba", description="Mamba-1, Mamba-2 and Mamba-3 on any machine.")
    parser.add_argument("--version", action="version", version=f"anymamba {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for add in (add_train, add_predict, _add_generate, _add_eval, _add_inspect, _add_convert, _add_push, _add_info):
        add(commands)
    add_serve(commands, _add_model, WHOLE, REAL)
    add_bench_serve(commands, WHOLE, REAL, name_and_value)
    return parser, dict(commands.choices)


def _add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, --tokenizer, --dtype, --weights, --device and --threads."""
    parser.add_argument("model", metavar="MODEL", help="directory with config and weights, or hub id (owner/name)")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help='tokenizer.json, a directory or hub id with one, or "bytes" (default: the one beside the weights)',
    )
    parser.add_argument("--dtype", **one_of(DTYPES), help="dtype to compute in (default: the file's)")
    _add_weights(parser)
    parser.add_argument("--device", default="cpu", help="device to compute on (default: cpu)")
    parser.add_argument(
        "--threads", type=WHOLE, metavar="N", help="CPU threads to compute with (default: torch's choice)"
    )
    _add_block(parser)


def _add_block(parser: argparse.ArgumentParser) -> None:
    """--block."""
    parser.add_argument(
        "--block",
        type=name_and_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override an option of the blocks, such as a_activation=softplus; repeatable",
    )


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        **one_of(WEIGHTS),
        help="keep the weights in fewer bits, so that each token reads less (default: as stored)",
    )


def _add_special_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-special-tokens",
        dest="special_tokens",
        action="store_false",
        help="do not begin with the tokens that the tokenizer puts before a text",
    )


def _add_generate(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("generate", help="continue a text, or a file of prompts")
    _add_model(parser)
    text = parser.add_mutually_exclusive_group()
    text.add_argument(
        "--prompt", metavar="TEXT", help="the text to continue (default: stdin, without its final newline)"
    )
    text.add_argument("--file", metavar="FILE", help="continue the text of a file, including its final newline")
    text.add_argument(
        "--prompts",
        metavar="FILE",
        help='continue each line of a file ("-": stdin), or the "prompt" of each object in a .jsonl; print JSON lines',
    )
    text.add_argument(
        "--interactive",
        action="store_true",
        help="read prompts from stdin, one per line, and keep the state between them; an empty line continues the "
        "text, Ctrl-D exits",
    )
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="treat the text as a message and answer it with the model's chat template, or a plain one if it has none "
        "(default: with --interactive, if the model has a template)",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of a conversation")
    _add_special_tokens(parser)
    parser.add_argument(
        "--max-new-tokens",
        type=WHOLE,
        default=128,
        metavar="N",
        help="largest number of tokens to write (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=REAL,
        metavar="T",
        help="temperature of draws (default: 0, the most likely token; 1 with --seed, --top-k, --top-p or --min-p)",
    )
    parser.add_argument("--top-k", type=WHOLE, metavar="K", help="draw from the K most likely tokens")
    parser.add_argument(
        "--top-p", type=REAL, default=1.0, metavar="P", help="draw from the most likely tokens that together reach P"
    )
    parser.add_argument(
        "--min-p",
        type=REAL,
        default=0.0,
        metavar="P",
        help="draw from tokens at least P times as likely as the likeliest",
    )
    parser.add_argument(
        "--repetition-penalty", type=REAL, default=1.0, metavar="R", help="above 1: makes repetition less likely"
    )
    parser.add_argument("--seed", type=WHOLE, metavar="N", help="draw at random; the same seed gives the same text")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; repeatable")
    parser.add_argument("--ignore-end", action="store_true", help="do not stop at the tokenizer's end token")
    parser.add_argument("--load-state", metavar="FILE", help="continue from a saved state")
    parser.add_argument("--save-state", metavar="FILE", help="save the state at the end")
    several = parser.add_argument_group("with --prompts")
    several.add_argument(
        "--samples", type=WHOLE, default=1, metavar="N", help="samples for each prompt (default: %(default)s)"
    )
    several.add_argument(
        "--logprobs", type=WHOLE, metavar="K", help="add log-probabilities of the tokens and of the K most likely ones"
    )
    several.add_argument(
        "--batch-size", type=WHOLE, default=16, metavar="N", help="rows computed together (default: %(default)s)"
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
        help="write a page that shows what a model does with a text",
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
        "--tokens",
        type=WHOLE,
        default=256,
        metavar="N",
        help="largest number of tokens to show (default: %(default)s)",
    )


def _add_convert(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("convert", help="convert a checkpoint to another format")
    parser.add_argument("source", metavar="SRC", help="directory or hub id")
    parser.add_argument("target", metavar="DST", help="directory to write to")
    parser.add_argument(
        "--format", **one_of(FORMATS), default="official", help="format to write (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        **one_of(DTYPES),
        help="dtype of the weights, or to compute in if they are in fewer bits (default: unchanged)",
    )
    _add_weights(parser)
    _add_block(parser)
    parser.add_argument("--force", action="store_true", help="write into a directory that is not empty")


def _add_push(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("push", help="write a model to the Hugging Face hub")
    parser.add_argument("model", metavar="MODEL", help="directory with config and weights, such as a run's")
    parser.add_argument("name", metavar="OWNER/NAME", help="repository, created if it does not exist")
    parser.add_argument(
        "--format",
        **one_of(FORMATS),
        help="format to write (default: official, or anymamba if that cannot represent the model)",
    )
    parser.add_argument("--private", action="store_true", help="make a new repository private")


def _add_info(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("info", help="describe this machine, or a model")
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="directory or hub id (default: describe this machine)"
    )
    parser.add_argument("--dtype", **one_of(DTYPES), help="dtype to load the model in (default: the file's)")
    _add_weights(parser)
    _add_block(parser)
