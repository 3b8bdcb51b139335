"""Two ranks with one thread each, compared with one process with two threads that trains on the same batches.

python -m benchmarks.parallel          # on two idle cores
python -m benchmarks.parallel --tiny   # in a moment: that it works, and no figures

A contender is started anew in each round, takes one step that does not count, and then some that do. Losses must agree.
Memory is the most that a rank has resident during those steps, above what it has after a step of a tiny model. Bytes
and time of context are those of exchanges between ranks that share a row; the time is that in which a rank waits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # before torch is imported, as in __main__.py

from anymamba.core.context_parallel import ContextParallelGroup
from anymamba.core.process import keep_freed_memory
from anymamba.training.api import create_run
from anymamba.training.config.run_config import TrainingConfig
from anymamba.training.distributed.process_group import World, init_distributed
from anymamba.training.trainer import Trainer
from benchmarks.machine import describe_machine
from benchmarks.memory import high_water_mark, reset_high_water_mark

_ROOT = Path(__file__).resolve().parent.parent
_TEXT = 2**20  # bytes, more than all steps read

LARGE = {"d_model": 512, "n_layer": 6}
SMALL = {"d_model": 64, "n_layer": 2}
TINY = {"d_model": 32, "n_layer": 1}


class Plan(NamedTuple):
    """The training run of a contender."""

    name: str
    length: int
    rows: int
    mesh: dict[str, int]
    optimizer: str = "adamw"

    @property
    def world(self) -> int:
        """Return the number of ranks; a single one has as many threads as the others have ranks."""
        return 1 if not self.mesh else 2

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.length * self.rows


class RunMeasurements(NamedTuple):
    """The measurements of one run.

    Attributes:
        seconds: Seconds of each step.
        loss: Loss of the first step.
        memory: Bytes of the rank that needs most.
        sent: Bytes sent to other ranks per step, of the rank that sends most.
        waited: Seconds of waiting for other ranks per step, of the rank that waits most.
    """

    seconds: list[float]
    loss: float
    memory: int
    sent: int
    waited: float


class WaitingClock:
    """A clock of the time in which a rank waits for the ranks before and after it."""

    def __init__(self, cp_group: ContextParallelGroup) -> None:
        """Wrap the calls that send and receive messages."""
        self.seconds = 0.0
        self._send = cp_group.send
        self._receive = cp_group.receive
        vars(cp_group).update(send=self._timed_send, receive=self._timed_receive)

    def _timed_send(self, values: Any, *, to_next: bool) -> tuple[WaitingClock, Any]:
        self._work, message = self._send(values, to_next=to_next)
        return self, message

    def wait(self) -> None:
        """Wait until a message is sent."""
        began = perf_counter()
        self._work.wait()
        self.seconds += perf_counter() - began

    def _timed_receive(self, like: Any, *, from_prev: bool) -> Any:
        began = perf_counter()
        values = self._receive(like, from_prev=from_prev)
        self.seconds += perf_counter() - began
        return values


def start(directory: Path, plan: Plan, sizes: dict[str, Any], world: World) -> Trainer[Any]:
    """Return a run that has taken no step yet."""
    config = TrainingConfig.from_dict(
        {
            "model": sizes,
            "data": {"sources": [str(directory / "words.txt")]},
            "batch": {"tokens": plan.tokens, "length": plan.length},
            "schedule": {"kind": "constant", "warmup": 0, "steps": 10**6},
            "optimizer": {"kind": plan.optimizer},
            "parallel": plan.mesh,
            "threads": 2 // plan.world,
        }
    )
    return create_run(config, directory / f"run-{sizes['d_model']}", lambda _: None, world)


def work(directory: Path, plan: Plan, sizes: dict[str, Any], steps: int) -> None:
    """Train as one rank of a contender, and write the measurements into the directory."""
    keep_freed_memory()
    world = init_distributed()
    # What is imported on the way counts as there before.
    start(directory, plan._replace(length=64), {**TINY, "family": sizes["family"]}, world)._take_step()
    reset_high_water_mark()
    before = high_water_mark()
    trainer = start(directory, plan, sizes, world)
    cp_group = world.cp_group
    timed = WaitingClock(cp_group) if cp_group else None
    loss = trainer._take_step()[0].loss
    reset_high_water_mark()
    sent, waited = (cp_group.sent, timed.seconds) if cp_group and timed else (0, 0.0)
    seconds = []
    for _ in range(steps):
        began = perf_counter()
        trainer._take_step()
        seconds.append(perf_counter() - began)
    if cp_group and timed:
        sent, waited = (cp_group.sent - sent) // steps, (timed.seconds - waited) / steps
    measurements = RunMeasurements(seconds, loss, high_water_mark() - before, sent, waited)
    (directory / f"rank-{world.rank}.json").write_text(json.dumps(measurements))


def run(plan: Plan, sizes: dict[str, Any], steps: int) -> RunMeasurements:
    """Run the ranks of a contender, and return their measurements.

    Raises:
        RuntimeError: they failed, with what they wrote.
    """
    print(f"{plan.name}, {plan.rows} x {plan.length:,} tokens", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "words.txt").write_bytes(_text())
        arguments = ["-m", "benchmarks.parallel", "--rank", name, json.dumps(plan), json.dumps(sizes), str(steps)]
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.world)]
        command = [sys.executable, *(launch if plan.world > 1 else []), *arguments]
        process = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        if process.returncode:
            raise RuntimeError(f"{plan.name}: exit code {process.returncode}\n{process.stderr}")
        ranks = [RunMeasurements(*json.loads(file.read_text())) for file in sorted(Path(name).glob("rank-*.json"))]
    most = {field: max(getattr(one, field) for one in ranks) for field in ("memory", "sent", "waited")}
    return ranks[0]._replace(**most)


def _text() -> bytes:
    """Write words that no two steps share, the same in every run."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(97, 123, (_TEXT,), generator=generator, dtype=torch.uint8).numpy().tobytes()


def compare(plans: list[Plan], sizes: dict[str, Any], rounds: int, steps: int) -> dict[str, list[RunMeasurements]]:
    """Run contenders in interleaved rounds, print how they compare with the first, and return the runs by name.

    Raises:
        RuntimeError: their losses differ.
    """
    runs_by_name: dict[str, list[RunMeasurements]] = {plan.name: [] for plan in plans}
    for _ in range(rounds):
        for plan in plans:
            runs_by_name[plan.name].append(run(plan, sizes, steps))
    losses = {name: runs[0].loss for name, runs in runs_by_name.items()}
    if max(losses.values()) - min(losses.values()) > 1e-4 * min(losses.values()):
        raise RuntimeError(f"the contenders train something else: losses {losses}")
    seconds = {name: [s for f in runs for s in f.seconds] for name, runs in runs_by_name.items()}
    rates = {name: plans[0].tokens / statistics.median(times) for name, times in seconds.items()}
    memory = {name: statistics.median(f.memory for f in runs) for name, runs in runs_by_name.items()}
    first = plans[0]
    print(f"| {first.rows} x {first.length:,} tokens a step | tokens/s | ratio | memory of a rank | ratio |")
    print("|---|---:|---:|---:|---:|")
    for name in runs_by_name:
        spread = [first.tokens / one for one in (max(seconds[name]), min(seconds[name]))]
        print(
            f"| {name} | {rates[name]:,.0f} ({spread[0]:,.0f} to {spread[1]:,.0f}) | "
            f"{rates[name] / rates[first.name]:.2f} | {memory[name] / 2**20:,.0f} MiB | "
            f"{memory[name] / memory[first.name]:.2f} |",
            flush=True,
        )
    print()
    return runs_by_name


def exchanges(runs: dict[int, list[RunMeasurements]]) -> None:
    """Print the bytes and the time of context parallelism by the length of a row."""
    print("| context = 2: tokens of a row | bytes that a rank sends in a step | waits for its neighbor | a step |")
    print("|---:|---:|---:|---:|")
    for length, length_runs in sorted(runs.items()):
        step = statistics.median(s for f in length_runs for s in f.seconds)
        waited = statistics.median(f.waited for f in length_runs)
        print(
            f"| {length:,} | {length_runs[0].sent:,} | {waited:.3f} s ({waited / step:.1%}) | {step:.2f} s |",
            flush=True,
        )


def main() -> int:
    """Run the program, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parallel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=["Mamba1", "Mamba2", "Mamba3"], default="Mamba2")
    parser.add_argument(
        "--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: rows divided over ranks alone"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="that count, in each round")
    parser.add_argument("--tiny", action="store_true", help="a small model and short rows")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        directory, plan, sizes, steps = options.rank
        work(Path(directory), Plan(*json.loads(plan)), json.loads(sizes), int(steps))
        return 0
    sizes = {**(SMALL if options.tiny else LARGE), "family": options.family}
    short, lengths = (32, (64, 128, 256)) if options.tiny else (512, (2048, 8192, 32768))
    print(f"{describe_machine()}\n", file=sys.stderr)
    one = "one process, 2 threads"
    meshes = {one: {}, "replicate = 2": {"replicate": 2}, "shard = 2": {"shard": 2}}
    rows = [Plan(name, short, 8, mesh, options.optimizer) for name, mesh in meshes.items()]
    compare(rows, sizes, options.rounds, options.steps)
    if options.optimizer != "adamw":
        return 0
    shared = {length: Plan("context = 2", length, 1, {"context": 2}) for length in lengths}
    by_name = compare([Plan(one, lengths[1], 1, {}), shared[lengths[1]]], sizes, options.rounds, options.steps)
    runs = {lengths[1]: by_name["context = 2"]}
    for length in (lengths[0], lengths[2]):
        runs[length] = [run(shared[length], sizes, 1)]
    exchanges(runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
