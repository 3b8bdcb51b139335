"""The examples that learn from files: their data, their baselines, and a short run of each command."""

import numpy as np
import pytest
import torch

from examples.packages import __main__ as packages
from examples.packages.chunks import LENGTH, PACKAGES, read_chunks
from examples.permuted import __main__ as permuted
from examples.series import __main__ as series
from tests.support import assert_near


def test_autoregression_finds_the_recurrence_of_a_series():
    x = np.sin(0.7 * np.arange(60))[:, None] * [1.0, 2.0]
    predictions = series.autoregression(x[:40], x, 2)
    assert_near(torch.from_numpy(predictions), torch.from_numpy(x[40:]), 1e-8)
    assert series.best_order(x) in series.ORDERS
    noise = np.random.default_rng(0).normal(size=(300, 1))
    walk = noise.cumsum(0)
    assert series.best_order(walk) < 24
    assert series.with_changes(walk)[:3, 1].tolist() == [0, noise[1, 0], pytest.approx(noise[2, 0])]


def test_the_series_command(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert series.main(["--seed", "0", "--steps", "2", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "series.md").read_text() == out.removesuffix("\n")
    assert (tmp_path / "series.png").read_bytes().startswith(b"\x89PNG")
    values = [float(line.split("|")[3]) for line in out.splitlines()[2:5]]
    assert values[1] < values[0]  # least squares beats the last value
    assert 0 < values[2] < 2


def test_pieces_of_source_are_split_by_file():
    training, test = read_chunks(max_chunks=40)
    assert len(training) == 32 * len(PACKAGES)
    assert len(test) == 8 * len(PACKAGES)
    assert all(len(chunk.text) == LENGTH for chunk in [*training, *test])
    assert not any(name in chunk.text for chunk in [*training, *test] for name in PACKAGES)
    assert not {chunk.text for chunk in training} & {chunk.text for chunk in test}
    with pytest.raises(ValueError, match="expected at least 5 files of Python, got 0"):
        read_chunks(["no-such-package"])


def test_the_packages_command(tmp_path, capsys, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(packages, "read_chunks", lambda: read_chunks(max_chunks=20))
    assert packages.main(["--steps", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "packages.md").read_text() == out.removesuffix("\n")
    assert (tmp_path / "packages.png").read_bytes().startswith(b"\x89PNG")
    assert "128 chunks to train on, 32 to evaluate on, of 8 packages" in out


def test_enlarged_pixels_in_their_order():
    order = permuted.order_of_pixels()
    assert sorted(order.tolist()) == list(range(784))
    assert np.abs(np.diff(order)).mean() > 100
    assert_near(torch.from_numpy(permuted.enlarge(torch.full((1, 64), 8))), torch.full((1, 784), 0.5), 1e-6)


def test_the_permuted_command(tmp_path, capsys, monkeypatch):
    pytest.importorskip("sklearn")
    whole = permuted.load_digits()
    few = type(whole)(*(type(part)(part.inputs[:30], part.labels[:30]) for part in whole))
    monkeypatch.setattr(permuted, "load_digits", lambda: few)
    assert permuted.main(["--steps", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "permuted.md").read_text() == out.removesuffix("\n")
    assert (tmp_path / "permuted.png").read_bytes().startswith(b"\x89PNG")
    assert "of 30" in out
