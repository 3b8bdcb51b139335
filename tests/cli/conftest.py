import io
import sys

import pytest

from anymamba.cli.main import main


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command line in this process; return exit code, stdout and stderr."""

    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call
