"""Runs of two ranks that are killed at random: torchrun restarts them, and they end as if nothing had happened.

A rank kills itself with SIGKILL: at its n-th operation on the file system, which more often than not is part of a
save, at an operation that is named, or after a random time, which may be anywhere. Saves are slowed down, so that steps
are taken meanwhile.

    python -m tests.training.kills --kills 20 --seed 1
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from anymamba.training import TrainingConfig, train
from anymamba.training.checkpoint import saver as saver_module
from anymamba.training.checkpoint.manifest import list_checkpoints
from anymamba.training.metrics.loggers import read_metrics
from tests.training.cases import draw_nothing, tiny, write_corpus
from tests.training.killing import OPERATIONS

MESHES = {"replicate": {"replicate": 2}, "shard": {"shard": 2}, "context": {"context": 2}}
RESTARTS = 4


def arm(directory, how, amount, slow, note):
    """Let this process kill itself and note where it was.

    Args:
        directory: Directory of the run, whose files count.
        how: One of "operation", "named" or "time".
        amount: Number of operations, a pattern of the operation and its file, or seconds.
        slow: Seconds that are added to each operation of a save.
        note: File for the note.
    """
    lock, left = threading.Lock(), amount

    def die(where):
        with lock:
            saving = any(thread.name == "checkpoint" for thread in threading.enumerate())
            note.write_text(json.dumps({"how": how, "where": where, "saving": saving}))
            os.kill(os.getpid(), signal.SIGKILL)

    def count(event, arguments):
        nonlocal left
        if event not in OPERATIONS or str(directory) not in str(arguments[0]):
            return
        if threading.current_thread().name == "checkpoint":
            time.sleep(slow)
        where = f"{event} {str(arguments[0]).partition(f'{directory}{os.sep}')[2]}"
        if how == "operation":
            left -= 1
        if (how == "operation" and left < 0) or (how == "named" and re.fullmatch(amount, where)):
            die(where)

    sys.addaudithook(count)
    if how == "time":
        timer = threading.Timer(amount, die, ("after a time",))
        timer.daemon = True
        timer.start()


def worker(directory, whole):
    """Train undisturbed into `whole`, unless it exists, and then into `directory`/run; torchrun runs this."""
    os.fsync = lambda descriptor: None
    saver_module._PATIENCE_S = 2.0  # a rank that was killed never responds
    draw_nothing()
    directory, whole, life = Path(directory), Path(whole), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    config = TrainingConfig.from_dict(json.loads((directory / "config.json").read_text()))
    plan = json.loads((directory / "plan.json").read_text())
    if life == 0 and not (whole / "model.safetensors").exists():
        began = time.perf_counter()
        train(config, whole, report=str)
        (whole / "seconds.json").write_text(json.dumps(time.perf_counter() - began))
    rank, how, amount, slow = plan[life] if life < len(plan) else (-1, "", 0, 0.0)
    if rank == int(os.environ["RANK"]):
        amount = amount * json.loads((whole / "seconds.json").read_text()) if how == "time" else amount
        arm(directory / "run", how, amount, slow, directory / f"killed-{life}.json")
    train(config, directory / "run", report=str)


def attempt(directory, whole, corpus, mesh, plan):
    """Train on a mesh, with one kill in each life as planned; return where the ranks were killed."""
    directory.mkdir()
    config = tiny(
        corpus,
        data={"mode": "stream"},
        optimizer={"kind": "muon"},
        parallel={**MESHES[mesh], "timeout": 120},
        schedule={"steps": 14},
        evaluation={"every": 7, "sample_tokens": 0},
    )
    (directory / "config.json").write_text(json.dumps(config.to_dict()))
    (directory / "plan.json").write_text(json.dumps(plan))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += ["--max-restarts", str(len(plan)), "-m", "tests.training.kills", "--worker", directory, whole]
    done = subprocess.run(
        launch, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], timeout=900,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_same(directory / "run", whole)
    return [json.loads(file.read_text()) for file in sorted(directory.glob("killed-*.json"))]


def check_same(killed, whole):
    """Assert that a killed run leaves the same files as a whole one, byte for byte."""
    (latest, *_), (expected, *_) = (list_checkpoints(run / "checkpoints") for run in (killed, whole))
    assert latest.name == expected.name
    assert sorted(path.name for path in latest.iterdir()) == sorted(path.name for path in expected.iterdir())
    for path in [*expected.glob("*.safetensors"), whole / "model.safetensors"]:
        other = killed / path.relative_to(whole)
        assert path.read_bytes() == other.read_bytes(), other
    rows = [
        [(row.step, row.tokens, row.loss, row.evaluation) for row in read_metrics(run / "metrics.csv")]
        for run in (killed, whole)
    ]
    assert rows[0] == rows[1]
    assert not list((killed / "checkpoints").glob(".*"))


def draw_kills(chance, mesh):
    """Draw for each life which rank is killed, how, and when: at an operation, or after a fraction of a run's time."""
    kills = []
    for _ in range(RESTARTS):
        rank = chance.randrange(2)
        writes = rank == 0 or mesh == "shard"  # otherwise there are no operations to count
        how = chance.choice(["operation", "operation", "time"]) if writes else "time"
        amount = chance.randrange(60 if rank == 0 else 30) if how == "operation" else chance.uniform(0.0, 0.8)
        kills.append((rank, how, amount, chance.choice([0.0, 0.005, 0.02])))
    return kills


def main(kills, seed):
    """Kill as often as asked for; every run is compared with an undisturbed one on the same mesh."""
    chance, all_deaths = random.Random(seed), []
    with tempfile.TemporaryDirectory() as name:
        corpus, runs = write_corpus(Path(name) / "corpus"), 0
        while len(all_deaths) < kills:
            mesh = chance.choice(list(MESHES))
            whole = Path(name) / f"whole-{mesh}"
            deaths = attempt(Path(name) / f"run{runs}", whole, corpus, mesh, draw_kills(chance, mesh))
            runs += 1
            all_deaths += deaths
            print(f"{mesh}: {len(deaths)} kills, the same bytes; {len(all_deaths)} of {kills}", flush=True)
    saving = sum(death["saving"] for death in all_deaths)
    print(f"seed {seed}: {len(all_deaths)} kills in {runs} runs, {saving} of them while a checkpoint was being written")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--worker", nargs=2, default=None)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
    else:
        main(options.kills, random.randrange(10**6) if options.seed is None else options.seed)
