import argparse
import math
import re

import numpy as np
import pytest
import torch

from anymamba.training.api import train_or_resume
from examples.state_tracking import table
from examples.state_tracking.__main__ import _configs, main
from examples.state_tracking.languages import LANGUAGES, NONE, SYMBOLS
from examples.state_tracking.table import best, markdown, over_seeds, read_results, run, write_summary
from examples.state_tracking.tracking import (
    TrackingBatch,
    TrackingConfig,
    TrackingTask,
    nearest_half_circle,
    scaled_accuracy,
)
from tests.training.cases import silent

LOW, HIGH = 1, 61


@pytest.fixture(autouse=True)
def few_sequences(monkeypatch):
    """Draw few sequences: enough to see that the numbers are passed on."""
    monkeypatch.setattr(table, "_TEST_ROWS", 32)
    monkeypatch.setattr(table, "_CURVE_ROWS", 4)


def value(name, text):
    """Return the answer of a sequence, by counting or by Python's own rules."""
    if name == "parity":
        return text.count("1") % 2
    assert text.endswith("=")
    return eval(text[:-1]) % 5


@pytest.mark.parametrize("name", LANGUAGES)
def test_answers_are_those_of_a_brute_force_evaluation(name):
    drawn = LANGUAGES[name].sample(np.random.default_rng(3), 500, LOW, HIGH)
    texts = drawn.texts()
    assert [value(name, text) for text in texts] == drawn.final.tolist()
    assert len(set(texts)) > 400
    assert set(drawn.final.tolist()) == set(range(LANGUAGES[name].classes))


def test_beginnings_have_answers_where_they_have_a_value():
    for name, after in (("parity", "01"), ("arithmetic", "01234=")):
        drawn = LANGUAGES[name].sample(np.random.default_rng(6), 50, LOW, 20)
        answers = np.split(drawn.answers, drawn.lengths.cumsum()[:-1])
        for text, row in zip(drawn.texts(), answers, strict=True):
            for i, answer in enumerate(row.tolist()):
                begun = text[: i + 1].rstrip("=") + ("=" if name == "arithmetic" else "")
                assert answer == (value(name, begun) if text[i] in after else NONE)


def test_beginnings_of_an_expression_in_brackets_have_the_value_with_these_closed():
    drawn = LANGUAGES["brackets"].sample(np.random.default_rng(6), 100, LOW, HIGH)
    answers = np.split(drawn.answers, drawn.lengths.cumsum()[:-1])
    for text, row in zip(drawn.texts(), answers, strict=True):
        for i, answer in enumerate(row.tolist()):
            begun = text[: i + 1].rstrip("=")
            closed = begun + ")" * (begun.count("(") - begun.count(")"))
            assert answer == (value("brackets", closed + "=") if text[i] in "01234)=" else NONE)
    every, last = TrackingBatch.of(drawn, "every"), TrackingBatch.of(drawn)
    assert every.positions.tolist() == np.flatnonzero(drawn.answers != NONE).tolist()
    assert last.positions.tolist() == (drawn.lengths.cumsum() - 1).tolist()
    assert last.answers.tolist() == drawn.final.tolist()


@pytest.mark.parametrize("name", LANGUAGES)
def test_lengths_are_those_asked_for_and_all_possible_ones_come(name):
    language = LANGUAGES[name]
    drawn = language.sample(np.random.default_rng(4), 2000, LOW, HIGH)
    assert [len(text) for text in drawn.texts()] == drawn.lengths.tolist()
    assert set(drawn.lengths.tolist()) == set(language.lengths(LOW, HIGH).tolist())
    counts = np.bincount(drawn.lengths)[language.lengths(LOW, HIGH)]
    assert counts.min() > 0.4 * counts.mean()
    assert set("".join(drawn.texts())) <= set(SYMBOLS[: language.vocab_size])
    with pytest.raises(ValueError, match="has no sequences of 0 to 0 tokens"):
        language.lengths(0, 0)


def test_expressions_have_the_form_of_their_language():
    chance = np.random.default_rng(5)
    for text in LANGUAGES["arithmetic"].sample(chance, 200, 2, 40).texts():
        assert set(text[0:-1:2]) <= set("01234")
        assert set(text[1:-1:2]) <= set("+-*")
    shapes = {1: "0", 2: "-0", 3: "(0)", 4: "(-0)", 5: "(0+0)", 6: "(0+-0)"}
    for length, shape in shapes.items():
        texts = LANGUAGES["brackets"].sample(chance, 300, length + 1, length + 1).texts()
        zeros = {text[:-1].translate(str.maketrans("01234", "00000")) for text in texts}
        assert shape in zeros
        assert all(text.count("(") == text.count(")") for text in texts)
    operators = "".join(LANGUAGES["brackets"].sample(chance, 100, 100, 100).texts())
    assert 0.8 < operators.count("+") / operators.replace("(-", "").replace("--", "-").count("-") < 1.6


def test_scaled_accuracy_is_nought_at_chance_and_one_when_all_is_right():
    answers = torch.arange(100) % 5
    assert scaled_accuracy(answers, answers, 5) == 1
    assert scaled_accuracy(torch.zeros(100), answers, 5) == pytest.approx(0)
    assert scaled_accuracy(answers + 1, answers, 5) == pytest.approx(-0.25)
    half = torch.where(torch.arange(100) < 50, answers, answers + 1)
    assert scaled_accuracy(half, answers, 5) == pytest.approx(0.375)


def config(**tracking):
    sections = {
        "optimizer": {"lr": 1e-2, "weight_decay": 0.0},
        "schedule": {"steps": 6, "warmup": 2},
        "evaluation": {"every": 2},
        "checkpoints": {"every": 2},
        "threads": 1,
    }
    small = {"d_model": 8, "d_state": 8, "headdim": 8, "rows": 8, "validation_rows": 16, "judged": 32}
    return TrackingConfig.from_dict({**sections, "tracking": {**small, **tracking}})


def test_the_longest_sequence_grows_as_the_curriculum_says():
    task = TrackingTask(config(grows_from=1 / 6, grows_to=0.5, longest_first=10, longest_last=40))
    assert [task.longest(step) for step in range(6)] == [10, 10, 20, 40, 40, 40]
    (batch,) = task.batches(0)
    assert batch.bounds.diff().min() >= 3
    assert batch.bounds.diff().max() <= 10
    limited = TrackingTask(config(grows_from=1 / 6, grows_to=0.5, longest_first=10, longest_last=40, tokens=100))
    assert [len(limited.batches(step)[0].bounds) - 1 for step in range(4)] == [8, 8, 5, 2]


@pytest.mark.parametrize("variant", ["mamba3", "mamba3-fixed-rotation", "mamba3-no-rotation", "mamba2"])
def test_the_answer_is_predicted_after_the_last_token(variant):
    task = TrackingTask(config(language="brackets", variant=variant, n_layer=2))
    model = task.make_model(torch.float64)
    drawn = task.language.sample(np.random.default_rng(0), 3, 3, 12)
    logits = task._logits(model, TrackingBatch.of(drawn), torch.float64)
    for row, text in zip(logits, drawn.texts(), strict=True):
        ids = torch.tensor([[SYMBOLS.index(symbol) for symbol in text]])
        assert torch.allclose(row, model(ids).logits[0, -1, :5], atol=1e-12)


def test_runs_are_the_same_from_their_seed_and_go_on_where_they_were_stopped(tmp_path):
    settings = config(language="arithmetic")
    whole = run(settings, tmp_path / "whole", silent)
    stopped = train_or_resume(TrackingTask(settings), tmp_path / "stopped", silent)
    for _ in range(3):
        stopped._take_step()
    stopped.save()
    again = run(settings, tmp_path / "stopped", silent)
    assert (again.test, again.curve, again.parameters) == (whole.test, whole.curve, whole.parameters)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert weights[0] == weights[1]
    assert run(settings, tmp_path / "whole", silent) == whole
    with pytest.raises(ValueError, match=r"changed: tracking\.rows"):
        run(config(language="arithmetic", rows=9), tmp_path / "whole", silent)


def test_the_table_has_the_run_with_the_best_validation(tmp_path):
    run(config(), tmp_path / "a", silent)
    run(config(variant="mamba2"), tmp_path / "b", silent)
    (first, second) = read_results(tmp_path)
    worse = first._replace(validation=first.validation - 0.1, test=1.0)
    assert best([worse, second, first]) == {"mamba3": first, "mamba2": second}
    text = write_summary("parity", tmp_path)
    assert f"| Mamba-3 | 100.0 | {100 * first.test:.1f} | {100 * first.validation:.1f} | 0.01 | 8 |" in text
    assert text == markdown("parity", [first, second]) == (tmp_path / "table.md").read_text()
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_runs_that_differ_in_their_seed_alone_are_taken_together(tmp_path):
    run(config(), tmp_path / "a", silent)
    (first,) = read_results(tmp_path)
    assert over_seeds([first]) == ""
    second = first._replace(config={**first.config, "seed": 1}, curve=[(length, 0.25) for length, _ in first.curve])
    third = second._replace(config={**second.config, "seed": 2}, curve=[(length, 1.0) for length, _ in first.curve])
    other = first._replace(config={**first.config, "optimizer": {**first.config["optimizer"], "lr": 0.5}})
    text = over_seeds([third, other, second])
    assert text.startswith("Mamba-3, lr 0.01, seeds 1, 2:\n")
    assert text.count("| 62.5 | 25.0 | 100.0 |") == len(first.curve)
    assert "| 1,024 | 62.5 | 25.0 | 100.0 |\n" in text


@pytest.mark.parametrize("variant", ["mamba3", "mamba3-fixed-rotation", "mamba3-no-rotation", "mamba2"])
def test_as_much_of_the_state_rotates_as_requested(variant):
    for fraction in (0.5, 1.0):
        block = (
            TrackingTask(config(variant=variant, rotating=fraction)).make_model(torch.float32).backbone.layers[0].mixer
        )
        expected = {"mamba3-no-rotation": 0, "mamba2": None}.get(variant, 8 * fraction / 2)
        assert getattr(block, "num_rope_angles", None) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--summary"], "parity: expected finished runs, got none"),
        (["--variants", "mamba3,mamba4"], "tracking.variant must be one of mamba3, .*, got 'mamba4'"),
        (["--set", "x"], "--set: expected NAME=VALUE, got 'x'"),
        (["--set", "tracking.x=1"], "--tracking.x: no such field"),
        (["--set", "seed=1"], "--set seed: expected --seed instead"),
        (["--lr", "1e-3,fast"], "--optimizer.lr must be a number .*, got 'fast'"),
    ],
)
def test_a_mistake_is_exit_code_2_before_anything_runs(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["--task", "parity", "--out", str(tmp_path), *flags])
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", LANGUAGES)
def test_runs_of_a_preset_end_at_their_last_step_with_a_rate_of_zero(name):
    args = argparse.Namespace(task=name, variants="mamba3,mamba2", lr=None, seed=3, set=[], quick=False)
    configs = _configs(args)
    assert list(configs) == ["mamba3", "mamba2"]
    for settings in (config for rates in configs.values() for config in rates.values()):
        assert (settings.tracking.language, settings.seed) == (name, 3)
        assert settings.tracking.solved > 1
        assert settings.schedule.final == 0
        assert TrackingTask(settings).longest(settings.schedule.steps - 1) == settings.tracking.longest_last
    args.set = ["tracking.longest_last=200", "schedule.final=0.1"]
    (changed,) = _configs(args)["mamba2"].values()
    assert (changed.tracking.longest_last, changed.schedule.final) == (200, 0.1)


def test_a_run_is_not_gone_on_with_under_another_config(tmp_path, capsys):
    small = {"tracking.d_model": 8, "tracking.d_state": 8, "tracking.rows": 8, "tracking.validation_rows": 16}
    small |= {"tracking.judged": 32, "tracking.headdim": 8, "schedule.steps": 2, "schedule.warmup": 1}
    flags = [text for name, value in small.items() for text in ("--set", f"{name}={value}")]
    command = ["--task", "parity", "--variants", "mamba2", "--lr", "1e-3", "--out", str(tmp_path), *flags]
    main(command)
    assert "| Mamba-2 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^2$"):
        main([*command, "--set", "tracking.rows=9"])
    assert "changed: tracking.rows (was 8, got 9)" in capsys.readouterr().err.splitlines()[-1]


def test_turns_are_those_of_the_first_layer():
    task = TrackingTask(config())
    model = task.make_model(torch.float32)
    mixer = model.backbone.layers[0].mixer
    with torch.no_grad():
        x = model.backbone.layers[0].norm(model.backbone.embedding.weight[:2]).unsqueeze(0)
        *_, dt, a, trapezoid_logit, angular_rate = mixer._split(mixer.in_proj(x))
        dt, *_, rate = mixer._discretize([dt, a, trapezoid_logit, angular_rate], None)
        angles = dt[0].unsqueeze(-1) * rate[0].unsqueeze(1) / math.pi
    expected = min((abs(abs(a) - 1) + abs(b), b, a) for b, a in zip(*angles.flatten(1).tolist(), strict=True))[1:]
    assert nearest_half_circle(model)[:2] == pytest.approx(expected, abs=1e-5)


def test_a_state_that_rotates_learns_parity_within_seconds_and_one_that_does_not_rotate_does_not(tmp_path):
    accuracies = {}
    for variant in ("mamba3", "mamba3-no-rotation"):
        settings = TrackingConfig.from_dict(
            {
                "optimizer": {"lr": 5e-3, "weight_decay": 0.0, "beta2": 0.999},
                "schedule": {"steps": 300, "warmup": 50},
                "evaluation": {"every": 0, "log_every": 100},
                "checkpoints": {"every": 0},
                "threads": 1,
                "tracking": {
                    "variant": variant,
                    "d_model": 32,
                    "d_state": 16,
                    "headdim": 8,
                    "rows": 32,
                    "longest_first": 12,
                    "longest_last": 12,
                    "judged": 8,
                },
            }
        )
        trainer = train_or_resume(TrackingTask(settings), tmp_path / variant, silent)
        assert trainer.run()
        accuracies[variant] = trainer.task.test(trainer.model, 8, 512)
    assert accuracies["mamba3"] > 0.9
    assert accuracies["mamba3-no-rotation"] < 0.5
