"""The fuzzer itself: it repeats what it drew, finds planted errors, and prints how to reproduce them."""

import json
import os
import random
import re
import shlex
import signal
import sys

import pytest
import torch

if not sys.platform.startswith("linux"):
    pytest.skip("the fuzzer forks, and limits the memory of its children", allow_module_level=True)

from tests.fuzz import __main__ as fuzzer
from tests.fuzz import calls, files, runs
from tests.fuzz.child import Finding, run_in_child
from tests.fuzz.mutations import TENSORS, VALUES, apply, draw


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("prepared")
    files.prepare(directory)
    return directory


@pytest.mark.parametrize("part", [files, calls, runs], ids=lambda part: part.__name__)
def test_cases_are_drawn_from_the_seed_and_survive_being_printed(part, prepared):
    for number in range(50):
        case, again = (part.make(random.Random(f"7 {number}"), prepared) for _ in range(2))
        assert case == again == json.loads(json.dumps(case))
        assert all(simpler != case for simpler in part.simpler(case))


def test_every_kind_of_case_comes_up(prepared):
    cases = [files.make(random.Random(i), prepared) for i in range(600)]
    assert {case["target"] for case in cases} == set(files.TARGETS)
    mutations = [mutation for case in cases for mutation in case["mutations"]]
    assert {m["value"] for m in mutations if "value" in m} == set(VALUES)
    assert {m["what"] for m in mutations if m["how"] == "tensor"} > set(TENSORS)
    assert {m["how"] for m in mutations} >= {"flip", "write", "insert", "fill", "cut", "truncate", "copy", "pickle"}


def test_a_mutation_changes_what_it_says(prepared):
    content = (prepared / "model mamba2" / "config.json").read_bytes()
    changed = apply({"how": "replace", "in": "json", "path": ["n_layer"], "value": "10^400"}, content, "")
    assert json.loads(changed) == {**json.loads(content), "n_layer": 10**400}
    dropped = apply({"how": "drop", "in": "json", "path": ["ssm_cfg", "layer"]}, content, "")
    assert "layer" not in json.loads(dropped)["ssm_cfg"]
    assert apply({"how": "flip", "at": 0, "bit": 0}, b"ab", "") == b"`b"
    rng = random.Random(1)
    assert sum(apply(draw(rng, content, "json"), content, "") != content for _ in range(50)) > 40


@pytest.mark.usefixtures("unchecked")
def test_a_few_cases_of_each_part_find_nothing(capsys, monkeypatch):
    monkeypatch.setattr(os, "fsync", os.fsync)  # which a part replaces
    assert fuzzer.main(["--seed", "1", "--cases", "8", "--part", "files", "--part", "calls"]) == 0
    assert fuzzer.main(["--seed", "1", "--cases", "1", "--part", "runs"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"files: 8 cases .*\d+ rejected", out)
    assert re.search(r"calls: 8 cases .*: .*\d+ right", out)
    assert re.search(r"runs: 1 cases .*: 1 the same", out)


def test_what_is_planted_is_found_and_repeated(capsys, monkeypatch):
    def broken(directory):
        raise KeyError("planted")

    monkeypatch.setattr(files, "TARGETS", {"texts": (broken, ())})
    assert fuzzer.main(["--seed", "1", "--cases", "3", "--part", "files"]) == 1
    out = capsys.readouterr().out
    assert out.count("FOUND in files, case 0 of seed 1: KeyError: 'planted'") == 1
    assert "3 found" in out
    (repeat,) = re.findall("repeat: python -m tests.fuzz (--repeat .*)", out)
    with pytest.raises(KeyError, match="planted"):
        fuzzer.main(shlex.split(repeat))
    case = json.loads(shlex.split(repeat)[1].partition(" ")[2])
    assert len(case["mutations"]) == 1
    assert not case["signed"]


def test_a_wrong_value_is_found(monkeypatch):
    case = {**calls.make(random.Random(3), None), "call": "scan", "wrong": None, "dtype": "float64", "bounds": None}
    case |= {"h": 2, "g": 1, "p": 3, "n": 2, "r": 1, "t": 5, "decay": 1.0, "algorithm": "fastest", "skip": None}
    assert calls.run(case, None, None) == "right"
    right = calls.scan
    monkeypatch.setattr(calls, "scan", lambda *a, **k: (right(*a, **k)[0] * (1 + 1e-7), right(*a, **k)[1]))
    with pytest.raises(Finding, match=r"y is 1.0e-07 away from the recurrence in float64"):
        calls.run(case, None, None)


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "crashed: the process died of SIGSEGV"),
        (lambda: os._exit(3), "crashed: the process died of status 3"),
        (lambda: signal.pause(), "hung: it was not done after 1 seconds"),
        (lambda: os.system("true"), "ran code: os.system"),
        (lambda: torch.empty(2**33).sum(), "can't allocate memory"),
        (lambda: [][1], r"IndexError: list index out of range\n +in .*test_fuzz.py"),
    ],
    ids=["crash", "exit", "hang", "code", "memory", "exception"],
)
def test_every_way_to_end_is_seen(ending, message):
    with pytest.raises(Finding, match=message):
        run_in_child(ending, seconds=1.0)
    assert run_in_child(lambda: [1, "x"]) == [1, "x"]
