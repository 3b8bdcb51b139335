import io
import sys

import pytest

from anymamba.training.report import Display, MetricsTable, Row, read_metrics


def row(step):
    return Row(step, 64 * step, 1.0 / step, 1e-3, 0.1, 0.5, {"bits": 2.0} if step % 2 else {})


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_terminal_gets_a_live_line_and_others_plain_lines(kind, monkeypatch):
    screen = kind()
    monkeypatch.setattr(sys, "stderr", screen)
    display = Display(steps=6, done=0, every=2)
    for step in range(1, 7):
        display.at(row(step), 64)
        if step == 3:
            display.tell("a message")
    lines = screen.getvalue().split("\n")
    assert lines[-1] == ""
    assert "a message" in screen.getvalue().replace("\r", "\n").split("\n")
    assert "step 6/6  loss 0.1667" in lines[-2]
    assert "0:00 left" in lines[-2]
    if screen.isatty():
        assert "\rstep 1/6" in screen.getvalue()
    else:
        assert "\r" not in screen.getvalue()
        assert [line.split()[1] for line in lines if line.startswith("step")] == ["2/6", "4/6", "6/6"]


def test_a_table_keeps_the_rows_that_count(tmp_path):
    table = MetricsTable(tmp_path / "metrics.csv", 0, ["bits"])
    for step in range(1, 6):
        table.add(row(step))
    table.close()
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("6,38")  # a kill in the middle of a row
    table = MetricsTable(tmp_path / "metrics.csv", 3, ["bits"])
    table.add(row(4))
    table.close()
    assert read_metrics(tmp_path / "metrics.csv") == [row(step) for step in range(1, 5)]
    MetricsTable(tmp_path / "metrics.csv", 0, ["bits"]).close()
    assert read_metrics(tmp_path / "metrics.csv") == []
