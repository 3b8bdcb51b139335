"""How long OpenMP's threads may spin: prefill, training and decoding by spin count, alone and next to a busy program.

python -m benchmarks.waiting

libgomp reads its spin count when it is loaded, so every count is measured in processes of its own. In a process, calls
on an idle machine alternate with calls while one core is kept busy (benchmarks/busy.py). The counts take turns, in an
order that is reversed from round to round, and the table has the medians over all rounds. Times alone are compared
with the first count, by default libgomp's own. It needs a machine that nothing else uses. In a container with a quota
(`docker run --cpus 1.5`), `--threads 0` takes as many threads as `anymamba.configure_threads()` chooses there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
DEFAULT = "default"
COUNTS = (DEFAULT, "0", "100", "1000", "10000")
WORKLOADS = ("prefill", "training", "decode")
Samples = dict[str, list[float]]  # milliseconds, by "workload alone" or "workload busy"


def measure_here(workloads: Sequence[str], threads: int, calls: int, tiny: bool) -> Samples:
    """Return samples of the workloads in this process, whose spin count is that of its environment."""
    import torch

    from anymamba import configure_threads
    from benchmarks.busy import TOKENS, busy_core
    from benchmarks.generation import our_model_with, prompt, set_up_prefill, set_up_steps
    from benchmarks.harness import Call
    from benchmarks.training import set_up_step

    if threads:
        torch.set_num_threads(threads)
    else:
        configure_threads()

    def set_up_decode() -> Call:
        step = set_up_steps(our_model_with("float32", tiny), prompt(1, 64), prompt(1, 1)[:, 0])

        def run() -> dict[str, torch.Tensor]:
            for _ in range(TOKENS - 1):
                step()
            return dict(step())

        return run

    set_ups = {
        "prefill": lambda: set_up_prefill("mamba2-130m", "anymamba", 1, 32 if tiny else 1024, tiny),
        "training": lambda: set_up_step("anymamba", 32 if tiny else 512, tiny),
        "decode": set_up_decode,
    }
    samples: Samples = defaultdict(list)
    for workload in workloads:
        call = set_ups[workload]()
        call()
        for _ in range(calls):
            samples[f"{workload} alone"].append(_time(call))
            with busy_core():
                samples[f"{workload} busy"].append(_time(call))
    return samples


def _time(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call."""
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


def measure_in_child(count: str, arguments: Sequence[str]) -> Samples:
    """Return samples from a new process with a spin count.

    Raises:
        RuntimeError: it failed, with what it wrote.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    if count != DEFAULT:
        environment["GOMP_SPINCOUNT"] = count
    command = [sys.executable, "-m", "benchmarks.waiting", "--here", *arguments]
    child = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        raise RuntimeError(f"exit code {child.returncode}\n{child.stderr}")
    samples: Samples = json.loads(child.stdout.splitlines()[-1])
    return samples


def table(samples: dict[str, Samples]) -> str:
    """Return the medians as a table, from samples by spin count."""
    lines = [
        "| median ms | spin count | alone | relative to the first | busy | busy / alone |",
        "|---|---|---:|---:|---:|---:|",
    ]
    baseline, *_ = samples.values()
    for workload in sorted({name.split()[0] for name in baseline}, key=WORKLOADS.index):
        for count, by_name in samples.items():
            alone, busy = (statistics.median(by_name[f"{workload} {kind}"]) for kind in ("alone", "busy"))
            relative = alone / statistics.median(baseline[f"{workload} alone"])
            lines.append(f"| {workload} | {count} | {alone:.1f} | {relative:.3f}× | {busy:.1f} | {busy / alone:.2f}× |")
    return "\n".join(lines)


def main() -> int:
    """Run the program, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads to compute with (2)")
    parser.add_argument("--counts", nargs="+", default=COUNTS, metavar="N", help=f"spin counts ({' '.join(COUNTS)})")
    parser.add_argument("--only", nargs="+", default=WORKLOADS, choices=WORKLOADS, help="workloads (all)")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="processes per spin count (4)")
    parser.add_argument("--calls", type=int, default=5, metavar="N", help="calls per process, alone and busy (5)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see whether everything runs")
    parser.add_argument("--here", action="store_true", help="measure in this process, and print JSON")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure_here(options.only, options.threads, options.calls, options.tiny)))
        return 0
    arguments = ["--threads", str(options.threads), "--calls", str(options.calls), "--only", *options.only]
    arguments += ["--tiny"] * options.tiny
    samples: dict[str, Samples] = {count: defaultdict(list) for count in options.counts}
    for number in range(options.rounds):
        for count in options.counts[:: -1 if number % 2 else 1]:
            print(f"round {number + 1} of {options.rounds}: {count}", file=sys.stderr, flush=True)
            for name, values in measure_in_child(count, arguments).items():
                samples[count][name] += values
    print(table(samples))
    return 0


if __name__ == "__main__":
    sys.exit(main())
