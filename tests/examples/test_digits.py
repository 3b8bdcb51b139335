"""Digits read pixel by pixel: the split, the shifts, and a short run of the command."""

import builtins

import numpy as np
import pytest
import torch

from anymamba.training import train_or_resume
from examples.digits.__main__ import main
from examples.digits.images import SIDE, load_digits, shift
from examples.digits.task import DigitsConfig, DigitsSection, DigitsTask
from tests.training.cases import silent


def test_the_split_is_fixed_and_disjoint():
    sklearn = pytest.importorskip("sklearn.datasets")
    splits = load_digits()
    assert [len(part.labels) for part in splits] == [1257, 180, 360]
    images, labels = (torch.cat([part[i] for part in splits]) for i in (0, 1))
    expected_images, expected_labels = sklearn.load_digits(return_X_y=True)

    def sorted_pairs(images, labels):
        return sorted((*map(int, image), int(label)) for image, label in zip(images, labels, strict=True))

    assert sorted_pairs(images, labels) == sorted_pairs(expected_images, expected_labels)
    assert all(
        torch.equal(a, b) for one, two in zip(splits, load_digits(), strict=True) for a, b in zip(one, two, strict=True)
    )
    assert splits.test.labels[:8].tolist() == [6, 6, 6, 2, 5, 6, 6, 2]


def test_shifts_move_by_at_most_one_pixel():
    images = np.arange(1, 1 + 200 * SIDE * SIDE).reshape(200, SIDE * SIDE)
    moved = shift(images, np.random.default_rng(0)).reshape(200, SIDE, SIDE)
    seen = set()
    for before, after in zip(images.reshape(200, SIDE, SIDE), moved, strict=True):
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                expected = np.zeros((SIDE + 2, SIDE + 2), dtype=before.dtype)
                expected[1 + down : SIDE + 1 + down, 1 + right : SIDE + 1 + right] = before
                if np.array_equal(after, expected[1:-1, 1:-1]):
                    seen.add((down, right))
                    break
            else:
                continue
            break
        else:
            raise AssertionError("not a shift")
    assert len(seen) == 9


def test_batches_repeat_from_the_seed():
    def batch(seed, step):
        return DigitsTask(DigitsConfig(seed=seed, digits=DigitsSection(rows=5)), load_digits()).batches(step)[0]

    assert torch.equal(batch(1, 2).inputs, batch(1, 2).inputs)
    assert not torch.equal(batch(1, 2).inputs, batch(1, 3).inputs)
    assert not torch.equal(batch(1, 2).inputs, batch(2, 2).inputs)
    assert batch(1, 2).inputs.shape == (5, SIDE * SIDE)
    assert (batch(1, 2).tokens, batch(1, 2).loss_terms) == (320, 5)


@pytest.mark.parametrize("family", ["Mamba2", "Mamba3"])
def test_a_short_run_learns(family, tmp_path):
    """A tenth of the digits is right by chance."""
    config = DigitsConfig.from_dict({"digits": {"family": family}, "schedule": {"steps": 150, "warmup": 20}})
    trainer = train_or_resume(DigitsTask(config, load_digits()), tmp_path, silent)
    assert trainer.run()
    assert trainer.evaluation.values["validation_accuracy"] > 0.4


def test_the_command_goes_on_where_it_stopped(tmp_path, capsys):
    command = ["--family", "mamba3", "--steps", "2", "--out", str(tmp_path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "mamba3.md").read_text() == out.removesuffix("\n")
    assert (tmp_path / "mamba3.png").read_bytes().startswith(b"\x89PNG")
    weights = (tmp_path / "mamba3" / "seed-0" / "model.safetensors").read_bytes()
    assert main(command) == 0
    assert capsys.readouterr().out == out
    assert main([*command[:-1], str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "mamba3" / "seed-0" / "model.safetensors").read_bytes() == weights
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--steps", "1"])
    assert "changed: schedule.steps (was 2, got 1); 2 steps have been taken" in capsys.readouterr().err


def test_bad_input_is_rejected(tmp_path, capsys):
    for command, message in [
        (["--family", "mamba1"], "invalid choice"),
        ([], "--family"),
        (["--family", "mamba2", "--seed", "-1"], "seed must be at least 0 and below 2^63, got -1"),
        (["--family", "mamba2", "--steps", "0"], "steps must be at least 1, got 0"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main([*command, "--out", str(tmp_path)])
        assert message in capsys.readouterr().err


def test_without_scikit_learn_the_message_says_what_to_install(tmp_path, capsys, monkeypatch):
    imported = builtins.__import__

    def without(name, *rest, **more):
        if name.partition(".")[0] == "sklearn":
            raise ImportError("No module named 'sklearn'")
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit, match="2"):
        main(["--family", "mamba2", "--out", str(tmp_path)])
    assert "pip install 'anymamba[examples]'" in capsys.readouterr().err
