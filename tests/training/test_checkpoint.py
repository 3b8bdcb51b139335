import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file

from anymamba import MambaLM
from anymamba.core.io import read_json, run_lock, write_json
from anymamba.training.api import create_run, open_run, train_or_resume
from anymamba.training.checkpoint import resume, sharded_tensors
from anymamba.training.checkpoint import saver as saver_module
from anymamba.training.checkpoint.manifest import Manifest, list_checkpoints, manifest_checksum, read_manifest
from anymamba.training.checkpoint.resume import load_latest
from anymamba.training.checkpoint.saver import Part, Saver
from anymamba.training.distributed.process_group import World
from anymamba.training.metrics.loggers import read_metrics
from tests.training.cases import silent, tiny, write_corpus


@pytest.fixture
def trainer(tmp_path):
    """Train a run of six steps, saved after steps 4 and 6."""
    corpus = write_corpus(tmp_path / "corpus")
    trainer = create_run(tiny(corpus, evaluation={"sample_tokens": 0}), tmp_path / "run", silent)
    assert trainer.run()
    return trainer


def steps(trainer):
    return [int(path.name[5:]) for path in list_checkpoints(trainer.directory / "checkpoints")]


def test_as_many_are_kept_as_the_config_asks(trainer):
    assert steps(trainer) == [6, 4]


@pytest.mark.parametrize("reached", [3, 8])
def test_damaged_ones_are_removed_before_a_good_one_is(tmp_path, reached):
    corpus = write_corpus(tmp_path / "corpus")
    config = tiny(corpus, evaluation={"sample_tokens": 0}, schedule={"steps": 9}, checkpoints={"keep": 9})
    trainer = create_run(config, tmp_path / "run", silent)
    for trainer.step in (2, 4, 6):
        trainer.save()
    assert steps(trainer) == [6, 4, 2]
    for path in list_checkpoints(trainer.directory / "checkpoints")[:2]:
        (path / "model.safetensors").write_bytes(b"")
    again = open_run(trainer.directory, {"checkpoints.keep": "2"}, silent)
    assert again.step == 2
    again.step = reached
    again.save()
    assert steps(trainer) == [reached, 2]
    assert load_latest(trainer.directory / "checkpoints", pytest.fail).manifest.step == reached


def test_files_of_other_names_are_left_alone(trainer):
    directory = trainer.directory / "checkpoints"
    shutil.copytree(directory / "step-00000006", directory / "step-00000003-best")
    (directory / "step-7").mkdir()
    (directory / "step-notes.txt").write_text("mine")
    (directory / "step-00000009").write_text("not a directory")
    assert steps(trainer) == [6, 4]
    assert load_latest(directory, pytest.fail).manifest.step == 6
    for trainer.step in (100_000_000, 100_000_001):
        trainer.save()
    assert steps(trainer) == [100_000_001, 100_000_000]
    others = ["step-00000003-best", "step-00000009", "step-7", "step-notes.txt"]
    assert sorted(path.name for path in directory.iterdir() if path not in list_checkpoints(directory)) == others


@pytest.mark.skipif(os.name == "nt", reason="directories cannot be brought to the disk there")
def test_everything_is_on_the_disk_before_the_name_is_given(trainer, monkeypatch):
    events = []

    def rename(path, target, rename=Path.rename):
        if path.name.startswith("."):  # a new one, and not an old one that is removed
            assert {p.stat().st_ino for p in [path, *path.iterdir()]} <= set(events)
            events.append(target)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(Path, "rename", rename)
    trainer.step += 1
    trainer.save()
    directory = trainer.directory / "checkpoints"
    assert events[-2:] == [directory / "step-00000007", directory.stat().st_ino]


def test_metrics_are_on_the_disk_before_the_checkpoint_that_follows_them(tmp_path, monkeypatch):
    """A resumed run takes no step again that its checkpoint has, so that nothing would bring back lost rows."""
    events, run = [], tmp_path / "run"

    def rename(path, target, rename=Path.rename):
        events.append(target)
        return rename(path, target)

    def sync(descriptor):
        table = run / "metrics.csv"
        if table.exists() and os.fstat(descriptor).st_ino == table.stat().st_ino:
            events.append(len(read_metrics(table)))

    trainer = create_run(tiny(write_corpus(tmp_path / "corpus"), evaluation={"sample_tokens": 0}), run, silent)
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(os, "fsync", sync)
    assert trainer.run()
    for step in (2, 4, 6):
        assert events.index(step) < events.index(run / "checkpoints" / f"step-0000000{step}")


def test_metrics_that_are_gone_are_reported(tmp_path, capsys):
    config = tiny(write_corpus(tmp_path / "corpus"), evaluation={"sample_tokens": 0})
    assert not create_run(config, tmp_path / "run", silent).run([lambda row: row.step == 4])
    (tmp_path / "run" / "metrics.csv").unlink()
    capsys.readouterr()
    assert open_run(tmp_path / "run", {}, silent).run()
    assert "metrics.csv: no rows of 4 of the 4 steps taken" in capsys.readouterr().err
    assert [row.step for row in read_metrics(tmp_path / "run" / "metrics.csv")] == [5, 6]


@pytest.mark.skipif(os.name == "nt", reason="directories cannot be brought to the disk there")
def test_a_changed_config_is_on_the_disk_before_it_replaces_the_former_one(trainer, monkeypatch):
    """First the bytes, then the name, then the directory: a power cut leaves one manifest or the other."""
    directory, events = trainer.directory / "checkpoints/step-00000006", []

    def replace(path, target, replace=Path.replace):
        events.append((path.stat().st_ino, target))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(Path, "replace", replace)
    read_manifest(directory)._replace(config={"seed": 5}).write(directory, durable=True)
    manifest = (directory / "training.json").stat().st_ino
    assert events == [manifest, (manifest, directory / "training.json"), directory.stat().st_ino]
    assert read_manifest(directory).config == {"seed": 5}


def test_a_checkpoint_opens_as_a_model(trainer):
    path = list_checkpoints(trainer.directory / "checkpoints")[0]
    model = MambaLM.from_pretrained(path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "training.json", "config.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_one_is_reported_and_the_one_before_it_is_used(trainer, name, damage):
    file = list_checkpoints(trainer.directory / "checkpoints")[0] / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    told = []
    assert load_latest(trainer.directory / "checkpoints", told.append).manifest.step == 4
    assert len(told) == 1
    assert "step-00000006" in told[0]
    assert "; using the checkpoint before it" in told[0]


@pytest.mark.parametrize(
    "change",
    [
        {"step": "6"},
        {"step": True},
        {"step": 5},
        {"step": 2**31},
        {"tokens": None},
        {"config": []},
        {"data": 3},
        {"solved": 0},
        {"files": []},
        {"files": {}},
        {"version": None},
        {"version": 2},
        {"config": {"seed": 0, "no such section": {}}},
        {"config": {"seed": "0"}},
    ],
    ids=str,
)
def test_an_odd_manifest_is_rejected_although_its_checksum_is_right(trainer, change):
    path = list_checkpoints(trainer.directory / "checkpoints")[0]
    shutil.rmtree(list_checkpoints(trainer.directory / "checkpoints")[1])
    manifest = {**read_json(path / "training.json"), **change}
    del manifest["checksum"]
    write_json(path / "training.json", {**manifest, "checksum": manifest_checksum(manifest)})
    with pytest.raises(ValueError, match=r"all damaged|no such section|seed must be int"):
        open_run(trainer.directory, {}, silent)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "model.safetensors"])
@pytest.mark.parametrize("damage", ["nothing", "fewer", "more", "others", "narrower"])
def test_odd_tensors_are_rejected_although_their_checksum_is_right(trainer, name, damage):
    path = list_checkpoints(trainer.directory / "checkpoints")[0]
    shutil.rmtree(list_checkpoints(trainer.directory / "checkpoints")[1])
    tensors = load((path / name).read_bytes())
    last = sorted(tensors)[0]
    save_file(
        {
            "nothing": {},
            "narrower": {**tensors, last: tensors[last].half()},
            "fewer": {key: x for key, x in tensors.items() if key != last},
            "more": {**tensors, "more.x": torch.zeros(1)},
            "others": {**tensors, last: torch.zeros(3)},
        }[damage],
        path / name,
    )
    manifest = read_json(path / "training.json")
    del manifest["checksum"]
    manifest["files"][name] = resume.digest_file(path / name)
    write_json(path / "training.json", {**manifest, "checksum": manifest_checksum(manifest)})
    if (name, damage) == ("model.safetensors", "narrower"):  # as torch loads it
        open_run(trainer.directory, {}, silent)
        return
    with pytest.raises(ValueError, match=r"all damaged|its tensors are not those of its config") as caught:
        open_run(trainer.directory, {}, silent)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["fewer", "more", "other rows", "scalar", "other sizes"])
def test_odd_carried_states_are_rejected_although_their_checksum_is_right(tmp_path, damage):
    config = tiny(write_corpus(tmp_path / "corpus"), data={"mode": "stream"}, evaluation={"sample_tokens": 0})
    trainer = create_run(config, tmp_path / "run", silent)
    assert trainer.run()
    path, former = list_checkpoints(trainer.directory / "checkpoints")
    shutil.rmtree(former)
    tensors = load((path / "carried.safetensors").read_bytes())
    x = tensors["layers.0.ssm"]
    changed = {
        "more": x.clone(),
        "other rows": x[:1],
        "scalar": x.new_zeros(()),
        "other sizes": x[..., :1].contiguous(),
    }
    name = "layers.9.ssm" if damage == "more" else "layers.0.ssm"
    others = {key: y for key, y in tensors.items() if key != name}
    save_file(others if damage == "fewer" else {**others, name: changed[damage]}, path / "carried.safetensors")
    manifest = read_json(path / "training.json")
    del manifest["checksum"]
    manifest["files"]["carried.safetensors"] = resume.digest_file(path / "carried.safetensors")
    write_json(path / "training.json", {**manifest, "checksum": manifest_checksum(manifest)})
    with pytest.raises(ValueError, match="its tensors are not those of its config") as caught:
        open_run(trainer.directory, {}, silent)
    assert "\n" not in str(caught.value)


def test_a_damaged_one_is_replaced_when_the_run_reaches_its_step_again(trainer):
    (list_checkpoints(trainer.directory / "checkpoints")[0] / "model.safetensors").write_bytes(b"")
    again = open_run(trainer.directory, {}, silent)
    assert again.step == 4
    assert again.run()
    assert load_latest(trainer.directory / "checkpoints", silent).manifest.step == 6
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), trainer.model.parameters(), strict=True))


def test_one_that_cannot_be_read_is_not_skipped_like_a_damaged_one(trainer, monkeypatch):
    """It may be good, and the next save would remove it."""

    def unreadable(path):
        raise PermissionError(13, "Permission denied", str(path))

    directory = trainer.directory / "checkpoints"
    before = list_checkpoints(directory)
    monkeypatch.setattr(resume, "digest_file", unreadable)
    with pytest.raises(PermissionError, match=before[0].name):
        load_latest(directory, pytest.fail)
    assert list_checkpoints(directory) == before


def test_a_file_of_another_rank_that_is_gone_is_an_error(tmp_path):
    saver = Saver(tmp_path, World(), 1.0)
    save = saver_module._Save(saver_module._make_temporary(tmp_path, 3), Manifest(3, 0, "data", False, {}, []), -1, 1)
    reports = iter([(1, '+{"model-00002-of-00002.safetensors": "0"}')])
    with pytest.raises(OSError, match=r"step-00000003: cannot be written; .*model-00002-of-00002.safetensors"):
        saver._lead(Part({}, lambda _: None), save, reports)
    assert list_checkpoints(tmp_path) == []


def test_without_a_good_one_there_is_an_error(trainer, tmp_path):
    for path in list_checkpoints(trainer.directory / "checkpoints"):
        (path / "training.json").unlink()
    with pytest.raises(ValueError, match="expected a checkpoint to resume from, found 2, all damaged"):
        open_run(trainer.directory, {}, silent)
    with pytest.raises(ValueError, match="nowhere: no such directory"):
        open_run(tmp_path / "nowhere", {}, silent)


@pytest.mark.parametrize("full_after", [0, 1, 2])
def test_a_full_disk_leaves_the_previous_ones(trainer, monkeypatch, full_after):
    again, written = open_run(trainer.directory, {}, silent), []

    def full(path, value, write=saver_module.digest_file):
        if len(written) == full_after:
            raise OSError(28, "No space left on device")
        written.append(path)
        return write(path)

    monkeypatch.setattr(saver_module, "digest_file", lambda path: full(path, None))
    again.step += 1
    with pytest.raises(OSError, match="No space left"):
        again.save()
    monkeypatch.undo()
    assert steps(trainer) == [6, 4]
    assert not list((trainer.directory / "checkpoints").glob(".*"))
    assert load_latest(trainer.directory / "checkpoints", silent).manifest.step == 6


def test_what_a_killed_save_leaves_is_no_checkpoint_and_is_removed(trainer):
    directory = trainer.directory / "checkpoints"
    left = directory / ".step-00000008.1.tmp"
    shutil.copytree(list_checkpoints(directory)[0], left)
    assert load_latest(directory, silent).manifest.step == 6
    trainer.step += 1
    trainer.save()
    assert not left.exists()


def test_a_changed_config_is_rejected_with_the_names(trainer):
    with pytest.raises(ValueError, match=r"changed: batch.tokens \(was 128, got 64\), seed \(was 0, got 3\)"):
        open_run(trainer.directory, {"batch.tokens": "64", "seed": "3", "evaluation.every": "1"}, silent)


def test_changed_text_is_rejected(trainer):
    corpus = write_corpus(trainer.directory.parent / "corpus")
    (corpus / "more.txt").write_text("more")
    other = create_run(tiny(corpus, evaluation={"sample_tokens": 0}), trainer.directory.parent / "other", silent)
    shutil.rmtree(trainer.directory / "data")
    shutil.copytree(other.directory / "data", trainer.directory / "data")
    with pytest.raises(ValueError, match="not the data that the run started with"):
        open_run(trainer.directory, {}, silent)


def test_a_run_is_not_overwritten(trainer):
    with pytest.raises(ValueError, match="there is a run already; continue it with --resume"):
        create_run(trainer.config, trainer.directory, silent)


def test_a_model_is_not_overwritten_when_its_checkpoints_are_gone(trainer):
    shutil.rmtree(trainer.directory / "checkpoints")
    before = {path: path.read_bytes() for path in trainer.directory.iterdir() if path.is_file()}
    assert len(before) > 3
    with pytest.raises(ValueError, match=r"found config\.json, model\.safetensors, metrics\.csv and no checkpoints"):
        create_run(trainer.config, trainer.directory, silent)
    fresh = train_or_resume(trainer.task, trainer.directory, silent)
    with pytest.raises(ValueError, match="expected a directory without a run or a model, found config"):
        fresh.run()
    assert {path: path.read_bytes() for path in trainer.directory.iterdir() if path.is_file()} == before


def test_a_run_that_failed_before_its_first_checkpoint_starts_again(trainer, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sharded_tensors, "write_tensors", full)
        with pytest.raises(OSError, match="No space left"):
            create_run(trainer.config, tmp_path / "again", silent).run()
    assert create_run(trainer.config, tmp_path / "again", silent).run()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no locks")
class TestTwoProcesses:
    message = "run: another process is using this run; wait until it ends, or name another directory"

    def test_the_second_is_rejected_and_changes_nothing(self, trainer):
        second = open_run(trainer.directory, {}, silent)
        before = {path: path.stat().st_mtime_ns for path in trainer.directory.rglob("*")}
        with run_lock(trainer.directory):
            for attempt in (
                second.run,
                lambda: open_run(trainer.directory, {}, silent),
                lambda: create_run(trainer.config, trainer.directory, silent),
                lambda: train_or_resume(trainer.task, trainer.directory, silent),
            ):
                with pytest.raises(ValueError, match=self.message):
                    attempt()
        assert {path: path.stat().st_mtime_ns for path in trainer.directory.rglob("*")} == before
        assert second.run()

    def test_a_run_is_locked_while_it_lasts_and_not_after_it(self, trainer, monkeypatch):
        again, tried = open_run(trainer.directory, {}, silent), []

        def write_model(model, directory):
            with pytest.raises(ValueError, match=self.message), run_lock(trainer.directory):
                pass
            tried.append(directory)

        monkeypatch.setattr(again.task, "write_model", write_model)
        assert again.run()
        assert tried == [trainer.directory]
        with run_lock(trainer.directory):
            pass

    def test_a_killed_one_leaves_no_lock(self, tmp_path):
        directory = tmp_path / "run"
        directory.mkdir()
        hold = f"from anymamba.core.io import *\nwith run_lock(Path({str(directory)!r})): print(flush=True); input()"
        command = [sys.executable, "-c", hold]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            with pytest.raises(ValueError, match=self.message), run_lock(directory):
                pass
            process.kill()
        with run_lock(directory):
            pass


class TestAnotherProcessInBetween:
    """Between the reading of a checkpoint and the first step, another process may continue the run, and finish it."""

    message = "another process has used this run since it was opened, which is now at step-00000009; resume it again"

    def test_its_steps_are_not_lost(self, tmp_path):
        corpus = write_corpus(tmp_path / "corpus")
        config = tiny(corpus, evaluation={"sample_tokens": 0}, schedule={"steps": 9})
        create_run(config, tmp_path / "run", silent).run([lambda row: row.step == 5])
        late = open_run(tmp_path / "run", {}, silent)
        assert open_run(tmp_path / "run", {}, silent).run()
        before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        with pytest.raises(ValueError, match=self.message):
            late.run()
        assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before

    def test_a_trainer_that_goes_on_later_notices_too(self, tmp_path):
        corpus = write_corpus(tmp_path / "corpus")
        config = tiny(corpus, evaluation={"sample_tokens": 0}, schedule={"steps": 9})
        late = create_run(config, tmp_path / "run", silent)
        assert not late.run([lambda row: row.step == 3])
        assert not late.run([lambda row: row.step == 5])
        assert open_run(tmp_path / "run", {}, silent).run()
        with pytest.raises(ValueError, match=self.message):
            late.run()

    def test_a_damaged_one_that_was_skipped_is_no_other_process(self, trainer):
        (list_checkpoints(trainer.directory / "checkpoints")[0] / "model.safetensors").write_bytes(b"")
        assert open_run(trainer.directory, {}, silent).run()


class TestLeftovers:
    """What killed processes have left is removed at the next start."""

    def test_an_old_checkpoint_that_a_clean_up_has_left(self, trainer):
        directory = trainer.directory / "checkpoints"
        before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
        shutil.copytree(directory / "step-00000004", directory / "step-00000002")
        (directory / ".step-00000001.77-3.tmp").mkdir()
        assert open_run(trainer.directory, {}, silent).run()
        assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before

    def test_a_removal_that_is_cut_off_leaves_no_half_checkpoint(self, trainer, monkeypatch):
        def remove_some_and_die(path, ignore_errors=False, remove=shutil.rmtree):
            if ignore_errors:
                remove(path, ignore_errors=True)
            else:
                (path / "model.safetensors").unlink()
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(saver_module.shutil, "rmtree", remove_some_and_die)
            trainer.step += 1
            with pytest.raises(KeyboardInterrupt):
                trainer.save()
        directory = trainer.directory / "checkpoints"
        assert steps(trainer) == [7, 6]
        assert all((path / "model.safetensors").is_file() for path in list_checkpoints(directory))
        trainer.step += 1
        trainer.save()
        assert not list(directory.glob(".*"))

    def test_temporary_files(self, tmp_path):
        corpus = write_corpus(tmp_path / "corpus")
        data = tmp_path / "run" / "data"
        data.mkdir(parents=True)
        mine = [tmp_path / "run" / ".notes.tmp", data / ".keep"]
        left = [tmp_path / "run" / ".metrics.csv.4711.tmp", data / ".train-00000.safetensors.4711-12.tmp"]
        for path in (*mine, *left, data / ".index.json.4711.tmp"):
            path.write_text("x")
        trainer = create_run(tiny(corpus, evaluation={"sample_tokens": 0}), tmp_path / "run", silent)
        assert trainer.run()
        assert sorted(tmp_path.rglob(".*.tmp")) == [tmp_path / "run" / ".notes.tmp"]
        (tmp_path / "run" / ".model.safetensors.4711.tmp").write_text("x")
        assert open_run(tmp_path / "run", {}, silent).run()
        assert sorted(tmp_path.rglob(".*.tmp")) == [tmp_path / "run" / ".notes.tmp"]


@pytest.mark.skipif(os.name == "nt", reason="directories cannot be synced there")
def test_shards_their_index_and_every_new_directory_are_synced(tmp_path, monkeypatch):
    """Data, then rename, then directory: a power cut leaves a run that continues, or none."""
    events = []

    def sync(descriptor):
        events.append(("sync", os.fstat(descriptor).st_ino))

    def replace(path, target, replace=Path.replace):
        events.append(("name", path.stat().st_ino, Path(target)))
        return replace(path, target)

    def rename(path, target, rename=Path.rename):
        events.append(("name", path.stat().st_ino, Path(target)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(Path, "rename", rename)
    directory = tmp_path / "new" / "run"
    create_run(tiny(write_corpus(tmp_path / "corpus"), evaluation={"sample_tokens": 0}), directory, silent).save()
    shards = [directory / "data" / name for name in ("train-00000.safetensors", "held_out-00000.safetensors")]
    for target in (*shards, directory / "data" / "index.json", directory / "checkpoints" / "step-00000000"):
        named = [i for i, event in enumerate(events) if event[0] == "name" and event[2] == target]
        assert named, target
        inode, directory_inode = target.stat().st_ino, target.parent.stat().st_ino
        assert ("sync", inode) in events[: named[-1]], target
        assert ("sync", directory_inode) in events[named[-1] :], target
    for parent in (tmp_path, tmp_path / "new", directory, directory / "checkpoints", directory / "data"):
        assert ("sync", parent.stat().st_ino) in events, parent
