"""`python -m anymamba.compat SCRIPT ...`: run a script, or with `-m` a module, that imports the official packages."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import NoReturn

from anymamba.compat.install import ACTIVATIONS, install


class _Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"anymamba.compat: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m anymamba.compat",
        usage="python -m anymamba.compat [OPTION ...] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description="Run a script or module that imports mamba_ssm or causal_conv1d on anymamba.",
    )
    parser.add_argument(
        "--a-activation",
        choices=ACTIVATIONS,
        help="activation of the decay rates of a Mamba3 that names none: softplus for code and weights from before "
        "June 2026 (default: heavy_tail)",
    )
    parser.add_argument(
        "--cuda-as-cpu",
        action="store_true",
        help='let .cuda(), device="cuda", torch.cuda and autocast for CUDA use the CPU',
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a module, with the arguments that follow it"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="run a script, with the arguments that follow it")
    return parser


def main(arguments: list[str]) -> int:
    """Run the script or module that the arguments name, with the remaining ones as its own; return the exit code."""
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as error:
        return int(error.code or 0)
    names = options.module or options.script
    if not names:
        print(f"anymamba.compat: no script; {_parser().format_usage().strip()}", file=sys.stderr)
        return 2
    if not options.module and not Path(names[0]).is_file():
        print(f"anymamba.compat: {names[0]}: no such script", file=sys.stderr)
        return 2
    # As without this module: a script finds what is next to it, a module what is in the working directory.
    sys.path[0] = str(Path.cwd() if options.module else Path(names[0]).resolve().parent)
    try:
        install(a_activation=options.a_activation, cuda_as_cpu=options.cuda_as_cpu)
    except RuntimeError as error:
        print(f"anymamba.compat: {error}", file=sys.stderr)
        return 2
    sys.argv = names
    if options.module:
        runpy.run_module(names[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(names[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
