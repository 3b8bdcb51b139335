"""The matrix of processors reports what it ran, including a row that fails."""

import pytest

from tests import processors
from tests.processors import ROWS, Row, main, run


def test_a_row_runs_with_its_variables_and_its_failure_counts(tmp_path, monkeypatch, capsys):
    file = tmp_path / "test_row.py"
    file.write_text("import os\n\ndef test_variable():\n    assert os.environ['OF_A_ROW'] == 'right'\n")
    right = Row(name="right", variables={"OF_A_ROW": "right"}, tests=(str(file),))
    wrong = Row(name="wrong", variables={"OF_A_ROW": "wrong"}, tests=(str(file),))
    never = Row(name="never", variables={}, missing=lambda: "no such processor", tests=(str(file),))
    assert run(right, right.tests).line.startswith("1 passed")
    monkeypatch.setattr(processors, "ROWS", (wrong, never))
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "assert 'wrong' == 'right'" in out
    assert "wrong              failed   1 failed" in out
    assert "never              skipped  no such processor" in out


def test_rows_are_refused_that_the_processor_does_not_have(monkeypatch):
    monkeypatch.setattr(
        processors, "probe", lambda **_: {"aten": "AVX2", "mkl": "False", "onednn": "False", "isa": "avx2"}
    )
    reasons = {row.name: row.missing() for row in ROWS if row.name != "kernels wide"}
    assert reasons["torch avx512"] == "torch has AVX2 here, not AVX512"
    assert reasons["kernels avx512"] == "the kernels have avx2 here, not avx512"
    assert reasons["MKL avx2"] == "this torch has no MKL"
    assert reasons["oneDNN"] == "this torch has no oneDNN"
    assert not any(reasons[name] for name in ("torch default", "torch avx2", "kernels avx2", "3 threads"))


def test_a_name_that_is_no_row_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "sparc"])
    assert "got 'sparc'" in capsys.readouterr().err


def test_all_tests_of_the_matrix_exist():
    for row in ROWS:
        assert all((processors.ROOT / path).exists() for path in (*row.tests, *row.quick)), row.name
