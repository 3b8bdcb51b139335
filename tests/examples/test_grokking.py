"""Sums modulo a prime: the split, participation ratios, and a short run of the command."""

import pytest
import torch

from examples.grokking.__main__ import main
from examples.grokking.task import GrokkingConfig, GrokkingTask, participation_ratio
from tests.support import assert_near


def test_the_split_has_every_sum_once():
    task = GrokkingTask(GrokkingConfig.from_dict({"grokking": {"modulus": 7, "terms": 3, "fraction": 0.4}}))
    numbers = torch.cat([task.training.inputs, task.test.inputs])
    assert len(task.training.labels) == round(0.4 * 7**3)
    assert len({tuple(row) for row in numbers.tolist()}) == 7**3
    sums = torch.cat([task.training.labels, task.test.labels])
    assert torch.equal(sums, numbers.sum(1) % 7)


def test_participation_ratios_by_hand():
    torch.manual_seed(0)
    for rows, columns in ((30, 5), (4, 9)):
        x = torch.randn(rows, columns, dtype=torch.float64)
        eigenvalues = torch.linalg.eigvalsh((x - x.mean(0)).T @ (x - x.mean(0)))
        expected = eigenvalues.sum() ** 2 / eigenvalues.square().sum()
        assert_near(torch.tensor(participation_ratio(x), dtype=torch.float64), expected, 1e-10)
    assert participation_ratio(torch.randn(50, 1) @ torch.randn(1, 6)) == pytest.approx(1, abs=1e-4)


def test_the_command_writes_a_table_and_a_picture(tmp_path, capsys):
    assert main(["--steps", "8", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "grokking.md").read_text() == out.removesuffix("\n")
    assert (tmp_path / "grokking.png").read_bytes().startswith(b"\x89PNG")
    (last,) = (line.split("|") for line in out.splitlines() if line.startswith("| last"))
    assert last[2].strip() == "8"
    assert all(1 <= float(ratio) <= 47 for ratio in last[5:8])


def test_bad_input_is_rejected(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--seed", "-1", "--out", str(tmp_path)])
    assert "seed must be at least 0" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"modulus \*\* terms must be at most 2\^20, got 97 \*\* 4"):
        GrokkingConfig.from_dict({"grokking": {"modulus": 97, "terms": 4}})
