"""Runs cases that need several processes, many of them in one process group, on loopback.

A test module lists functions of `rank` in `RANK_CASES`, by the number of processes and a name. They run in a separate
process, which is forked once for each rank; a case fails if it fails on any rank.

    python -m tests.ranks MODULE SIZE
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 60  # the longest that a message may take
DIRECTORY = "ANYMAMBA_TEST_DIRECTORY"  # names the directory that the ranks share


def shared_directory(name):
    """Return a directory for a case, the same on every rank."""
    return Path(os.environ[DIRECTORY]) / name


def run_cases(module, size):
    """Return the error of each case of a module by name; empty for a case that passed."""
    command = [sys.executable, "-m", "tests.ranks", module, str(size)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def run_rank(cases, rank, size, directory):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{directory}/store", size), rank=rank, world_size=size,
        timeout=timedelta(seconds=SECONDS),
    )  # fmt: skip
    os.environ[DIRECTORY] = directory
    os.fsync = lambda descriptor: None  # no test needs to survive a power cut
    errors = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        try:
            case(rank)
            errors[name] = ""
        except BaseException:
            errors[name] = f"rank {rank}: {traceback.format_exc()}"
            break  # the others wait for a message that will not come
    Path(directory, f"{rank}.json").write_text(json.dumps(errors))


def main(module, size):
    size = int(size)
    cases = importlib.import_module(module).RANK_CASES[size]
    with tempfile.TemporaryDirectory() as directory:
        ranks = []
        for rank in range(size):
            ranks.append(os.fork())
            if not ranks[-1]:
                try:
                    os.dup2(2, 1)
                    run_rank(cases, rank, size, directory)
                finally:
                    os._exit(0)
        for process in ranks:
            os.waitpid(process, 0)
        files = [Path(directory, f"{rank}.json") for rank in range(size)]
        errors_by_rank = [json.loads(file.read_text()) if file.is_file() else {} for file in files]
    print(
        json.dumps(
            {
                name: "\n".join(filter(None, (errors.get(name, "not run") for errors in errors_by_rank)))
                for name in cases
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
