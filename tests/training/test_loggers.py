"""Callbacks and logs of a run."""

import sys

import pytest

from anymamba.training import resume, train
from anymamba.training.checkpoint.resume import load_latest
from anymamba.training.metrics.loggers import read_metrics
from tests.training.cases import silent, tiny, write_corpus


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


class TestCallbacks:
    def test_each_is_called_after_every_step_with_what_the_table_has(self, corpus, tmp_path):
        rows, metrics = [], []
        callbacks = [rows.append, lambda row: metrics.append((row.step, row.to_scalars()))]
        run = train(tiny(corpus), tmp_path / "run", callbacks=callbacks, report=silent)
        assert run.finished
        assert rows == read_metrics(tmp_path / "run" / "metrics.csv")
        assert [step for step, _ in metrics] == [1, 2, 3, 4, 5, 6]
        assert metrics[0][1].keys() == {"tokens", "loss", "learning_rate", "gradient_norm", "seconds"}
        assert metrics[-1][1]["held_out_bits_per_byte"] == run.evaluation.values["held_out_bits_per_byte"]

    def test_one_that_returns_true_stops_the_run_and_it_can_be_resumed(self, corpus, tmp_path):
        whole = train(tiny(corpus), tmp_path / "whole", report=silent)
        seen = []
        run = train(tiny(corpus), tmp_path / "run", callbacks=[lambda row: row.step == 3, seen.append], report=silent)
        assert (run.finished, run.step, len(seen)) == (False, 3, 3)
        assert load_latest(tmp_path / "run" / "checkpoints", pytest.fail).manifest.step == 3
        again = resume(tmp_path / "run", callbacks=[seen.append], report=silent)
        assert (again.finished, [row.step for row in seen]) == (True, [1, 2, 3, 4, 5, 6])
        ours, theirs = (directory / "model.safetensors" for directory in (run.directory, whole.directory))
        assert ours.read_bytes() == theirs.read_bytes()

    def test_an_exception_passes_through_and_leaves_a_run_to_resume(self, corpus, tmp_path):
        class Pruned(Exception):  # noqa: N818
            pass

        def prune(row):
            if row.step == 5:
                raise Pruned

        with pytest.raises(Pruned):
            train(tiny(corpus), tmp_path / "run", callbacks=[prune], report=silent)
        assert resume(tmp_path / "run", {"evaluation.every": "1"}, report=silent).finished

    def test_a_caller_that_receives_reports_sees_no_progress_elsewhere(self, corpus, tmp_path, capsys):
        told = []
        train(tiny(corpus), str(tmp_path / "run"), report=told.append)
        assert capsys.readouterr() == ("", "")
        assert any(line.startswith("to train on: ") for line in told)
        train(tiny(corpus), tmp_path / "other")
        assert "step 6/6  loss" in capsys.readouterr().err


def test_tensorboard_and_its_absence(corpus, tmp_path, monkeypatch):
    config = tiny(corpus, evaluation={"tensorboard": True}, schedule={"steps": 2})
    import anymamba.training.metrics.loggers as logs

    with monkeypatch.context() as patch:
        patch.setattr(logs.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"needs TensorBoard: pip install 'anymamba\[train\]'"):
            train(config, tmp_path / "without", report=silent)
    assert train(config, tmp_path / "with", report=silent).finished
    assert list((tmp_path / "with" / "tensorboard").glob("events.*"))


class TestWeightsAndBiases:
    @pytest.fixture
    def runs(self, tmp_path, monkeypatch):
        """Keep runs of wandb on disk only; return the runs, and what each logged."""
        wandb = pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
        begun = []

        def begin(init=wandb.init, **options):
            run, logged = init(**options), []
            log = run.log
            monkeypatch.setattr(
                run, "log", lambda *values, **step: (logged.append((values, step)), log(*values, **step))
            )
            begun.append((run, logged))
            return run

        monkeypatch.setattr(wandb, "init", begin)
        return begun

    def test_a_run_and_its_continuation_are_logged_as_one(self, corpus, tmp_path, runs):
        config, directory = tiny(corpus, evaluation={"wandb": "my-project"}), tmp_path / "run"
        assert not train(config, directory, callbacks=[lambda row: row.step == 4], report=silent).finished
        assert resume(directory, report=silent).finished
        expected = read_metrics(directory / "metrics.csv")
        logged = [entry for _, entries in runs for entry in entries]
        assert logged == [((row.to_scalars(),), {"step": row.step}) for row in expected]
        for run, _ in runs:
            assert run.id == (directory / "wandb-id.txt").read_text().strip()
            assert (run.project, run.name) == ("my-project", "run")
            assert (run.config["optimizer.lr"], run.config["schedule.steps"]) == (0.003, 6)
        files = [path.stat().st_size for path in directory.glob(f"wandb/offline-run-*-{run.id}*/*.wandb")]
        assert len(files) == 2
        assert min(files) > 0

    def test_its_absence_is_named(self, corpus, tmp_path, monkeypatch):
        import anymamba.training.metrics.loggers as logs

        monkeypatch.setattr(logs.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"evaluation.wandb = mine needs .*: pip install 'anymamba\[wandb\]'"):
            train(tiny(corpus, evaluation={"wandb": "mine"}), tmp_path / "run", report=silent)

    def test_a_failure_to_begin_is_one_line(self, corpus, tmp_path, monkeypatch):
        wandb = pytest.importorskip("wandb")

        def fail(**options):
            raise wandb.errors.UsageError("No API key configured.")

        monkeypatch.setattr(wandb, "init", fail)
        with pytest.raises(ValueError, match=r"No API key configured\. \(WANDB_MODE=offline logs to"):
            train(tiny(corpus, evaluation={"wandb": "mine"}), tmp_path / "run", report=silent)


def test_the_package_has_what_it_documents():
    module = sys.modules["anymamba.training"]
    assert module.train is train
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = module.trian
