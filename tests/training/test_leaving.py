"""Ranks exit without an abort: no thread of gloo outlives the process group."""

import importlib
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from anymamba.training.distributed import process_group

ROOT = Path(__file__).parents[2]


def worker():
    """Exchange something, with FSDP's modules imported meanwhile, and leave; torchrun runs this."""
    world = process_group.init_distributed()
    importlib.import_module("torch.distributed.fsdp")  # which imports much of torch.distributed

    world.all_reduce_sum(torch.zeros(3))
    assert any("gloo" in name for name in threads())
    process_group._leave()
    assert not any("gloo" in name for name in threads()), threads()


def threads():
    """Return the names of this process's threads, without those that end meanwhile."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            names.append((task / "comm").read_text())
    return names


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs the names of threads")
def test_no_thread_of_gloo_is_left():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launch, "-m", __name__], capture_output=True, text=True, check=False, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    worker()
