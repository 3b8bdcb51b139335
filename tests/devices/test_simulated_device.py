"""Runs `on_simulated_device.py` in a process of its own: a device cannot be unregistered from torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this version of torch cannot simulate a device",
)
def test_everything_runs_on_a_simulated_device_without_making_the_host_wait():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/devices/on_simulated_device.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-5000:]
    assert "passed" in result.stdout
