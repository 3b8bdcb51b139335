"""The command line: choose cases, measure them one after another, print and write the results."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import fnmatch
import importlib.util
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from anymamba import keep_freed_memory
from anymamba.core.dtypes import parse_device
from benchmarks import (
    busy,
    generation,
    gpu,
    hf_models,
    hybrids,
    kernels,
    llama,
    mamba1,
    mamba2,
    mamba3,
    speculation,
    stacks,
    training,
)
from benchmarks.device import describe_accelerator, measure_peak_bytes
from benchmarks.harness import Case, CaseResult, Contender, DisagreementError, time_case
from benchmarks.machine import GPU_PACKAGES, describe_machine, installed_version
from benchmarks.memory import measure_here, measure_in_child
from benchmarks.report import Report, write_atomically

MODULES = (
    mamba1,
    mamba2,
    mamba3,
    kernels,
    generation,
    speculation,
    busy,
    llama,
    training,
    stacks,
    hf_models,
    hybrids,
    gpu,
)
CASES = {case.name: case for module in MODULES for case in module.CASES}

EXIT_DISAGREEMENT = 1
EXIT_USAGE = 2

_EPILOG = """\
Contenders that claim to compute the same function are compared before they are timed, with gradients where those are
timed too; a case whose contenders disagree is rejected and the exit code is 1.

Timings taken while other programs use the processor are marked as not to be trusted: on a busy machine the waiting
loops of torch's threads slow a call down up to a hundred times. OMP_WAIT_POLICY=passive in the environment avoids that
and is written to the JSON file; it is not the default because users of torch do not run with it.

columns of the table (Markdown, on standard output):
  median ms   wall-clock milliseconds per call, contenders interleaved in one process
  spread ms   the smallest and the largest sample
  ratio       median relative to the case's baseline
  peak MiB    the most memory a call holds above its parameters and inputs, from a fresh process

examples:
  python -m benchmarks --list
  python -m benchmarks --only 'ssd/*' 'seeds/*' --repeats 15 --json out.json
  python -m benchmarks --quick
  python -m benchmarks --device cuda --only 'gpu/*'   (what it prints is what benchmarks/RESULTS.md has a place for)
  python -m benchmarks --only generation/long-prompt/mamba2-130m-two-layers   (the long prompts only run when named)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program, and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        if options.memory_of is not None:
            print(measure_here(_contender(options.memory_of)))
            return 0
        cases = select_cases(options.only)
    except LookupError as error:
        print(f"{parser.prog}: {error.args[0]}", file=sys.stderr)
        return EXIT_USAGE
    if options.list:
        print("\n".join(_describe_case(case) for case in cases))
        return 0
    if options.skip_heavy:
        cases = [light for case in cases if (light := without_heavy(case)) is not None]
    try:
        device = parse_device(options.device, "--device")
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return EXIT_USAGE
    cases = [without_missing_peers(case, device) for case in cases]
    if missing := missing_libraries(cases):
        print(
            f"{parser.prog}: {', '.join(missing)} must be installed to measure these cases: pip install -e '.[bench]', "
            "or choose others with --only",
            file=sys.stderr,
        )
        return EXIT_USAGE
    if options.keep_freed_memory and not keep_freed_memory():
        print(
            f"{parser.prog}: --keep-freed-memory needs glibc, and no malloc settings in the environment",
            file=sys.stderr,
        )
        return EXIT_USAGE
    if options.processor_time and options.threads != 1:
        print(f"{parser.prog}: --processor-time needs --threads 1, got {options.threads}", file=sys.stderr)
        return EXIT_USAGE
    machine = describe_machine()
    if device.type != "cpu":
        machine["device"] = describe_accelerator(device)
        machine["versions"] |= {name: installed_version(name) for name in GPU_PACKAGES}
    report = Report(command=_command(options), machine=machine)
    for case in cases:
        try:
            report.results.append(_measure(case, options, device))
        except DisagreementError as error:
            _progress(str(error))
            report.rejected.append(error)
        for path, text in ((options.json, report.json()), (options.markdown, report.markdown())):
            if path is not None:
                write_atomically(path, text)
    print(report.markdown(), end="")
    return EXIT_DISAGREEMENT if report.rejected else 0


def select_cases(globs: Sequence[str]) -> list[Case]:
    """Return the cases whose names match any of `globs`, in registry order; without globs, all but the longest.

    Raises:
        LookupError: if one of them matches nothing.
    """
    for glob in globs:
        if not fnmatch.filter(CASES, glob):
            raise LookupError(_describe_unknown("case", glob, list(CASES)))
    if not globs:
        return [case for case in CASES.values() if not case.on_request]
    return [case for name, case in CASES.items() if any(fnmatch.fnmatch(name, glob) for glob in globs)]


def without_heavy(case: Case) -> Case | None:
    """Return `case` without its heavy contenders, or None if its baseline is one of them."""
    light = tuple(contender for contender in case.contenders if not contender.heavy)
    if all(contender.name != case.baseline for contender in light):
        return None
    return dataclasses.replace(case, contenders=light)


def without_missing_peers(case: Case, device: torch.device) -> Case:
    """Return `case` without the optional contenders whose library is not installed, or which need a GPU."""
    present = tuple(
        contender
        for contender in case.contenders
        if not contender.optional or (device.type != "cpu" and importlib.util.find_spec(contender.library))
    )
    return dataclasses.replace(case, contenders=present)


def missing_libraries(cases: Sequence[Case]) -> list[str]:
    """Return the packages that the contenders of `cases` need and that are not installed."""
    needed = {contender.library for case in cases for contender in case.contenders}
    return sorted(library for library in needed if importlib.util.find_spec(library) is None)


def _measure(case: Case, options: argparse.Namespace, device: torch.device) -> CaseResult:
    clock = time.process_time if options.processor_time else time.perf_counter
    result = time_case(case, options.repeats, _progress, clock, device)
    if result.doubt is not None:
        _progress(f"{case.name}: not to be trusted, {result.doubt}; measure again on an idle machine")
    if not options.memory:
        return result
    _progress(f"{case.name}: memory")
    if device.type != "cpu":
        measured = {contender.name: measure_peak_bytes(contender.setup, device) for contender in case.contenders}
        peaks = {name: size for name, size in measured.items() if size is not None}
        return dataclasses.replace(result, peak_bytes=peaks or None)
    peaks = {
        contender.name: measure_in_child(case.name, contender.name, options.threads) for contender in case.contenders
    }
    return dataclasses.replace(result, peak_bytes=peaks)


def _contender(name: str) -> Contender:
    """Return the contender called CASE/CONTENDER."""
    everyone = {f"{case.name}/{contender.name}": contender for case in CASES.values() for contender in case.contenders}
    if name not in everyone:
        raise LookupError(_describe_unknown("contender", name, list(everyone)))
    return everyone[name]


def _describe_unknown(kind: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
    hint = f"near matches: {', '.join(near)}" if near else "--list shows all"
    return f"no {kind} matches {name!r}; {hint}"


def _describe_case(case: Case) -> str:
    contenders = [f"{c.name} (heavy)" if c.heavy else c.name for c in case.contenders]
    return f"{case.name:28}  {', '.join(contenders)}"


def _progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _command(options: argparse.Namespace) -> str:
    """Return the command that repeats this measurement: the options with an influence on it."""
    words = ["python", "-m", "benchmarks"]
    if options.only:
        words += ["--only", *options.only]
    words += ["--repeats", str(options.repeats), "--threads", str(options.threads)]
    if options.device != "cpu":
        words += ["--device", options.device]
    if options.skip_heavy:
        words.append("--skip-heavy")
    if not options.memory:
        words.append("--no-memory")
    if options.keep_freed_memory:
        words.append("--keep-freed-memory")
    if options.processor_time:
        words.append("--processor-time")
    return shlex.join(words)


class _Quick(argparse.Action):
    """The option --quick, an abbreviation of several others."""

    def __call__(self, _parser: object, namespace: argparse.Namespace, *_: object) -> None:
        namespace.repeats = 3
        namespace.skip_heavy = True
        namespace.memory = False


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time and memory of anymamba and its peers, side by side.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--list", action="store_true", help="show the cases and their contenders, and stop")
    parser.add_argument("--only", nargs="+", default=[], metavar="GLOB", help="measure the cases that match any GLOB")
    parser.add_argument("--repeats", type=_positive, default=7, metavar="N", help="samples of each contender (7)")
    parser.add_argument(
        "--threads", type=_positive, default=2, metavar="N", help="threads that torch computes with (2)"
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="device to measure on, such as cuda (cpu)")
    parser.add_argument("--skip-heavy", action="store_true", help="leave out contenders that take very long")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not measure memory")
    parser.add_argument(
        "--keep-freed-memory",
        action="store_true",
        help="time all contenders as in the anymamba command, with freed memory kept instead of cleared again",
    )
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="time the processor time of a single thread, not the wall clock: for a machine that others use too",
    )
    parser.add_argument("--quick", action=_Quick, nargs=0, help="the same as --repeats 3 --skip-heavy --no-memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample and the machine to FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write what is printed to FILE as well")
    parser.add_argument("--memory-of", metavar="CASE/CONTENDER", help=argparse.SUPPRESS)
    return parser
