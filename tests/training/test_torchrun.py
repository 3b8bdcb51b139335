"""A worker that dies: torchrun starts all of them again, and the run ends as if nothing had happened."""

import json
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread
from time import sleep

import pytest
from torch.distributed import HashStore

from anymamba.training import TrainingConfig, parallel, train
from anymamba.training.checkpoint import checkpoints
from tests.training.cases import tiny, write_corpus

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")


def worker(directory, config):
    """Train twice, the second time killed after step 3; what torchrun runs."""
    os.fsync = lambda descriptor: None
    config = TrainingConfig.from_dict(json.loads(Path(config).read_text()))
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first_life:
        train(config, Path(directory) / "whole", report=str)

    def die(row):
        if row.step == 3 and first_life:
            os.kill(os.getpid(), signal.SIGKILL)

    train(config, Path(directory) / "killed", callbacks=[die], report=str)


def test_workers_that_are_started_again_meet_whoever_comes_first():
    """A store still has what the workers said before they were started again."""
    store, names = HashStore(), []
    for first in (0, 1, 0):
        heard = queue.Queue()
        for rank in (first, 1 - first):
            # A daemon: the process does not wait for one that waits for ever.
            Thread(
                target=lambda rank, heard: heard.put(parallel._start(store, rank, 2)), args=(rank, heard), daemon=True
            ).start()
            sleep(0.1)
        one, other = heard.get(timeout=20), heard.get(timeout=20)
        assert one == other
        names.append(one)
    assert len(set(names)) == 3


def test_a_killed_worker_is_started_again_and_the_run_ends_in_the_same_bits(tmp_path):
    config = tiny(
        write_corpus(tmp_path / "corpus"),
        data={"mode": "stream"},
        parallel={"context": 2},
        schedule={"steps": 5},
        evaluation={"every": 0, "sample_tokens": 0},
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += ["--max-restarts", "1", "-m", "tests.training.test_torchrun", tmp_path, tmp_path / "config.json"]
    done = subprocess.run(
        launch, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    (whole, *_), (killed, *_) = (checkpoints(tmp_path / name / "checkpoints") for name in ("whole", "killed"))
    assert whole.name == killed.name == "step-00000005"
    for path in whole.glob("*.safetensors"):
        assert path.read_bytes() == (killed / path.name).read_bytes(), path.name


if __name__ == "__main__":
    worker(*sys.argv[1:])
