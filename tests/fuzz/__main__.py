"""Fuzzes files, calls and runs: `python -m tests.fuzz --seed 7 --seconds 120`.

`--repeat 'files {...}'` runs one case again, in this process.
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from tests.fuzz import calls, files, runs
from tests.fuzz.child import Finding, run_in_child

# The parts, and the fraction of the time that each takes.
PARTS = {"files": (files, 0.45), "calls": (calls, 0.35), "runs": (runs, 0.2)}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="default: drawn from the clock")
    parser.add_argument("--seconds", type=float, default=120.0, help="default: 120")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; repeatable")
    parser.add_argument("--cases", type=int, help="number of cases of each part, instead of the time")
    parser.add_argument("--repeat", metavar="CASE", help="a case as it was printed")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        if args.repeat:
            return repeat(args.repeat, work)
        print(f"seed {args.seed}: repeat with make fuzz SEED={args.seed}", flush=True)
        names = args.part or list(PARTS)
        total = sum(PARTS[name][1] for name in names)
        findings = 0
        for name in names:
            seconds = args.seconds * PARTS[name][1] / total
            findings += fuzz(name, args.seed, seconds, args.cases, work / name)
        print(f"{findings} findings" if findings else "nothing found")
        return 1 if findings else 0
    finally:
        shutil.rmtree(work, ignore_errors=True)


def fuzz(name, seed, seconds, cases, work):
    """Run the cases of a part until time is up, and return how many showed an error."""
    part = PARTS[name][0]
    start = time.monotonic()
    outcomes = Counter()
    known = set()
    prepared = work / "prepared"
    prepared.mkdir(parents=True)
    part.prepare(prepared)
    number = 0
    while (number < cases) if cases else (time.monotonic() - start < seconds):
        case = part.make(random.Random(f"{seed} {name} {number}"), prepared)
        outcome = attempt(part, case, prepared, work)
        if isinstance(outcome, Finding):
            kind = re.sub(r"[\d.]+(e[+-]\d+)?", "0", str(outcome).splitlines()[-1])
            if kind not in known:  # report each kind of error once
                known.add(kind)
                report(name, seed, number, part, case, outcome, prepared, work)
            outcome = "found"
        outcomes[outcome] += 1
        number += 1
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"{name}: {number} cases in {time.monotonic() - start:.0f} s: {counts}", flush=True)
    return outcomes["found"]


def attempt(part, case, prepared, work):
    """Run a case in a child process, and return how it ended, or the error it showed."""
    directory = Path(tempfile.mkdtemp(dir=work))
    try:
        return run_in_child(part.run, case, prepared, directory, seconds=part.SECONDS)
    except Finding as finding:
        return finding
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def report(name, seed, number, part, case, finding, prepared, work):
    """Print a finding with the simplest case that still shows one."""
    simplest = False
    while not simplest:
        simplest = True
        for candidate in part.simpler(case):
            outcome = attempt(part, candidate, prepared, work)
            if isinstance(outcome, Finding):
                case, finding, simplest = candidate, outcome, False
                break
    print(f"\nFOUND in {name}, case {number} of seed {seed}: {finding}")
    print(f"  repeat: python -m tests.fuzz --repeat '{name} {json.dumps(case)}'\n", flush=True)


def repeat(text, work):
    """Run a printed case here, with its whole traceback."""
    name, _, table = text.partition(" ")
    part = PARTS[name][0]
    (work / "prepared").mkdir()
    (work / "case").mkdir()
    part.prepare(work / "prepared")
    print(part.run(json.loads(table), work / "prepared", work / "case"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
