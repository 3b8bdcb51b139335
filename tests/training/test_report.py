from anymamba.training.report import MetricsTable, Row, read_metrics


def row(step):
    return Row(step, 64 * step, 1.0 / step, 1e-3, 0.1, 0.5, {"bits": 2.0} if step % 2 else {})


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
