"""Runs that are killed: a process that forks a trainer again and again and kills it with SIGKILL.

A trainer kills itself at its n-th operation on the file system, which more often than not is part of a save or of
tokenizing, or its parent kills it after a random time, which may be anywhere.

    python -m tests.training.killing DIRECTORY SEED MODE KILLS
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

# Here, so that no trainer has to import them.
import torch
import torch._dynamo

from anymamba.training.api import create_run, open_run
from anymamba.training.checkpoint.manifest import list_checkpoints
from tests.training.cases import draw_nothing, silent, tiny, write_corpus
from tests.training.test_tabular import config_of, write_files

OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}


def trainer_for(directory, mode):
    if mode == "files":
        if list_checkpoints(directory / "checkpoints"):
            return open_run(directory, {}, silent)
        return create_run(config_of(directory.parent / "corpus", "masked-lm"), directory, silent)
    if list_checkpoints(directory / "checkpoints"):
        return open_run(directory, {}, silent)
    config = tiny(
        directory.parent / "corpus",
        data={"mode": mode, "shard_tokens": 900},
        batch={"accumulation": 2},
        schedule={"steps": 10},
        evaluation={"every": 5, "sample_tokens": 0},
        checkpoints={"every": 2},
    )
    return create_run(config, directory, silent)


def child(directory, mode, operations):
    """Run to the end, or until a number of operations on the file system; never return."""
    left = operations

    def count(event, arguments):
        nonlocal left
        if left is not None and event in OPERATIONS and str(directory) in str(arguments[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    os._exit(0 if trainer_for(directory, mode).run() else 3)


def attempt(directory, mode, operations=None, seconds=None):
    """Fork a trainer; return how it ended."""
    process = os.fork()
    if not process:
        try:
            child(directory, mode, operations)
        finally:
            os._exit(4)
    timer = threading.Timer(1e3 if seconds is None else seconds, os.kill, (process, signal.SIGKILL))
    timer.start()
    status = os.waitpid(process, 0)[1]
    timer.cancel()
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def main(directory, seed, mode, kills):
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None
    draw_nothing()
    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    directory, chance = Path(directory), random.Random(int(seed))
    write_corpus(directory / "corpus")
    if mode == "files":
        write_files(directory / "corpus")
    began = time.perf_counter()
    assert attempt(directory / "whole", mode) == 0
    took = time.perf_counter() - began
    ends = []
    while ends.count(-9) < int(kills):
        target = directory / f"killed{len(ends):02d}"
        for _ in range(2):  # a run that has been killed once may be killed again while it resumes
            if len(ends) % 3 == 2:
                ends.append(attempt(target, mode, seconds=chance.uniform(0.05, took)))
            else:
                ends.append(attempt(target, mode, operations=chance.randrange(60)))
        ends.append(attempt(target, mode))
    print(json.dumps(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
