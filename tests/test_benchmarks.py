"""The parts of the benchmarks that a GPU needs, as far as they run without one."""

import itertools

import torch
from benchmarks.cli import main, without_missing_peers
from benchmarks.device import CPU, OnDevice, measure_peak_bytes, seconds
from benchmarks.gpu import CASES, draw_inputs
from benchmarks.mamba2 import TINY


def test_a_sample_is_the_time_of_all_calls_by_their_number():
    ticks, calls = itertools.count(step=6), []
    assert seconds(lambda: calls.append(1), 3, lambda: float(next(ticks))) == 2.0
    assert len(calls) == 3


def test_tensors_are_created_on_the_device_and_drawn_on_the_cpu():
    meta = torch.device("meta")
    with OnDevice(meta):
        inputs = draw_inputs(TINY)
        uniform = torch.empty(3).uniform_(1, 16, generator=torch.Generator())
    assert all(x.device == meta for part in inputs for x in part.values())
    assert uniform.device == meta
    with OnDevice(CPU):
        drawn = draw_inputs(TINY)
    for part, expected in zip(drawn, draw_inputs(TINY), strict=True):
        assert all(torch.equal(part[name], expected[name]) for name in expected)


def test_on_a_cpu_only_our_own_contenders_take_part():
    for case in CASES:
        assert {contender.library for contender in without_missing_peers(case, CPU).contenders} == {"anymamba"}
        assert measure_peak_bytes(case.contenders[0].tiny, CPU) is None


def test_the_cases_for_a_gpu_run_to_the_end_on_a_cpu(capsys):
    assert (
        main(["--device", "cpu", "--only", "gpu/conv/forward", "--repeats", "1", "--threads", "1", "--no-memory"]) == 0
    )
    out = capsys.readouterr().out
    assert "| gpu/conv/forward | anymamba" in out
    assert main(["--device", "mps:7", "--only", "gpu/conv/forward"]) == 2
    assert "--device mps:7: not available here" in capsys.readouterr().err
