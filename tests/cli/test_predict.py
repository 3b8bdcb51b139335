"""`anymamba train --task` and `anymamba predict`, as a user meets them."""

import csv
import json

import pytest

from tests.training.test_tabular import write_files

SMALL = (
    *("--model.d_model", "16", "--model.d_state", "8", "--model.headdim", "8", "--schedule.steps", "2"),
    *("--schedule.warmup", "0", "--threads", "1", "--batch.rows", "4"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    write_files(directory)
    return directory


def test_train_resume_and_predict(run, files, tmp_path):
    text, model = str(files / "texts.jsonl"), str(tmp_path / "model")
    train = ["train", "--task", "classification", "--data.sources", text, "--data.targets", "label", "--out", model]
    code, out, err = run(*train, *SMALL)
    assert (code, out.splitlines()[-1]) == (0, f"anymamba predict {model} FILE")
    assert "22 sequences to train on, 2 held out" in err
    code, out, err = run("train", "--resume", model, "--data.held_out", "0.5")
    assert code == 2
    assert "changed: data.held_out (was 0.1, got 0.5)" in err
    assert run("train", "--resume", model)[0] == 0
    code, out, _ = run("predict", model, text)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert len(lines) == 24
    assert set(lines[0]) == {"label", "probability", "probabilities"}
    assert "trained for  classification of label, reading text\n" in run("info", model)[1]
    assert sum(lines[0]["probabilities"].values()) == pytest.approx(1)
    assert run("predict", model, text, "--out", str(tmp_path / "a.csv"), "--batch-size", "7")[0] == 0
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [row["label"] for row in rows] == [line["label"] for line in lines]
    assert float(rows[3]["probabilities: 1"]) == pytest.approx(lines[3]["probabilities"]["1"], abs=1e-5)


def test_the_plan_of_a_run_on_files(run, files, tmp_path):
    train = ["train", "--task", "next-value", "--data.sources", str(files / "series.npy"), "--optimizer.kind", "muon"]
    code, out, _ = run(*train, *SMALL, "--plan", "--out", str(tmp_path / "model"))
    assert code == 0
    assert "backbone.layers.*.mixer.in_proj" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "clustering"], "expected one of language, classification, regression, masked-lm, next-value"),
        (["--task", "regression", "--data.targets", "rate"], "data.sources must name files"),
        (["--task", "regression", "--batch.tokens", "8"], "--batch.tokens: no such field"),
        (["--task", "language", "--data.targets", "x"], "--data.targets: no such field"),
        (["--task", "classification", "--data.sources", "no.csv", "--data.targets", "x"], "no.csv: no such file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, arguments, message, tmp_path):
    code, out, err = run("train", *arguments, "--out", str(tmp_path / "model"))
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert message in line


def test_predictions_that_cannot_be_made_are_rejected(run, files, tmp_path):
    for arguments, message in [
        (["predict", str(tmp_path), str(files / "waves.csv")], "expected a model of `anymamba train --task`"),
        (["predict", str(tmp_path), str(files / "waves.csv"), "--steps", "0"], "--steps must be at least 1, got 0"),
    ]:
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert message in err
