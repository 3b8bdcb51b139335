"""`anymamba eval` on several ranks prints what one process does, and reports errors once."""

import functools
import io
import os
import re
import subprocess
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from anymamba.cli.evaluate import _assign_texts
from anymamba.cli.main import main
from anymamba.core.context_parallel import ContextParallelGroup
from anymamba.generation.scoring import score_text
from tests.models.cases import FAMILIES, small_lm
from tests.ranks import run_cases, shared_directory

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")

# Lengths of texts: some are shared because they are long, and two are too short for anything.
TEXTS = {
    "several": [900, 700, 1, 400, 30, 0, 650],
    "one is long": [9000, 300, 200],
    "one": [5000],
    "one is short": [5],
}


def write_texts(directory, lengths):
    """Write files of words, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, length in enumerate(lengths):
        words = [f"word{i * i % (number + 7)}\n" for i in range(length)]
        (directory / f"{number}.txt").write_text("".join(words)[:length])
    return [directory / f"{number}.txt" for number in range(len(lengths))]


def save_model(directory):
    small_lm("Mamba2", vocab_size=256, pad_vocab_size_multiple=1).save_pretrained(directory)
    return directory


def run_eval(rank, size, *arguments):
    """Run `anymamba eval` as this rank; return the exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size)})
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["eval", *map(str, arguments)])
    return code, out.getvalue(), err.getvalue()


def assert_same_output(actual, expected):
    """Compare word for word, and numbers to float error: a shared text is cut elsewhere."""
    assert len(actual.splitlines()) == len(expected.splitlines())
    for word, expected_word in zip(actual.split(), expected.split(), strict=True):
        if re.fullmatch(r"\d+\.\d{4}", expected_word):
            assert float(word) == pytest.approx(float(expected_word), rel=1e-5, abs=1.1e-4)
        else:
            assert word == expected_word


@contextmanager
def chdir(directory):
    """Change the working directory during the block."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def prepare(rank, name):
    """Write a model, and the files of one of the `TEXTS`; return their paths."""
    directory = shared_directory(name)
    if rank == 0:
        save_model(directory / "model")
        write_texts(directory, TEXTS[name])
    dist.barrier()
    return [directory / "model", *(directory / f"{number}.txt" for number in range(len(TEXTS[name])))]


def output_case(rank, name):
    """Check that the first rank prints what one process does, and the others nothing."""
    arguments = prepare(rank, name)
    code, out, err = run_eval(rank, dist.get_world_size(), *arguments)
    expected = run_eval(0, 1, *arguments)
    assert code == 0
    assert_same_output(out, expected[1] if rank == 0 else "")
    assert err.count("tokens/s") == err.count("\n") == (rank == 0)


def likelihood_case(rank, family):
    """Check that the losses of the ranks' parts add up to that of the text for any cuts; every rank has a part."""
    model = small_lm(family, dtype=torch.float64)
    size = dist.get_world_size()
    cp_group = ContextParallelGroup(list(range(size)), rank)
    for length in (1, 2, 3 * size, 97):
        ids = torch.randint(61, (length,)).tolist()
        *_, expected = score_text(model, [ids])
        for segment_len in (5, 20):
            *_, likelihood = score_text(model, [ids[:9], ids[9:]], segment_len, cp_group)
            assert (likelihood.predicted, likelihood.read) == (length - 1, length)
            nats = torch.tensor([likelihood.nats, float(likelihood.nats > 0)], dtype=torch.float64)
            dist.all_reduce(nats)
            assert nats[0].item() == pytest.approx(expected.nats, rel=1e-10)
            if length > 90 and segment_len == 20:
                assert nats[1] == size


def mistake_case(rank):
    """Check that an error is one line on the first rank, and exit code 2 on all."""
    model, *_ = prepare(rank, "one")
    directory = shared_directory("mistakes")
    if rank == 0:
        (directory / "empty").mkdir(parents=True)
        (directory / "short").write_text("x")
    dist.barrier()
    for arguments, words in (
        ([model, directory / "none"], "none: no such file or directory"),
        ([model, directory / "empty"], "no text files there"),
        ([model, directory / "short"], "expected a text of at least two tokens, got 1"),
        ([model, "/dev/null"], "/dev/null: not a file, which several ranks could read"),
        ([directory / "nothing", directory / "short"], "nothing"),
        ([model, directory / "short", "--threads", "0"], "--threads must be at least 1, got 0"),
    ):
        code, out, err = run_eval(rank, dist.get_world_size(), *arguments)
        assert (code, out) == (2, "")
        assert err.count("\n") == (rank == 0)
        assert rank or words in err, err


def other_texts_case(rank):
    """Check that all ranks reject a text that differs or is missing on one rank, no matter which one would score it."""
    last = dist.get_world_size() - 1
    model, *texts = prepare(rank, "several")
    for number, change in enumerate((lambda text: text.swapcase(), lambda text: text + "more", None)):
        directory = shared_directory(f"texts of {rank if rank == last else 'the others'} {number}")
        if rank in (0, last):
            directory.mkdir()
            for path in texts:
                (directory / path.name).write_text(path.read_text())
        if rank == last:
            other = directory / texts[1].name
            other.unlink() if change is None else other.write_text(change(other.read_text()))
        dist.barrier()
        with chdir(directory):
            code, out, err = run_eval(rank, last + 1, model, *(path.name for path in texts))
        assert (code, out) == (2, "")
        assert err.count("\n") == (rank == 0)
        assert rank or f"rank {last} of {last + 1}: 1.txt: every rank must see the same text" in err, err


RANK_CASES = {
    size: {
        **{f"output, {name}": functools.partial(output_case, name=name) for name in TEXTS},
        **{f"likelihood, {family}": functools.partial(likelihood_case, family=family) for family in FAMILIES},
        "mistakes": mistake_case,
        "other texts": other_texts_case,
    }
    for size in (2, 3)
}


@functools.cache
def heard(size):
    return run_cases(__name__, size)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in RANK_CASES.items() for name in cases])
def test_workers_score_as_one_does(size, name):
    assert not heard(size)[name], heard(size)[name]


def test_torchrun_prints_what_one_process_does(tmp_path):
    files = write_texts(tmp_path / "texts", TEXTS["one is long"])
    command = [sys.executable, "-m", "anymamba", "eval", save_model(tmp_path / "model"), *files]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command[1:]]
    done = [
        subprocess.run(line, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], timeout=600)
        for line in (command, launch)
    ]
    assert [run.returncode for run in done] == [0, 0], done[1].stderr
    assert_same_output(done[1].stdout, done[0].stdout)


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([5], 1, [0]),
        ([5], 2, [None]),
        ([0, 0], 2, [0, 0]),
        ([5, 5], 2, [0, 1]),
        ([3, 9, 4], 2, [1, None, 0]),
        ([2, 7, 3, 4], 2, [0, 0, 1, 1]),
    ],
)
def test_the_largest_texts_are_shared_and_the_others_go_to_the_rank_with_the_least(sizes, count, expected):
    assert _assign_texts(sizes, count) == expected
