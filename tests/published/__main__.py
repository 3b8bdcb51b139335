"""The command: finds clones below a directory, runs the rows that belong to them, and prints what agrees."""

import argparse
import datetime
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = ("motion", "prices", "proteins", "captures", "interpreted")
KERNELS = {
    "fastest": {},
    "off": {"ANYMAMBA_KERNELS": "off"},
    **{isa: {"ANYMAMBA_ISA": isa} for isa in ("baseline", "avx2", "avx512")},
}


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """Return the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.published", description="Compare published figures with ours, from clones."
    )
    parser.add_argument("directory", type=Path, help="directory with clones, bare or not, at any place below it")
    parser.add_argument("--only", choices=ROWS, action="append", help="run this row; repeatable")
    parser.add_argument(
        "--kernels",
        choices=(*KERNELS, "all"),
        default="fastest",
        help="instructions of the compiled kernels, 'off' for portable code, or 'all' of these in turn",
    )
    parser.add_argument("--dtype", choices=("float32", "float64"), help="precision (default: the published one)")
    parser.add_argument("--quick", action="store_true", help="run one of the models that were trained alike")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the rows; return 1 if a figure does not agree or a row could not be read, else 0."""
    args = parse_args(arguments)
    if not args.directory.is_dir():
        print(f"tests.published: {args.directory}: no such directory", file=sys.stderr)
        return 2
    if args.kernels == "all":
        return run_all(args)
    os.environ.update(KERNELS[args.kernels])  # before anymamba is imported
    return run(args)


def run_all(args: argparse.Namespace) -> int:
    """Run the command once for each set of instructions that this processor has; return 1 if one failed."""
    from tests.processors import no_isa

    options = [f"--only={name}" for name in args.only or ()]
    options += [f"--dtype={args.dtype}"] if args.dtype else []
    options += ["--quick"] if args.quick else []
    code = 0
    for name, variables in KERNELS.items():
        if name == "fastest":
            continue
        if "ANYMAMBA_ISA" in variables and (reason := no_isa(name)()):
            print(f"== kernels {name}: skipped, {reason}\n", flush=True)
            continue
        command = [sys.executable, "-m", "tests.published", str(args.directory), f"--kernels={name}", *options]
        code |= subprocess.run(command, cwd=ROOT, check=False).returncode
    return code


def run(args: argparse.Namespace) -> int:
    """Run the rows in this process."""
    import importlib

    from tests.published.clone import find_clone
    from tests.published.row import DTYPES, Options, format_figures, run_row

    print(describe_run(args), flush=True)
    has_failed = False
    for name in args.only or ROWS:
        row = importlib.import_module(f"tests.published.{name}").ROW
        print(f"\n== {row.name}: {row.title}\n   {row.repository} at {row.commit[:7]}", flush=True)
        clone = find_clone(args.directory, row.commit)
        if clone is None:
            print(f"   not run: no clone with this commit (git clone https://github.com/{row.repository})")
            continue
        try:
            figures, seconds = run_row(row, clone, Options(dtype=DTYPES.get(args.dtype), is_quick=args.quick))
        except ValueError as error:
            print(f"   failed: {error}")
            has_failed = True
            continue
        compared = [figure.agrees for figure in figures if figure.agrees is not None]
        print(format_figures(figures))
        print(f"{sum(compared)} of {len(compared)} agree ({seconds:.0f} s)", flush=True)
        has_failed |= not all(compared)
    return int(has_failed)


def describe_run(args: argparse.Namespace) -> str:
    """Return when, where and with what the rows run."""
    import torch
    from benchmarks.machine import describe_machine

    from anymamba.core.registry import describe_kernels

    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=7"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    date = datetime.datetime.now(datetime.timezone.utc).date()
    return (
        f"{date}, {describe_machine()['cpu']}, anymamba {commit or 'without git'}, torch {torch.__version__}, "
        f"kernels {describe_kernels()['cpu']}, dtype {args.dtype or 'as published'}"
    )


if __name__ == "__main__":
    sys.exit(main())
