"""Runs on files: what they learn, how they resume, what they predict, and what they reject."""

import json
import math

import numpy as np
import pytest
import torch

from anymamba import LatentModel, MaskedLM, SequenceClassifier, SequenceModel, SequenceRegressor
from anymamba.training import read_config, resume, train
from anymamba.training.checkpoint.manifest import list_checkpoints
from anymamba.training.config.tabular_config import KINDS, TabularConfig
from anymamba.training.metrics.loggers import read_metrics
from anymamba.training.tasks.predict import Predictor
from anymamba.training.tasks.tabular_base import sequences_of_step
from anymamba.training.tasks.tabular_tasks import MASK_ID, TASKS, make_task
from tests.support import assert_near
from tests.training.cases import silent

MODELS = {
    "classification": SequenceClassifier,
    "regression": SequenceRegressor,
    "masked-lm": MaskedLM,
    "next-value": LatentModel,
}


def write_files(directory):
    """Write sines of two frequencies, their classes, frequencies and noise; texts of two words."""
    rng = np.random.default_rng(0)
    rows, lines = [], []
    for i in range(24):
        slow = i % 2
        x = 5 + 3 * np.sin((0.4 if slow else 1.3) * np.arange(12) + rng.uniform(0, 6)) + rng.normal(0, 0.1, 12)
        rows.append([*x, "slow" if slow else "fast", 0.4 if slow else 1.3])
        lines.append({"text": ("alpha beta " if slow else "gamma delta ") * (1 + i % 3), "label": slow})
    header = [*(f"t{i}" for i in range(12)), "speed", "rate"]
    table = "\n".join(",".join(map(str, row)) for row in [header, *rows])
    (directory / "waves.csv").write_text(table + "\n")
    (directory / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    np.save(directory / "series.npy", np.sin(0.4 * np.arange(90))[:, None] * [1, 100] + 3)


def config_of(directory, kind, **sections):
    inputs = [f"t{i}" for i in range(12)]
    data = {
        "classification": {"sources": ["waves.csv"], "targets": ["speed"], "inputs": inputs},
        "regression": {"sources": ["waves.csv"], "targets": ["rate"], "inputs": inputs},
        "masked-lm": {"sources": ["texts.jsonl"], "inputs": ["text"]},
        "next-value": {"sources": ["series.npy"]},
    }[kind]
    values = {
        "task": kind,
        "model": {"d_model": 16, "d_state": 8, "headdim": 8},
        "data": {**data, "sources": [str(directory / name) for name in data["sources"]]},
        "batch": {"rows": 6, "length": 20},
        "optimizer": {"lr": 1e-2},
        "schedule": {"steps": 4, "warmup": 2},
        "evaluation": {"every": 2},
        "checkpoints": {"every": 2, "keep": 9},
        "threads": 1,
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return TabularConfig.from_dict(values)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    write_files(directory)
    return directory


def test_every_kind_of_the_config_has_a_task():
    assert tuple(TASKS) == KINDS


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"family": "Mamba9"}, r"model\.family must be one of Mamba1, Mamba2, Mamba3, Attention, got 'Mamba9'"),
        ({"family": "Mamba1", "headdim": 8}, r"model\.headdim: Mamba1 has none, got 8"),
        ({"block": {"rope_fractoin": 1}}, r"model\.block\.rope_fractoin: no such field of Mamba3; did you mean rope_f"),
    ],
)
def test_fields_that_a_family_does_not_have_are_rejected_before_the_first_step(section, message, files):
    with pytest.raises(ValueError, match=message):
        make_task(config_of(files, "classification", model=section), silent)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("plots")
def test_a_resumed_run_ends_with_the_same_bytes_and_predicts(kind, files, tmp_path):
    config = config_of(files, kind, batch={"accumulation": 2})
    whole = train(config, tmp_path / "whole", report=silent)
    assert whole.finished
    stopped = train(config, tmp_path / "parts", report=silent, callbacks=[lambda row: row.step == 3])
    assert (stopped.finished, stopped.step) == (False, 3)
    assert resume(tmp_path / "parts", report=silent).finished
    for name in ("model.safetensors", "config.json", "task.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    rows = [
        [(r.step, r.loss, r.evaluation) for r in read_metrics(tmp_path / part / "metrics.csv")]
        for part in ("whole", "parts")
    ]
    assert rows[0] == rows[1]
    assert set(rows[0][1][2]) == set(whole.task.METRICS)
    assert all(math.isfinite(x) for x in rows[0][1][2].values())
    assert (tmp_path / "whole" / "loss.png").read_bytes().startswith(b"\x89PNG")
    model = SequenceModel.from_pretrained(tmp_path / "whole")
    assert type(model) is MODELS[kind]
    latest = list_checkpoints(tmp_path / "whole" / "checkpoints")[0]
    source = config.data.sources[0]
    lines = [list(p.predict(p.read(source), rows=5)) for p in map(Predictor, (tmp_path / "whole", latest))]
    assert lines[0] == lines[1]
    assert len(lines[0]) == (1 if kind == "next-value" else 24)


@pytest.mark.parametrize(
    ("kind", "name", "level"),
    [
        ("classification", "held_out_accuracy", 1.0),
        ("regression", "held_out_rmse", 0.2),
        ("next-value", "held_out_rmse", 12.0),
    ],
)
def test_short_runs_learn(kind, name, level, files, tmp_path):
    """Chance reaches 0.5; the mean of two rates is off by 0.45, and the last value of the series by 19."""
    config = config_of(files, kind, schedule={"steps": 50}, evaluation={"every": 0})
    run = train(config, tmp_path, report=silent)
    score, (baseline,) = run.evaluation.values[name], run.task.baselines.values()
    assert (score >= level) if kind == "classification" else (score < level < baseline)
    assert "better (" in run.task.make_evaluation(1, {}, "").text


def test_a_forecast_continues_from_itself(files, tmp_path):
    train(config_of(files, "next-value"), tmp_path, report=silent)
    predictor = Predictor(tmp_path)
    series = np.load(files / "series.npy")
    lines = list(predictor.predict(predictor.read(str(files / "series.npy")), steps=3))
    assert [(line["sequence"], line["step"]) for line in lines] == [(0, 1), (0, 2), (0, 3)]
    mean, deviation = map(np.array, predictor.metadata["scale"])
    assert_near(torch.from_numpy(mean), torch.from_numpy(series[:81].mean(0)), 1e-12)
    x = torch.tensor((series - mean) / deviation, dtype=torch.float32)[None]
    for line in lines:
        y = predictor.model(x)[:, -1:]
        forecast = torch.tensor([line["channel 0"], line["channel 1"]], dtype=torch.float64)
        assert_near(forecast, y[0, 0].detach().double() * torch.tensor(deviation) + torch.tensor(mean), 1e-4)
        x = torch.cat([x, y.detach()], 1)


@pytest.mark.parametrize("kind", ["classification", "regression", "next-value"])
def test_predictions_name_the_sequences_of_a_column(kind, tmp_path):
    table = "machine,a,b,state,wear\n" + "".join(
        f"{name},{t},{t * t},{name[0]},{len(name)}\n" for t in range(6) for name in ("Ärmel", "bolt", "crank", "alt")
    )
    (tmp_path / "steps.csv").write_text(table, encoding="utf-8")
    targets = {"classification": ["state"], "regression": ["wear"], "next-value": []}[kind]
    data = {"sources": [str(tmp_path / "steps.csv")], "sequence": "machine", "inputs": ["a", "b"], "targets": targets}
    values = {
        "task": kind,
        "model": {"d_model": 16, "d_state": 8, "headdim": 8},
        "data": data,
        "batch": {"rows": 2},
        "schedule": {"steps": 1},
    }
    train(TabularConfig.from_dict(values), tmp_path / "run", report=silent)
    predictor = Predictor(tmp_path / "run")
    lines = list(predictor.predict(predictor.read(str(tmp_path / "steps.csv")), rows=3, steps=2))
    each = 2 if kind == "next-value" else 1
    assert [line["sequence"] for line in lines[::each]] == ["Ärmel", "bolt", "crank", "alt"]
    assert len(lines) == 4 * each


def test_hidden_bytes_are_those_of_the_step_and_real(files):
    task = make_task(config_of(files, "masked-lm"), silent)
    first, again, later = task.batches(0)[0], task.batches(0)[0], task.batches(1)[0]
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, later.inputs)
    hidden = first.inputs == MASK_ID
    assert torch.equal(hidden, first.targets != -100)
    assert first.loss_terms == int(hidden.sum()) > 0
    real = torch.arange(first.inputs.shape[1]) < first.lengths.unsqueeze(1)
    assert not (hidden & ~real).any()


def test_a_stack_that_cannot_be_is_rejected_before_files_are_read():
    nowhere = {"task": "classification", "data": {"sources": ["nowhere.csv"], "targets": ["x"]}}
    with pytest.raises(ValueError, match="n_layer must be even, one layer per direction of a pair, got 3"):
        TabularConfig.from_dict({**nowhere, "model": {"n_layer": 3}})
    with pytest.raises(ValueError, match="schedule must be one of cyclic, stretched, or a list of layers, got 'odd'"):
        TabularConfig.from_dict({**nowhere, "model": {"bidirectional": False, "stack": {"schedule": "odd"}}})
    series = {"task": "next-value", "data": {"sources": ["nowhere.csv"]}}
    for values in (nowhere, series):
        with pytest.raises(ValueError, match=r"its stack cannot have class tokens; model.pooling"):
            TabularConfig.from_dict({**values, "model": {"stack": {"class_tokens": ["start"]}}})


def test_every_sequence_comes_once_before_any_comes_again():
    seen = [i for step in range(6) for i in sequences_of_step(3, step, 4, 8)]
    for epoch in range(3):
        assert sorted(seen[8 * epoch : 8 * epoch + 8]) == list(range(8))
    assert seen[:8] != seen[8:16]


def test_a_config_is_read_from_a_file_and_options(tmp_path, files):
    (tmp_path / "a.toml").write_text('task = "regression"\n[data]\nsources = ["a.csv"]\ntargets = ["y"]\n')
    config = read_config(tmp_path / "a.toml", {"batch.rows": "8", "data.targets": ["u", "v"]})
    assert (config.task, config.batch.rows, config.data.targets) == ("regression", 8, ("u", "v"))
    assert read_config(tmp_path / "a.toml", {"task": "classification"}).task == "classification"
    assert TabularConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match=r"--batch\.tokens: no such field"):
        read_config(tmp_path / "a.toml", {"batch.tokens": "8"})


@pytest.mark.parametrize(
    ("kind", "sections", "message"),
    [
        ("classification", {"data": {"targets": []}}, "data.targets must name what classification predicts"),
        ("classification", {"data": {"targets": ["a", "b"]}}, "one column, the class, got a b"),
        ("classification", {"data": {"labels": ["slow"]}}, "line 2: expected one of the labels slow, got 'fast'"),
        ("classification", {"data": {"targets": ["rage"]}}, "no column 'rage'; there are t0"),
        ("regression", {"data": {"targets": ["speed"]}}, "line 2: speed must be a number, got 'fast'"),
        ("masked-lm", {"data": {"targets": ["label"]}}, "predicts its own inputs, got label"),
        ("masked-lm", {"model": {"bidirectional": False}}, "reads in both directions, got false"),
        ("next-value", {"model": {"bidirectional": True}}, "sees the next value, got true"),
        ("next-value", {"data": {"sources": []}}, "data.sources must name files"),
        ("regression", {"batch": {"accumulation": 4}}, "rows must be a multiple of accumulation = 4, got 6"),
        ("regression", {"model": {"n_layer": 3}}, "n_layer must be even"),
        ("classification", {"model": {"family": "Mamba9"}}, "Mamba9"),
    ],
)
def test_what_cannot_work_is_rejected_before_the_first_step(kind, sections, message, files, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(config_of(files, kind, **sections), tmp_path / "run", report=silent)
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")


def test_other_files_and_other_inputs_are_rejected(files, tmp_path):
    source = tmp_path / "waves.csv"
    source.write_bytes((files / "waves.csv").read_bytes())
    config = config_of(tmp_path, "classification")
    train(config, tmp_path / "run", report=silent, callbacks=[lambda row: True])
    predictor = Predictor(tmp_path / "run")
    (tmp_path / "b.csv").write_text("t0,t1\n1,2\n")
    with pytest.raises(ValueError, match=r"b.csv, line 1: no column 't2'; there are t0, t1"):
        predictor.read(str(tmp_path / "b.csv"))
    np.save(tmp_path / "b.npy", np.zeros((1, 2, 2)))
    with pytest.raises(ValueError, match="expected the inputs that the model was trained on, value, got channel 0"):
        predictor.read(str(tmp_path / "b.npy"))
    source.write_text(source.read_text().replace("fast", "quick"))
    with pytest.raises(ValueError, match="not the data that the run started with: expected the checksum"):
        resume(tmp_path / "run", report=silent)
    with pytest.raises(ValueError, match="expected a model of `anymamba train --task`"):
        Predictor(tmp_path)
