"""torchrun restarts a rank that dies; a rank that hangs, or the loss of the launcher, ends the run."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

import pytest
from torch.distributed import HashStore

from anymamba.training.api import open_run
from anymamba.training.checkpoint.manifest import list_checkpoints
from anymamba.training.distributed import process_group
from tests.training.cases import tiny, write_corpus
from tests.training.kills import attempt

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")


def test_restarted_ranks_meet_in_any_order():
    """The store still has the messages from before the restart."""
    store, names = HashStore(), []
    for first in (0, 1, 0):
        heard = queue.Queue()
        for rank in (first, 1 - first):
            # A daemon: the process does not wait for one that never returns.
            Thread(
                target=lambda rank, heard: heard.put(process_group._agree_on_launch_id(store, rank, 2)),
                args=(rank, heard),
                daemon=True,
            ).start()
            sleep(0.1)
        one, other = heard.get(timeout=20), heard.get(timeout=20)
        assert one == other
        names.append(one)
    assert len(set(names)) == 3


def test_killed_ranks_are_restarted_and_the_run_ends_in_the_same_bits(tmp_path):
    """One is killed while it writes its part of a checkpoint, the other when it gives the checkpoint its name."""
    own_rows = r"open checkpoints/\.step-00000004\.[\d-]+\.tmp/\.optimizer-00002-of-00002\.safetensors\..*"
    its_name = r"os\.rename checkpoints/\.step-00000008\.[\d-]+\.tmp"
    plan = [(1, "named", own_rows, 0.01), (0, "named", its_name, 0.01)]
    corpus = write_corpus(tmp_path / "corpus")
    deaths = attempt(tmp_path / "run", tmp_path / "whole", corpus, "shard", plan)
    assert [death["saving"] for death in deaths] == [True, True]


class Launched:
    """A run of two ranks, started by torchrun, that would never end."""

    def __init__(self, directory, timeout):
        config = tiny(
            write_corpus(directory / "corpus"),
            parallel={"shard": 2, "timeout": timeout},
            schedule={"steps": 10**6},
            evaluation={"every": 0},
            checkpoints={"every": 10},
        )
        (directory / "config.toml").write_text(tables(config.to_dict()))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        launch += ["-m", "anymamba", "train", directory / "config.toml", "--out", directory / "run"]
        self.output = directory / "output.txt"
        self.checkpoints = directory / "run/checkpoints"
        with self.output.open("w") as file:
            self.agent = subprocess.Popen(launch, stdout=file, stderr=file, cwd=Path(__file__).parents[2])

    def __enter__(self):
        self.world = []
        try:
            self.until(lambda: any(int(path.name[5:]) >= 20 for path in list_checkpoints(self.checkpoints)))
            self.world = children(self.agent.pid)
            assert len(self.world) == 2
        except BaseException:
            self.world = children(self.agent.pid)
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in (*self.world, self.agent.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.agent.wait()

    def until(self, holds):
        end = monotonic() + 300
        while not holds():
            assert monotonic() < end, self.output.read_text()
            sleep(0.1)

    def lines(self):
        return [line for line in self.output.read_text().splitlines() if line.startswith("anymamba: ")]


def children(process):
    """Return the live children of a process, in the order of their ranks."""
    pids = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ranks = {pid: dict(x.partition("=")[::2] for x in environment(pid)).get("RANK") for pid in pids}
    return [int(pid) for pid in sorted(pids, key=lambda pid: ranks[pid] or "") if ranks[pid]]


def environment(process):
    return Path(f"/proc/{process}/environ").read_text().split("\0")


def is_alive(process):
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX"


def tables(values):
    """Format tables as TOML."""
    lines = [f"{name} = {json.dumps(x)}" for name, x in values.items() if not isinstance(x, dict) and x is not None]
    for name, section in values.items():
        if isinstance(section, dict):
            lines += [f"[{name}]", *(f"{key} = {json.dumps(x)}" for key, x in section.items() if x is not None)]
    return "\n".join(lines)


def check_whole(launched, tmp_path):
    """Assert that a failed run leaves a good checkpoint, from which one process continues."""
    trainer = open_run(tmp_path / "run", {"parallel.shard": "1"}, pytest.fail)
    assert trainer.step >= 20


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_a_rank_that_hangs_is_named_with_what_the_others_wait_for(tmp_path):
    with Launched(tmp_path, timeout=20) as launched:
        os.kill(launched.world[1], signal.SIGSTOP)
        launched.until(launched.lines)
        assert re.match(
            r"anymamba: rank 0 of 2 waited 20 s to .* \(parallel.timeout\); no answer from rank 1 ",
            launched.lines()[0],
        ), launched.lines()
        launched.until(lambda: not is_alive(launched.world[0]))
    check_whole(launched, tmp_path)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_ranks_without_a_launcher_end_with_one_line(tmp_path):
    with Launched(tmp_path, timeout=60) as launched:
        launched.agent.kill()
        launched.until(lambda: not any(map(is_alive, launched.world)))
        assert any("lost connection to the torchrun store" in x for x in launched.lines())
        assert "Traceback" not in launched.output.read_text()
    check_whole(launched, tmp_path)
