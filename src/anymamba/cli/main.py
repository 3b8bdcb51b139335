"""`anymamba`: parse the arguments, run a command, turn a user's mistake into one line and exit code 2."""

from __future__ import annotations

import argparse
import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from anymamba.cli.options import (
    add_convert,
    add_eval,
    add_generate,
    add_info,
    add_inspect,
    add_predict,
    add_push,
    add_train,
)
from anymamba.cli.serve_options import add_bench_serve, add_serve
from anymamba.core.config_fields import check_known
from anymamba.core.process import keep_freed_memory
from anymamba.core.threads import set_spin_count
from anymamba.version import __version__

# The module and function of each command; imported only when it runs, because importing torch takes seconds.
_COMMANDS = {
    "train": "train.run_train",
    "predict": "train.run_predict",
    "generate": "generate.run",
    "eval": "evaluate.run",
    "inspect": "info.run_inspect",
    "convert": "convert.run_convert",
    "push": "convert.run_push",
    "info": "info.run_info",
    "serve": "serve.run_serve",
    "bench-serve": "serve.run_bench_serve",
}
_ENOUGH_ADDRESS_SPACE = 2**32  # bytes that surely suffice to import torch
# In messages of torch's allocators, of the system, of its loader, and of oneDNN.
_OUT_OF_MEMORY = (
    "out of memory", "not enough memory", "allocate memory", "bad_alloc", "failed to map segment",
    "could not create a memory",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with these arguments, by default those of the process, and return the exit code.

    It is 0, 1 when numbers overflowed in training, 2 for a user's mistake or too little memory, 130 when interrupted.
    """
    keep_freed_memory()
    set_spin_count()
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            args = parse(sys.argv[1:] if arguments is None else arguments)
            _check_memory_for_torch()
            module, _, function = _COMMANDS[args.command].partition(".")
            getattr(import_module(f"anymamba.cli.{module}"), function)(args)
        except BrokenPipeError:
            # The reader of our output has gone. The interpreter must not fail when it flushes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except KeyboardInterrupt:
            return 130
        except FloatingPointError as error:
            if os.environ.get("RANK", "0") == "0":  # all ranks of a run raise it
                _print_error(str(error))
            return 1
        except Exception as error:
            if _is_out_of_memory(error):
                _print_error(f"out of memory: {str(error) or type(error).__name__}")
            elif isinstance(error, ValueError | TypeError | OSError):
                is_repeated = getattr(error, "is_shared", False) and os.environ.get("RANK", "0") != "0"
                lines = getattr(error, "lines", [str(error)])  # several mistakes, one line each
                for line in [] if is_repeated else lines:
                    _print_error(line)
            else:
                raise
            return 2
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command and its options; `--help` and `--version` print and raise SystemExit."""
    parser, commands = build_parser()
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


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser, and the parser of each command by name."""
    parser = Parser(prog="anymamba", description="Mamba-1, Mamba-2 and Mamba-3 on any machine.")
    parser.add_argument("--version", action="version", version=f"anymamba {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for add in (add_train, add_predict, add_generate, add_eval, add_inspect, add_convert, add_push, add_info):
        add(commands)
    add_serve(commands)
    add_bench_serve(commands)
    return parser, dict(commands.choices)


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise the message that argparse would print below its usage."""
        raise ValueError(f"{message} ({self.prog} --help lists the options)")


def _check_memory_for_torch() -> None:
    """Raise MemoryError if the process may not use enough memory to import torch, which would end it instead."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if "torch" in sys.modules or limit == resource.RLIM_INFINITY or limit >= _ENOUGH_ADDRESS_SPACE:
        return
    if subprocess.run([sys.executable, "-c", "import numpy, torch"], capture_output=True).returncode:
        raise MemoryError(f"torch cannot be loaded within {limit / 2**20:,.0f} MiB (ulimit -v)")


def _print_error(message: str) -> None:
    print(f"anymamba: {' '.join(message.split())}", file=sys.stderr)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, means that memory ran out."""
    if error is None:
        return False
    is_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    is_memory = is_memory or any(text in str(error).lower() for text in _OUT_OF_MEMORY)
    return is_memory or _is_out_of_memory(error.__cause__ or error.__context__)


def _show_warning(message: Warning | str, *_: Any, **_kwargs: Any) -> None:
    print(f"anymamba: warning: {message}", file=sys.stderr)
