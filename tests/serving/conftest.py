import pytest

from tests.serving.running import Running, make_model

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("jinja2")


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """A model and its directory."""
    directory = tmp_path_factory.mktemp("serving") / "tiny"
    return make_model(directory), directory


@pytest.fixture(scope="session")
def server(served):
    """A server that the tests of this room share."""
    running = Running(
        served[1], "--body-seconds", "1.5", "--max-body", "1", "--max-prompt", "4096", "--segment-len", "32"
    )
    yield running
    assert running.stop() == 0
