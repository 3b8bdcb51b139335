import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAILED_BUILD = {"ANYMAMBA_LIBRARY": "nowhere.so"}


def collect(**environment):
    """Start a session of tests that runs none."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANYMAMBA_")}
    command = [sys.executable, "-m", "pytest", "--collect-only", "tests/generation/test_sampling.py"]
    return subprocess.run(command, cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
def test_a_failed_build_of_the_kernels_fails_where_they_are_required():
    done = collect(ANYMAMBA_REQUIRE_KERNELS="1", **FAILED_BUILD)
    assert done.returncode != 0
    assert "expected compiled kernels, as there is " in done.stderr
    assert "got none: ANYMAMBA_LIBRARY names nowhere.so, which does not exist" in done.stderr


@pytest.mark.parametrize(
    "environment",
    [
        FAILED_BUILD,
        {"ANYMAMBA_REQUIRE_KERNELS": "1", "ANYMAMBA_KERNELS": "off"},
        {"ANYMAMBA_REQUIRE_KERNELS": "1", **FAILED_BUILD, "PATH": "", "CXX": ""},
    ],
    ids=["not required", "switched off", "no compiler"],
)
def test_missing_kernels_are_no_failure_otherwise(environment):
    assert collect(**environment).returncode == 0


def test_a_missing_browser_fails_where_one_is_required():
    done = collect(ANYMAMBA_REQUIRE_BROWSER="1", PATH="")
    assert done.returncode != 0
    assert "expected a browser, as ANYMAMBA_REQUIRE_BROWSER asks for one, got none" in done.stderr


def test_continuous_integration_requires_the_kernels_and_a_browser():
    script = (ROOT / ".ci" / "run").read_text()
    assert "export ANYMAMBA_REQUIRE_KERNELS=1\n" in script
    assert "export ANYMAMBA_REQUIRE_BROWSER=1\n" in script
    assert "install -y --no-install-recommends chromium" in script
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=False).returncode == 0
