import os
import shutil
from pathlib import Path

import pytest
import torch

from anymamba import MambaLM
from anymamba.training import checkpoint as module
from anymamba.training.checkpoint import checkpoints, load_latest
from anymamba.training.language import resume, train
from tests.training.cases import silent, tiny, write_corpus


@pytest.fixture
def trainer(tmp_path):
    """A run of six steps, saved behind steps 4 and 6."""
    corpus = write_corpus(tmp_path / "corpus")
    trainer = train(tiny(corpus, evaluation={"sample_tokens": 0}), tmp_path / "run", silent)
    assert trainer.run()
    return trainer


def steps(trainer):
    return [int(path.name[5:]) for path in checkpoints(trainer.directory / "checkpoints")]


def test_as_many_are_kept_as_asked(trainer):
    assert steps(trainer) == [6, 4]


@pytest.mark.parametrize("goes_on_to", [3, 8])
def test_damaged_ones_are_removed_before_a_good_one_is(tmp_path, goes_on_to):
    corpus = write_corpus(tmp_path / "corpus")
    config = tiny(corpus, evaluation={"sample_tokens": 0}, schedule={"steps": 9}, checkpoints={"keep": 9})
    trainer = train(config, tmp_path / "run", silent)
    for trainer.step in (2, 4, 6):
        trainer.save()
    assert steps(trainer) == [6, 4, 2]
    for path in checkpoints(trainer.directory / "checkpoints")[:2]:
        (path / "model.safetensors").write_bytes(b"")
    again = resume(trainer.directory, {"checkpoints.keep": "2"}, silent)
    assert again.step == 2
    again.step = goes_on_to
    again.save()
    assert steps(trainer) == [goes_on_to, 2]
    assert load_latest(trainer.directory / "checkpoints", pytest.fail).step == goes_on_to


def test_files_of_other_names_are_left_alone(trainer):
    directory = trainer.directory / "checkpoints"
    shutil.copytree(directory / "step-00000006", directory / "step-00000003-best")
    (directory / "step-7").mkdir()
    (directory / "step-notes.txt").write_text("mine")
    (directory / "step-00000009").write_text("not a directory")
    assert steps(trainer) == [6, 4]
    assert load_latest(directory, pytest.fail).step == 6
    for trainer.step in (100_000_000, 100_000_001):
        trainer.save()
    assert steps(trainer) == [100_000_001, 100_000_000]
    others = ["step-00000003-best", "step-00000009", "step-7", "step-notes.txt"]
    assert sorted(path.name for path in directory.iterdir() if path not in checkpoints(directory)) == others


@pytest.mark.skipif(os.name == "nt", reason="directories cannot be brought to the disk there")
def test_everything_is_on_the_disk_before_the_name_is_given(trainer, monkeypatch):
    events = []

    def rename(path, target, rename=Path.rename):
        inside = [path, *path.iterdir()]
        assert {p.stat().st_ino for p in inside} <= set(events)
        events.append(target)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(Path, "rename", rename)
    trainer.step += 1
    trainer.save()
    directory = trainer.directory / "checkpoints"
    assert events[-2:] == [directory / "step-00000007", directory.stat().st_ino]


def test_a_checkpoint_opens_as_a_model(trainer):
    path = checkpoints(trainer.directory / "checkpoints")[0]
    model = MambaLM.from_pretrained(path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["model.safetensors", "optimiser.safetensors", "training.json", "config.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_one_is_told_of_and_the_one_before_it_used(trainer, name, damage):
    file = checkpoints(trainer.directory / "checkpoints")[0] / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    told = []
    assert load_latest(trainer.directory / "checkpoints", told.append).step == 4
    assert len(told) == 1
    assert "step-00000006" in told[0]
    assert "going back" in told[0]


def test_a_damaged_one_is_replaced_when_the_run_comes_there_again(trainer):
    (checkpoints(trainer.directory / "checkpoints")[0] / "model.safetensors").write_bytes(b"")
    again = resume(trainer.directory, {}, silent)
    assert again.step == 4
    assert again.run()
    assert load_latest(trainer.directory / "checkpoints", silent).step == 6
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), trainer.model.parameters(), strict=True))


def test_none_that_is_whole_is_an_error(trainer, tmp_path):
    for path in checkpoints(trainer.directory / "checkpoints"):
        (path / "training.json").unlink()
    with pytest.raises(ValueError, match="expected a checkpoint to go on from, found 2, all damaged"):
        resume(trainer.directory, {}, silent)
    with pytest.raises(ValueError, match="found none"):
        resume(tmp_path / "nowhere", {}, silent)


@pytest.mark.parametrize("full_after", [0, 1, 2])
def test_a_full_disk_leaves_the_previous_ones(trainer, monkeypatch, full_after):
    again, written = resume(trainer.directory, {}, silent), []

    def full(path, value, write=module.digest_file):
        if len(written) == full_after:
            raise OSError(28, "No space left on device")
        written.append(path)
        return write(path)

    monkeypatch.setattr(module, "digest_file", lambda path: full(path, None))
    again.step += 1
    with pytest.raises(OSError, match="No space left"):
        again.save()
    monkeypatch.undo()
    assert steps(trainer) == [6, 4]
    assert not list((trainer.directory / "checkpoints").glob(".*"))
    assert load_latest(trainer.directory / "checkpoints", silent).step == 6


def test_what_a_killed_save_left_is_not_a_checkpoint_and_is_removed(trainer):
    directory = trainer.directory / "checkpoints"
    left = directory / ".step-00000008.1.tmp"
    shutil.copytree(checkpoints(directory)[0], left)
    assert load_latest(directory, silent).step == 6
    trainer.step += 1
    trainer.save()
    assert not left.exists()


def test_a_changed_config_is_refused_with_the_names(trainer):
    with pytest.raises(ValueError, match=r"changed: optimiser.lr \(was 0.003, got 1.0\), seed \(was 0, got 3\)"):
        resume(trainer.directory, {"optimiser.lr": "1", "seed": "3", "evaluation.every": "1"}, silent)


def test_changed_text_is_refused(trainer):
    corpus = write_corpus(trainer.directory.parent / "corpus")
    (corpus / "more.txt").write_text("more")
    other = train(tiny(corpus, evaluation={"sample_tokens": 0}), trainer.directory.parent / "other", silent)
    shutil.rmtree(trainer.directory / "data")
    shutil.copytree(other.directory / "data", trainer.directory / "data")
    with pytest.raises(ValueError, match="not what the run began to learn from"):
        resume(trainer.directory, {}, silent)


def test_a_run_is_not_overwritten(trainer):
    with pytest.raises(ValueError, match="there is a run already; go on with --resume"):
        train(trainer.config, trainer.directory, silent)
