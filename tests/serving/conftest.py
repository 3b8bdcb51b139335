import faulthandler
import signal
import sys
from pathlib import Path

import pytest

from tests.serving.running import Running, make_model

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("jinja2")

SECONDS = 600
HERE = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Fail a test that hangs, and show what each thread was doing, here and in the servers."""
    if HERE not in item.path.parents:
        return (yield)

    def late(*_):
        faulthandler.dump_traceback(file=sys.__stderr__)
        Running.abort_all()
        raise TimeoutError(f"{item.name} took more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """Save a small model; return it and its directory."""
    directory = tmp_path_factory.mktemp("serving") / "tiny"
    return make_model(directory), directory


@pytest.fixture(scope="session")
def server(served):
    """Start a server that the tests here share."""
    running = Running(
        served[1], "--body-seconds", "1.5", "--max-body", "1", "--max-prompt", "4096", "--segment-len", "32"
    )
    yield running
    assert running.stop() == 0
