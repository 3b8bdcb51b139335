"""Part 3: training runs that are killed, stopped or cannot write, and end like undisturbed ones when resumed."""

import errno
import os
import resource
import signal
import sys
from pathlib import Path

from anymamba.training.checkpoint.manifest import list_checkpoints
from anymamba.training.metrics.loggers import read_metrics
from tests.fuzz.child import Finding, run_in_child
from tests.training.cases import write_corpus
from tests.training.killing import OPERATIONS, trainer_for

SECONDS = 300.0
MODES = ("packed", "stream")
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EDQUOT": errno.EDQUOT, "EACCES": errno.EACCES}


def prepare(directory):
    """Write text, and finish one undisturbed run per mode."""
    os.fsync = lambda descriptor: None  # no case needs to survive a power cut
    write_corpus(directory / "corpus")
    for mode in MODES:
        run_in_child(_train, directory / mode, mode, None, seconds=SECONDS)


def make(rng, prepared):
    """Draw a case: a mode, and one to three faults, one after another."""
    return {"mode": rng.choice(MODES), "faults": [_fault(rng) for _ in range(rng.choice([1, 2, 3]))]}


def _fault(rng):
    at = rng.randrange(80)
    return rng.choice(
        [
            {"how": "kill", "at": at},
            {"how": "stop", "at": at},
            {"how": "fail", "at": at, "error": rng.choice(list(ERRORS))},
            {"how": "fail", "at": at, "error": rng.choice(list(ERRORS))},
            {"how": "full", "at": at, "bytes": rng.choice([0, 1, 100, 1000, 10_000, 50_000])},
        ]
    )


def simpler(case):
    """Yield simpler cases: one fault less."""
    for i in range(len(case["faults"])):
        if len(case["faults"]) > 1:
            yield {**case, "faults": case["faults"][:i] + case["faults"][i + 1 :]}


def run(case, prepared, directory):
    """Let every fault happen, then finish the run and compare it with the undisturbed one."""
    run_directory = directory / "run"
    (directory / "corpus").symlink_to(prepared / "corpus")
    ends = [_run_with_fault(run_directory, case["mode"], fault) for fault in case["faults"]]
    if run_in_child(_train, run_directory, case["mode"], None, seconds=SECONDS / 4) != "finished":
        raise Finding(f"the run was not finished after {ends}")
    _check_same(prepared / case["mode"], run_directory)
    return "the same"


def _run_with_fault(directory, mode, fault):
    """Run until a fault, and return how the run ended."""
    try:
        return run_in_child(_train, directory, mode, fault, seconds=SECONDS / 4)
    except Finding as finding:
        # Before the first step there is nothing to save, and a signal ends the process as any other.
        if {"kill": "SIGKILL", "stop": "SIGTERM"}.get(fault["how"], "none") not in str(finding):
            raise
        return "killed"


def _train(directory, mode, fault):
    """Begin or resume a run in a child, with a fault at the n-th operation on the file system."""
    left = None if fault is None else fault["at"]

    def count(event, arguments):
        nonlocal left
        if left is None or event not in OPERATIONS or str(directory) not in str(arguments[0]):
            return
        left -= 1
        if left < 0:
            left = None
            _happen(fault)

    sys.addaudithook(count)
    try:
        return "finished" if trainer_for(Path(directory), mode).run() else "stopped"
    except (OSError, ValueError) as error:
        if "\n" in str(error) or not str(error):
            raise Finding(f"failed in more than one line: {type(error).__name__}: {str(error)[:300]!r}") from error
        if fault is None:
            raise Finding(f"failed without a fault: {str(error)[:300]}") from error
        return "failed"


def _happen(fault):
    if fault["how"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault["how"] == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
    if fault["how"] == "fail":
        number = ERRORS[fault["error"]]
        raise OSError(number, os.strerror(number))
    if fault["how"] == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault["bytes"], resource.RLIM_INFINITY))


def _check_same(whole, run_directory):
    latest, expected = (list_checkpoints(path / "checkpoints")[0] for path in (run_directory, whole))
    names = sorted(path.name for path in expected.iterdir())
    if latest.name != expected.name or sorted(path.name for path in latest.iterdir()) != names:
        raise Finding(f"the last checkpoint is {latest.name} with {sorted(p.name for p in latest.iterdir())}")
    for name in names:
        if name.endswith(".safetensors") and (latest / name).read_bytes() != (expected / name).read_bytes():
            raise Finding(f"{name} of the last checkpoint differs from that of the undisturbed run")
    rows, others = (
        [(row.step, row.loss, row.evaluation) for row in read_metrics(path / "metrics.csv")]
        for path in (run_directory, whole)
    )
    if rows != others:
        raise Finding(f"metrics.csv differs: {len(rows)} rows, expected {len(others)}")
    if left := [path.name for path in (run_directory / "checkpoints").glob(".*")]:
        raise Finding(f"files are left over: {left}")
