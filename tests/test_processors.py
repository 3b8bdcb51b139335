"""The matrix of processors reports what it ran, including one that fails."""

import pytest

from tests import processors
from tests.processors import PROCESSORS, Processor, main, run


def test_a_processor_is_tested_with_its_variables_and_its_failure_counts(tmp_path, monkeypatch, capsys):
    file = tmp_path / "test_variables.py"
    file.write_text("import os\n\ndef test_variable():\n    assert os.environ['OF_A_PROCESSOR'] == 'right'\n")
    right = Processor(name="right", variables={"OF_A_PROCESSOR": "right"}, tests=(str(file),))
    wrong = Processor(name="wrong", variables={"OF_A_PROCESSOR": "wrong"}, tests=(str(file),))
    never = Processor(name="never", variables={}, missing=lambda: "no such processor", tests=(str(file),))
    assert run(right, right.tests).line.startswith("1 passed")
    monkeypatch.setattr(processors, "PROCESSORS", (wrong, never))
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "assert 'wrong' == 'right'" in out
    assert "wrong              failed   1 failed" in out
    assert "never              skipped  no such processor" in out


def test_processors_that_this_machine_cannot_imitate_are_skipped(monkeypatch):
    monkeypatch.setattr(
        processors, "probe", lambda **_: {"aten": "AVX2", "mkl": "False", "onednn": "False", "isa": "avx2"}
    )
    reasons = {processor.name: processor.missing() for processor in PROCESSORS if processor.name != "kernels wide"}
    assert reasons["torch avx512"] == "torch has AVX2 here, not AVX512"
    assert reasons["kernels avx512"] == "the kernels have avx2 here, not avx512"
    assert reasons["MKL avx2"] == "this torch has no MKL"
    assert reasons["oneDNN"] == "this torch has no oneDNN"
    assert not any(reasons[name] for name in ("torch default", "torch avx2", "kernels avx2", "3 threads"))


def test_a_name_of_no_processor_is_rejected(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "sparc"])
    assert "got 'sparc'" in capsys.readouterr().err


def test_all_tests_of_the_matrix_exist():
    for processor in PROCESSORS:
        assert all((processors.ROOT / path).exists() for path in (*processor.tests, *processor.quick)), processor.name
