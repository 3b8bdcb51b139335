"""The command sets how threads wait before libgomp is loaded; the number of threads follows the limits."""

import os
import subprocess
import sys

import pytest
import torch

import anymamba
from anymamba.core.available_cores import CoreLimit, available_cores
from anymamba.core.threads import SPIN_COUNT, choose_thread_count, describe_waiting, set_spin_count

VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
QUOTA = CoreLimit(2, "a quota of 1.5 cores")


@pytest.fixture
def set_num_threads(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def run_info(*start, cores=None, **variables):
    """Start Python with these arguments; return what `anymamba info` prints, and what libgomp says that it has read."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"OMP_DISPLAY_ENV": "verbose", **variables}
    restrict = None if cores is None else lambda: os.sched_setaffinity(0, cores)
    done = subprocess.run(
        [sys.executable, *start], env=environment, preexec_fn=restrict, capture_output=True, text=True, check=True
    )
    libgomp = {}
    for line in done.stderr.splitlines():
        name, equals, value = line.partition(" = ")
        if equals:
            libgomp.setdefault(name.split()[-1], value.strip("'"))
    if "GOMP_SPINCOUNT" not in libgomp:
        pytest.skip("torch does not use libgomp")
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines()), libgomp


def test_the_command_sets_the_spin_count_before_libgomp_is_loaded():
    """torchrun starts its workers in this way."""
    table, libgomp = run_info("-u", "-m", "anymamba", "info")
    assert libgomp["GOMP_SPINCOUNT"] == str(SPIN_COUNT)
    assert table["waiting"].startswith(f"GOMP_SPINCOUNT={SPIN_COUNT}")
    assert "advice" not in table


@pytest.mark.parametrize(
    ("variables", "spin_count", "waiting"),
    [
        ({"GOMP_SPINCOUNT": "1000"}, "1000", "GOMP_SPINCOUNT=1000"),
        ({"OMP_WAIT_POLICY": "active"}, "30000000000", "OMP_WAIT_POLICY=active"),
    ],
)
def test_settings_of_the_user_win(variables, spin_count, waiting):
    table, libgomp = run_info("-m", "anymamba", "info", **variables, OMP_NUM_THREADS="1")
    assert libgomp["GOMP_SPINCOUNT"] == spin_count
    assert table["waiting"] == waiting
    assert table["threads"] == "1: OMP_NUM_THREADS=1 in the environment"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_too_late_there_is_advice_and_the_number_still_follows_the_affinity():
    code = "import torch; torch.set_num_threads(5); from anymamba.cli.main import main; main(['info'])"
    table, libgomp = run_info("-c", code, cores={min(os.sched_getaffinity(0))})
    assert libgomp["GOMP_SPINCOUNT"] != str(SPIN_COUNT)
    assert table["waiting"] == "threads spin for milliseconds, then sleep"
    assert f"GOMP_SPINCOUNT={SPIN_COUNT}" in table["advice"]
    assert table["threads"].startswith("1: ")


def test_nothing_is_set_once_torch_is_imported():
    environment = {}
    assert not set_spin_count(environment)
    assert environment == {}


def test_the_number_is_only_lowered(set_num_threads):
    limit = available_cores().threads
    for count in (1, limit, limit + 3):
        set_num_threads(count)
        settings = anymamba.configure_threads()
        assert settings.threads == torch.get_num_threads() == min(count, limit)


@pytest.mark.parametrize(
    ("count", "environment", "expected"),
    [
        (4, {}, (2, "a quota of 1.5 cores")),
        (2, {"OMP_NUM_THREADS": ""}, (2, "a quota of 1.5 cores")),
        (1, {}, (1, "torch's setting, below the limit of 2 (a quota of 1.5 cores)")),
        (4, {"OMP_NUM_THREADS": "4"}, (4, "OMP_NUM_THREADS=4 in the environment")),
        (4, {"MKL_NUM_THREADS": "4"}, (4, "MKL_NUM_THREADS=4 in the environment")),
    ],
)
def test_a_quota_lowers_the_number_unless_the_environment_sets_it(count, environment, expected):
    assert choose_thread_count(count, QUOTA, environment) == expected


def test_there_is_no_advice_for_another_library():
    assert describe_waiting({}, uses_libgomp=False) == ("as torch's library of threads does", "")
