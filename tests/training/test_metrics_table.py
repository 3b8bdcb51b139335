from pathlib import Path

import pytest

from anymamba.training.metrics.loggers import MetricsTable, StepMetrics, read_metrics


def row(step):
    return StepMetrics(step, 64 * step, 1.0 / step, 1e-3, 0.1, 0.5, {"bits": 2.0} if step % 2 else {})


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


@pytest.fixture
def lines(tmp_path):
    """Return the lines of a table of five steps."""
    table = MetricsTable(tmp_path / "metrics.csv", 0, ["bits"])
    for step in range(1, 6):
        table.add(row(step))
    table.close()
    return (tmp_path / "metrics.csv").read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    "torn", [b"5", b"5,320,0.2,0.001,0.1,0.5,2.", b"\0\0\0", b"\xff,320\r\n", b"5,x,0.2,1,1,1,2\r\n"]
)
def test_a_torn_last_row_is_left_out(tmp_path, lines, torn):
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"".join([*lines[:-1], torn]))
    assert read_metrics(path) == [row(step) for step in range(1, 5)]
    MetricsTable(path, 5, ["bits"]).close()
    assert path.read_bytes() == b"".join(lines[:-1])


@pytest.mark.parametrize(
    "bad", [b"3,192", b"x,192,0.3,0.001,0.1,0.5,2.0", b"3,192,0.3,0.001,0.1,0.5,2.0,7", b"\0\xff", b""]
)
def test_a_garbled_row_is_named(tmp_path, lines, bad):
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"".join([*lines[:3], bad + b"\r\n", *lines[4:]]))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"metrics\.csv, line 4: expected 7 numbers, got '.*'; fix or remove the line"):
        MetricsTable(path, 5, ["bits"])
    assert path.read_bytes() == before


@pytest.mark.parametrize("bad", [b"stop", b"step,tokens,loss", b"\0\xff", b"", b"a" * 10**6, b'"step'])
def test_a_garbled_header_is_named(tmp_path, lines, bad):
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"".join([bad + b"\r\n", *lines[1:]]))
    with pytest.raises(ValueError, match=r"metrics\.csv, line 1: expected the columns step, tokens, .*, got"):
        MetricsTable(path, 5, ["bits"])
    path.write_bytes(b"".join([lines[0].replace(b"bits", b"bots"), *lines[1:]]))
    with pytest.raises(ValueError, match=r"metrics\.csv, line 1: expected the columns bits, got bots"):
        MetricsTable(path, 5, ["bits"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_row_that_cannot_be_written_is_an_error_that_names_the_table(tmp_path):
    table = MetricsTable(tmp_path / "metrics.csv", 0, ["bits"])
    table.close()
    table._file = open("/dev/full", "w")  # noqa: PTH123, SIM115
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.csv'"):
        table.add(row(1))
    table.close()


def test_an_empty_table_has_no_rows(tmp_path):
    (tmp_path / "metrics.csv").write_bytes(b"")
    assert read_metrics(tmp_path / "metrics.csv") == []


@pytest.mark.parametrize(
    ("order", "message"),
    [([1, 2, 2, 3], "line 4: expected a step after 2, got 2"), ([2, 1, 3], "line 3: expected a step after 2, got 1")],
)
def test_rows_that_are_not_in_order_are_rejected(tmp_path, lines, order, message):
    (tmp_path / "metrics.csv").write_bytes(lines[0] + b"".join(lines[step] for step in order))
    with pytest.raises(ValueError, match=f"metrics.csv, {message}; fix or remove the line"):
        MetricsTable(tmp_path / "metrics.csv", 5, ["bits"])


@pytest.mark.parametrize(("kept", "missing"), [([1, 2, 3, 4, 5], 0), ([1, 3, 4], 2), ([], 5)])
def test_missing_rows_are_counted(tmp_path, lines, kept, missing):
    (tmp_path / "metrics.csv").write_bytes(lines[0] + b"".join(lines[step] for step in kept))
    table = MetricsTable(tmp_path / "metrics.csv", 5, ["bits"])
    table.close()
    assert table.missing == missing
