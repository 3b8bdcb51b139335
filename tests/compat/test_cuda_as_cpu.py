"""Scripts that know no other device than CUDA, on a CPU."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anymamba import compat
from anymamba.compat import cuda_as_cpu

SCRIPTS = sorted((Path(__file__).parent / "cuda_scripts").glob("*.py"))
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
NOTE = 'anymamba.compat: cuda means cpu in this process: .cuda(), device="cuda", torch.cuda\n'
needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def run(script, *options):
    command = [sys.executable, "-m", "anymamba.compat", *options, str(script)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=ONE_THREAD)


@needs_no_cuda
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_with_hard_coded_devices_run_unchanged(script):
    assert "anymamba" not in script.read_text()
    result = run(script, "--cuda-as-cpu")
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("done\n")
    assert result.stderr.count(NOTE) == 1


@needs_no_cuda
def test_it_is_off_unless_asked():
    result = run(SCRIPTS[0])
    assert result.returncode != 0
    assert "cuda means cpu" not in result.stderr


def names_of(owner):
    return dict(vars(owner))


@needs_no_cuda
def test_it_leaves_torch_as_it_was(capsys):
    owners = (
        *(torch, torch.cuda, torch.cuda.nvtx, torch.fft, torch.jit, torch.serialization, torch.Tensor, torch.nn.Module),
        *(torch.amp.GradScaler, torch.amp.autocast_mode.autocast, torch.utils._device.DeviceContext),
    )
    before = [names_of(owner) for owner in owners]
    compat.install(cuda_as_cpu=True)
    compat.install()
    x = torch.zeros(2, device="cuda")
    assert x.is_cuda
    assert names_of(torch.cuda) != before[1]
    compat.uninstall()
    assert capsys.readouterr().err == NOTE
    assert [names_of(owner) for owner in owners] == before
    assert not x.is_cuda
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")
    compat.uninstall()


@needs_no_cuda
def test_devices_that_are_not_cuda_are_kept(tmp_path):
    torch.save(torch.ones(2), tmp_path / "x.pt")
    compat.install(cuda_as_cpu=True)
    try:
        assert torch.load(tmp_path / "x.pt", map_location="meta").is_meta
        for location in (None, "cuda", {"cpu": "cuda:1"}, lambda storage, place: storage.cuda()):
            assert torch.load(tmp_path / "x.pt", map_location=location).tolist() == [1, 1]
        assert torch.empty(2, device="meta").device.type == "meta"
        assert torch.zeros(2).to("meta").device.type == "meta"
        assert torch.nn.Linear(2, 2).to("meta").weight.is_meta
        assert torch.zeros(2).to(torch.float64).to(torch.zeros(1, dtype=torch.int8)).dtype == torch.int8
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.nn.Linear(2, 2)(torch.zeros(1, 2)).dtype == torch.bfloat16
        assert copy.deepcopy(torch.zeros(2)).tolist() == [0, 0]
        assert isinstance(torch.default_generator, torch.Generator)
    finally:
        compat.uninstall()


def test_a_machine_with_a_cuda_device_needs_no_stand_in_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        RuntimeError, match=r"machines without a CUDA device, and this one has 2; CUDA_VISIBLE_DEVICES="
    ):
        compat.install(cuda_as_cpu=True)
    assert "mamba_ssm" not in sys.modules
    assert not cuda_as_cpu._replaced
