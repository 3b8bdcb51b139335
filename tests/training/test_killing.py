import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from anymamba.training.checkpoint.manifest import list_checkpoints
from anymamba.training.metrics.loggers import read_metrics

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


@pytest.mark.parametrize(("mode", "kills"), [("packed", 12), ("stream", 12), ("files", 6)])
def test_a_killed_run_ends_as_if_it_had_not_been_killed(tmp_path, mode, kills):
    """There are at least 30 kills in all modes together, most of them while a file is written."""
    command = [sys.executable, "-m", "tests.training.killing", str(tmp_path), "1", mode, str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    ends = json.loads(done.stdout)
    assert ends.count(-signal.SIGKILL) >= kills
    assert set(ends) <= {0, -signal.SIGKILL}
    (whole, *_) = list_checkpoints(tmp_path / "whole" / "checkpoints")
    losses = [(row.step, row.loss, row.evaluation) for row in read_metrics(tmp_path / "whole/metrics.csv")]
    killed = sorted(tmp_path.glob("killed*"))
    assert len(killed) >= kills // 2
    for directory in killed:
        latest = list_checkpoints(directory / "checkpoints")[0]
        assert latest.name == whole.name
        names = sorted(path.name for path in whole.iterdir())
        assert sorted(path.name for path in latest.iterdir()) == names
        assert ("carried.safetensors" in names) == (mode == "stream")
        for name in names:
            if name.endswith(".safetensors"):
                assert (latest / name).read_bytes() == (whole / name).read_bytes(), (directory, name)
        rows = read_metrics(directory / "metrics.csv")
        assert [(row.step, row.loss, row.evaluation) for row in rows] == losses
        assert not list((directory / "checkpoints").glob(".*"))
