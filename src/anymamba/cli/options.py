"""The options of all commands but serve and bench-serve, and how every option reads its value.

Nothing here imports torch, so that help and errors do not wait for it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any, get_args

from anymamba.core.config_fields import literal_choices, takes_list
from anymamba.training.config.run_config import RunConfig, TrainingConfig
from anymamba.training.config.tabular_config import KINDS, TabularConfig

DTYPES = ("float32", "bfloat16", "float16", "float64")
WEIGHTS = ("bfloat16", "float16", "int8", "int4")  # keys of `anymamba.core.weight_formats.FORMAT_SPECS`, without torch
FORMATS = (  # those of `checkpoints.formats` that can be written
    *("official", "transformers", "bamba", "granitemoehybrid", "codestral", "anymamba"),
)


def choice_of(names: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of an option that takes one of `names`."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}, got {text!r}")
        return text

    return {"type": parse, "metavar": f"{{{','.join(names)}}}"}


def integer(metavar: str = "N") -> dict[str, Any]:
    """Return the arguments of an option that takes an integer."""
    return _number_of(int, "an integer", metavar)


def number(metavar: str) -> dict[str, Any]:
    """Return the arguments of an option that takes a number."""
    return _number_of(float, "a number", metavar)


def _number_of(kind: Callable[[str], Any], description: str, metavar: str) -> dict[str, Any]:
    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {description}, got {text!r}") from None

    return {"type": parse, "metavar": metavar}


def repeatable(metavar: str, parse: Callable[[str], Any] = str) -> dict[str, Any]:
    """Return the arguments of an option that may be given several times."""
    return {"type": parse, "action": "append", "default": [], "metavar": metavar}


def check_at_least(args: argparse.Namespace, minimum: int, *names: str) -> None:
    """Raise ValueError if one of these options is given and below a minimum."""
    for name in names:
        if (value := getattr(args, name)) is not None and value < minimum:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {minimum}, got {value}")


def parse_name_value(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE, with a value in JSON, or else a word."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --tokenizer, --dtype, --weights, --device, --threads and --block."""
    parser.add_argument("model", metavar="MODEL", help="directory with config and weights, or hub id (owner/name)")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help='tokenizer.json, a directory or hub id with one, or "bytes" (default: the one next to the weights)',
    )
    parser.add_argument("--dtype", **choice_of(DTYPES), help="dtype to compute in (default: the file's)")
    _add_weights(parser)
    _add_device(parser)
    _add_block(parser)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", help="device to compute on (default: auto, the first of cuda, mps and cpu)"
    )
    default = "torch's choice, within the process's quota of cores"
    parser.add_argument("--threads", **integer(), help=f"CPU threads to compute with (default: {default})")


def _add_block(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--block",
        **repeatable("NAME=VALUE", parse_name_value),
        help="override an option of the blocks, such as a_activation=softplus; repeatable",
    )


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        **choice_of(WEIGHTS),
        help="quantize the weights to this format, which decodes faster in less memory (default: as stored)",
    )


def _add_special_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-special-tokens",
        dest="special_tokens",
        action="store_false",
        help="omit the tokens that the tokenizer puts before a text",
    )


def add_generate(commands: Any) -> None:
    """Add the options of `anymamba generate`."""
    parser: argparse.ArgumentParser = commands.add_parser("generate", help="continue a text, or a file of prompts")
    add_model(parser)
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
        "text, and Ctrl-D exits",
    )
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="treat the text as a message and answer it, with the model's chat template or a plain one "
        "(default: with --interactive, if the model has a template)",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of a conversation")
    _add_special_tokens(parser)
    parser.add_argument(
        "--max-new-tokens", **integer(), default=128, help="largest number of tokens to write (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        **number("T"),
        help="sampling temperature (default: 0, the most likely token; 1 with --seed, --top-k, --top-p or --min-p)",
    )
    parser.add_argument("--top-k", **integer("K"), help="sample from the K most likely tokens")
    parser.add_argument(
        "--top-p",
        **number("P"),
        default=1.0,
        help="sample from the most likely tokens that together have probability P",
    )
    parser.add_argument(
        "--min-p",
        **number("P"),
        default=0.0,
        help="sample from tokens at least P times as likely as the most likely one",
    )
    parser.add_argument("--repetition-penalty", **number("R"), default=1.0, help="above 1, make repetition less likely")
    parser.add_argument("--seed", **integer(), help="sample with this random seed; the same seed gives the same text")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="read prompts so that a text has the same bits however it is cut into prompts and states; takes longer",
    )
    parser.add_argument(
        "--speculate",
        metavar="lookup|MODEL|off",
        default="off",
        help="draft tokens, which the model reads together with the last one, and keep those that it chooses itself: "
        "from earlier parts of the text, or with a smaller model; the text stays the same (default: %(default)s)",
    )
    parser.add_argument("--stop", **repeatable("TEXT"), help="stop before TEXT; repeatable")
    parser.add_argument("--ignore-end", action="store_true", help="continue after the tokenizer's end token")
    grammar = parser.add_mutually_exclusive_group()
    grammar.add_argument("--schema", metavar="FILE", help="write JSON that follows the JSON schema in FILE")
    grammar.add_argument("--regex", metavar="REGEX", help="write text that matches a regular expression")
    grammar.add_argument("--grammar", metavar="FILE", help="write text of the grammar in FILE, Lark or GBNF")
    grammar.add_argument("--choice", **repeatable("TEXT"), help="write one of several texts; repeatable")
    parser.add_argument("--load-state", metavar="FILE", help="continue from a saved state")
    parser.add_argument("--save-state", metavar="FILE", help="save the state at the end")
    several = parser.add_argument_group("with --prompts")
    several.add_argument("--samples", **integer(), default=1, help="samples for each prompt (default: %(default)s)")
    several.add_argument(
        "--logprobs", **integer("K"), help="add log-probabilities of each token and of the K most likely ones"
    )
    several.add_argument("--batch-size", **integer(), default=16, help="rows computed together (default: %(default)s)")


def add_eval(commands: Any) -> None:
    """Add the options of `anymamba eval`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "eval",
        help="bits per byte and perplexity of texts",
        description="Bits per byte and perplexity of texts, each scored from the zero state, and of all together. The "
        "first token of a text is read but not predicted, so its bytes do not count (one byte, if it is part of a "
        "character). Processes started by torchrun divide the texts between them.",
    )
    add_model(parser)
    _add_special_tokens(parser)
    parser.add_argument("files", metavar="FILE", nargs="+", help='a text, or a directory of texts; "-": stdin')


def add_inspect(commands: Any) -> None:
    """Add the options of `anymamba inspect`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="write a page that shows what a model does with a text",
        description="Write one HTML page that shows what a model does with a text: the matrix of each head's scan, how "
        "long it remembers, what its state holds, and how likely each token was. It opens in any browser, without a "
        "network.",
    )
    add_model(parser)
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help="the text (default: stdin)")
    text.add_argument("--file", metavar="FILE", help="file with the text")
    parser.add_argument(
        "--out", metavar="FILE", default="report.html", help="where to write the page (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", **integer(), default=256, help="largest number of tokens to show (default: %(default)s)"
    )


def add_convert(commands: Any) -> None:
    """Add the options of `anymamba convert`."""
    parser: argparse.ArgumentParser = commands.add_parser("convert", help="convert a checkpoint to another format")
    parser.add_argument("source", metavar="SRC", help="directory or hub id")
    parser.add_argument("target", metavar="DST", help="directory to write to")
    parser.add_argument(
        "--format", **choice_of(FORMATS), default="official", help="format to write (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        **choice_of(DTYPES),
        help="dtype of the weights, or to compute in if they are quantized (default: unchanged)",
    )
    _add_weights(parser)
    _add_block(parser)
    parser.add_argument("--force", action="store_true", help="write into a directory that is not empty")


def add_push(commands: Any) -> None:
    """Add the options of `anymamba push`."""
    parser: argparse.ArgumentParser = commands.add_parser("push", help="write a model to the Hugging Face hub")
    parser.add_argument("model", metavar="MODEL", help="directory with config and weights, such as a run's")
    parser.add_argument("name", metavar="OWNER/NAME", help="repository, created if it does not exist")
    parser.add_argument(
        "--format",
        **choice_of(FORMATS),
        help="format to write (default: official, or anymamba if that cannot represent the model)",
    )
    parser.add_argument("--private", action="store_true", help="make a new repository private")


def add_info(commands: Any) -> None:
    """Add the options of `anymamba info`."""
    parser: argparse.ArgumentParser = commands.add_parser("info", help="describe this machine, or a model")
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="directory or hub id (default: describe this machine)"
    )
    parser.add_argument("--dtype", **choice_of(DTYPES), help="dtype to load the model in (default: the file's)")
    _add_weights(parser)
    _add_block(parser)


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
        "--format", **choice_of(("jsonl", "csv")), help="format to write (default: jsonl, or csv if --out ends in .csv)"
    )
    parser.add_argument("--steps", **integer(), default=1, help="steps of a forecast (default: %(default)s)")
    parser.add_argument(
        "--batch-size", **integer(), default=32, help="sequences computed together (default: %(default)s)"
    )
    _add_device(parser)
