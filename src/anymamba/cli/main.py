"""`anymamba`: parse the arguments, run a command, turn a user's mistake into one line and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

from anymamba.cli import convert, evaluate, generate, info, train
from anymamba.ground.allocator import keep_freed_memory
from anymamba.training.values import expect_known
from anymamba.version import __version__

_COMMANDS = (train, generate, convert, info, evaluate)
_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")  # in messages of torch's allocators


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(prog="anymamba", description="Mamba-2 and Mamba-3 on any machine.")
    parser.add_argument("--version", action="version", version=f"anymamba {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for command in _COMMANDS:
        command.add_parser(commands)
    parser.set_defaults(options={name: list(c._option_string_actions) for name, c in commands.choices.items()})
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; those of the process if not given.

    Returns:
        The exit code: 0, 1 when numbers overflowed in training, 2 for a user's mistake or too little memory, 130 when
        interrupted.
    """
    args, unknown = build_parser().parse_known_args(arguments)
    keep_freed_memory()
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            _expect_none(unknown, args.options[args.command])
            args.run(args)
        except BrokenPipeError:
            # Whoever read our output has enough. The interpreter must not fail when it flushes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (ValueError, TypeError, OSError) as error:
            print(f"anymamba: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            print(f"anymamba: out of memory: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
            return 2
        except FloatingPointError as error:
            print(f"anymamba: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    return 0


def _expect_none(unknown: list[str], options: list[str]) -> None:
    """Refuse arguments that a command does not have, with those that are near."""
    for argument in unknown:
        if argument.startswith("-"):
            expect_known(argument.partition("=")[0], options, "", "option")
    if unknown:
        raise ValueError(f"{unknown[0]}: one argument too many")


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(text in str(error).lower() for text in _OUT_OF_MEMORY)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"anymamba: warning: {message}", file=sys.stderr)
