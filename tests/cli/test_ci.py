import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from anymamba.kernels.cpu import bindings
from tests import conftest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(monkeypatch):
    """Return a function that starts a session of tests without built kernels, with only these variables of ours."""

    def start_ci(**environment):
        for name in [name for name in os.environ if name.startswith("ANYMAMBA_")]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(bindings, "LIBRARY", SimpleNamespace(handle=None, reason="not built"))
        conftest.pytest_sessionstart()

    return start_ci


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
def test_a_failed_build_of_the_kernels_fails_where_they_are_required():
    """In a session of its own, which runs no test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANYMAMBA_")}
    failed = {"ANYMAMBA_REQUIRE_KERNELS": "1", "ANYMAMBA_LIBRARY": "nowhere.so"}
    command = [sys.executable, "-m", "pytest", "--collect-only", "tests/generation/test_sampling.py"]
    done = subprocess.run(command, cwd=ROOT, env={**kept, **failed}, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "expected compiled kernels, as there is " in done.stderr
    assert "got none: ANYMAMBA_LIBRARY names nowhere.so, which does not exist" in done.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"ANYMAMBA_REQUIRE_KERNELS": "1", "ANYMAMBA_KERNELS": "off"},
        {"ANYMAMBA_REQUIRE_KERNELS": "1", "PATH": "", "CXX": ""},
    ],
    ids=["not required", "switched off", "no compiler"],
)
def test_missing_kernels_are_no_failure_otherwise(start, environment):
    start(**environment)


def test_a_missing_browser_fails_where_one_is_required(start):
    with pytest.raises(pytest.UsageError, match="expected a browser, as ANYMAMBA_REQUIRE_BROWSER asks for one, got"):
        start(ANYMAMBA_REQUIRE_BROWSER="1", PATH="")


def test_continuous_integration_requires_the_kernels_and_a_browser():
    script = (ROOT / ".ci" / "run").read_text()
    assert "export ANYMAMBA_REQUIRE_KERNELS=1\n" in script
    assert "export ANYMAMBA_REQUIRE_BROWSER=1\n" in script
    assert "install -y --no-install-recommends chromium" in script
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=False).returncode == 0
