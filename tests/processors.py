"""Runs the tests that can differ between processors, for every kind of processor that this one can stand in for.

    python -m tests.processors            every processor
    python -m tests.processors --quick    a few of them, and fewer tests: at most 4 minutes on two idle cores

Each is imitated by variables: which vector instructions torch, MKL and our kernels use, and how many threads. One that
this machine cannot imitate is skipped, with the reason. Exits with 1 if one failed.
"""

import argparse
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDE = ROOT / "build" / "wide" / "libanymamba_cpu.so"

NUMERIC = (
    *(
        "tests/kernels",
        "tests/scan",
        "tests/ops",
        "tests/blocks",
        "tests/models",
        "tests/generation",
        "tests/quantization",
    ),
    *("tests/training/test_golden.py", "tests/training/test_trainer.py", "tests/training/test_optim.py"),
    "tests/test_former_files.py",
)
KERNELS = (
    *("tests/kernels", "tests/scan", "tests/ops", "tests/blocks", "tests/generation/test_decoder.py"),
    *("tests/generation/test_window.py", "tests/training/test_golden.py", "tests/test_former_files.py"),
)
QUICK = (
    *("tests/blocks/test_golden.py", "tests/models/test_lm.py", "tests/ops", "tests/test_former_files.py"),
    *("tests/training/test_golden.py", "tests/generation/test_decoder.py", "tests/scan/test_selective_scan.py"),
)
QUICK_KERNELS = (*QUICK, "tests/kernels")


@functools.cache
def probe(**variables: str) -> dict[str, str]:
    """Return what torch and our kernels use in a process with these variables."""
    code = (
        "import torch; from anymamba.kernels.cpu.bindings import LIBRARY;"
        "print(torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.backends.mkl.is_available(),"
        " torch.backends.mkldnn.is_available(), LIBRARY.isa or 'none', sep='|')"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("ATEN_CPU_CAPABILITY", "ANYMAMBA_ISA")}
    process = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **variables}, capture_output=True, text=True, check=True
    )
    return dict(zip(("torch", "aten", "mkl", "onednn", "isa"), process.stdout.strip().split("|"), strict=True))


def no_aten(level: str) -> Callable[[], str]:
    """Return a check that torch has this level; torch obeys the variable on any processor."""
    order = ["DEFAULT", "AVX2", "AVX512"]

    def reason() -> str:
        has = probe()["aten"]
        if has in order and order.index(level) <= order.index(has):
            return ""
        return f"torch has {has} here, not {level}"

    return reason


def no_mkl() -> str:
    return "" if probe()["mkl"] == "True" else "this torch has no MKL"


def no_onednn() -> str:
    return "" if probe()["onednn"] == "True" else "this torch has no oneDNN"


def no_isa(level: str) -> Callable[[], str]:
    def reason() -> str:
        isa = probe(ANYMAMBA_ISA=level)["isa"]
        return "" if isa == level else f"the kernels have {isa} here, not {level}"

    return reason


def no_wide() -> str:
    """Build AVX-512's vectors for AVX2, which takes about a minute, and return why it cannot be done."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the wide variant is for x86-64, this is {platform.machine()}"
    if not shutil.which("cmake"):
        return "there is no cmake to build it"
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(WIDE.parent), "-DANYMAMBA_VARIANTS=wide"],
        ["cmake", "--build", str(WIDE.parent)],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    isa = probe(ANYMAMBA_LIBRARY=str(WIDE))["isa"]
    return "" if isa == "wide" else "this processor has no AVX2"


@dataclass(frozen=True, kw_only=True)
class Processor:
    """One kind of processor.

    Args:
        name: Name in the table.
        variables: Environment variables that select it.
        missing: Function that returns why it cannot run here; empty if it can.
        tests: Tests of `make test-processors`.
        quick: Tests with `--quick`; empty if it is not part of that.
    """

    name: str
    variables: dict[str, str]
    missing: Callable[[], str] = lambda: ""
    tests: tuple[str, ...] = NUMERIC
    quick: tuple[str, ...] = field(default=())


PROCESSORS = (
    Processor(
        name="torch default", variables={"ATEN_CPU_CAPABILITY": "default"}, missing=no_aten("DEFAULT"), quick=QUICK
    ),
    Processor(name="torch avx2", variables={"ATEN_CPU_CAPABILITY": "avx2"}, missing=no_aten("AVX2")),
    Processor(name="torch avx512", variables={"ATEN_CPU_CAPABILITY": "avx512"}, missing=no_aten("AVX512")),
    Processor(name="MKL compatible", variables={"MKL_CBWR": "COMPATIBLE"}, missing=no_mkl, quick=QUICK),
    Processor(name="MKL avx2", variables={"MKL_CBWR": "AVX2"}, missing=no_mkl),
    Processor(name="oneDNN", variables={"ANYMAMBA_MATMUL": "onednn"}, missing=no_onednn, quick=QUICK),
    Processor(
        name="kernels baseline",
        variables={"ANYMAMBA_ISA": "baseline"},
        missing=no_isa("baseline"),
        tests=KERNELS,
        quick=QUICK_KERNELS,
    ),
    Processor(name="kernels avx2", variables={"ANYMAMBA_ISA": "avx2"}, missing=no_isa("avx2"), tests=KERNELS),
    Processor(name="kernels avx512", variables={"ANYMAMBA_ISA": "avx512"}, missing=no_isa("avx512"), tests=KERNELS),
    Processor(
        name="kernels wide",
        variables={"ANYMAMBA_LIBRARY": str(WIDE)},
        missing=no_wide,
        tests=KERNELS,
        quick=QUICK_KERNELS,
    ),
    Processor(name="1 thread", variables={"ANYMAMBA_TEST_THREADS": "1"}),
    Processor(name="2 threads", variables={"ANYMAMBA_TEST_THREADS": "2"}),
    Processor(name="3 threads", variables={"ANYMAMBA_TEST_THREADS": "3"}, quick=QUICK),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result on a processor: passed, failed or skipped, with a line of explanation."""

    name: str
    result: str
    line: str
    output: str = ""


def run(processor: Processor, tests: tuple[str, ...]) -> Outcome:
    """Run the tests in a process with the processor's variables."""
    if reason := processor.missing():
        return Outcome(name=processor.name, result="skipped", line=reason)
    start = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, **processor.variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    output = process.stdout.strip()
    summary = re.sub(r" in [\d.]+s.*", "", output.splitlines()[-1].strip("= ")) if output else "no output"
    line = f"{summary} in {time.monotonic() - start:.0f} s"
    result = "passed" if process.returncode == 0 else "failed"
    return Outcome(name=processor.name, result=result, line=line, output=output)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.processors", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the part that CI runs")
    parser.add_argument("--only", metavar="TEXT", help="processors whose name contains this")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processors at the same time")
    options = parser.parse_args(arguments)
    processors = [
        processor
        for processor in PROCESSORS
        if (not options.quick or processor.quick) and (options.only or "") in processor.name
    ]
    if not processors:
        parser.error(f"expected one of {', '.join(processor.name for processor in PROCESSORS)}, got {options.only!r}")
    machine = probe()
    print(
        f"torch {machine['torch']} with {machine['aten']}, kernels with {machine['isa']}, {platform.machine()}",
        flush=True,
    )
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [
            pool.submit(run, processor, processor.quick if options.quick else processor.tests)
            for processor in processors
        ]
        outcomes = []
        for task in as_completed(waiting):
            outcomes.append(outcome := task.result())
            print(f"{outcome.name:18} {outcome.result:8} {outcome.line}", flush=True)
    for outcome in outcomes:
        if outcome.result == "failed":
            print(f"\n{outcome.name}\n{outcome.output}")
    return int(any(outcome.result == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
