"""Checkpoints of several ranks: each writes its own rows in the background; a checkpoint is complete or absent."""

import functools
import resource
import sys
import threading
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from anymamba import MambaLM
from anymamba.training.api import create_run, open_run
from anymamba.training.checkpoint import saver as saver_module
from anymamba.training.checkpoint.manifest import Manifest, list_checkpoints
from anymamba.training.checkpoint.saver import Part, Saver
from anymamba.training.checkpoint.sharded_tensors import StoredTensors
from anymamba.training.distributed.process_group import AllRanksError
from tests.ranks import run_cases, shared_directory
from tests.training.cases import silent
from tests.training.test_process_group import (
    MUON,
    PARTS,
    STREAM,
    config_of,
    prepare,
    world_of,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


def train(rank, name, fields, mesh, stop=None):
    """Train on several ranks, perhaps only in part; return the trainer and its checkpoints, the latest first."""
    prepare(rank)
    directory = shared_directory(name)
    trainer = create_run(config_of(fields, mesh), directory, silent, world_of(rank))
    trainer.run([lambda row: row.step == stop], shown=False)
    dist.barrier()
    return trainer, list_checkpoints(directory / "checkpoints")


def names_in(path):
    return sorted(file.name for file in path.iterdir())


@contextmanager
def replace_attribute(owner, name, make):
    """Replace an attribute during the block by one that is made from it."""
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def format_case(rank):
    """Check that ranks write their own rows of sharded tensors; without any, there is one whole file."""
    _, (path, *_) = train(rank, "divided", STREAM | MUON, {"shard": 2})
    numbered = [f"{kind}-0000{i}-of-00002.safetensors" for kind in ("carried", "model", "optimizer") for i in (1, 2)]
    assert names_in(path) == sorted([*numbered, "config.json", "training.json"])
    for name in numbered:
        rows = {key: len(x) for key, x in load_file(path / name).items() if x.ndim and key != "rng"}
        kind = StoredTensors([path / other for other in numbered if other.split("-")[0] == name.split("-")[0]])
        assert rows
        assert sum(rows.values()) <= 0.6 * sum(kind[key].shape[0] for key in kind if kind[key].shape and key != "rng")
    whole = StoredTensors([path / name for name in numbered if name.startswith("model")]).whole()
    final = load_file(path.parents[1] / "model.safetensors")
    assert sorted(final) == sorted(whole)
    assert all(torch.equal(final[key], whole[key]) for key in final)
    for mesh in ({}, {"context": 2}):
        _, (path, *_) = train(rank, f"whole{'-'.join(mesh)}", {}, mesh)
        assert names_in(path) == ["config.json", "model.safetensors", "optimizer.safetensors", "training.json"]
        MambaLM.from_pretrained(path)
        _, (path, *_) = train(rank, f"streams{'-'.join(mesh)}", STREAM, mesh)
        carried = ["carried.safetensors"] if mesh else numbered[:2]
        assert [name for name in names_in(path) if "carried" in name] == carried
    dist.barrier()


def background_case(rank, mesh):
    """Check that steps taken while a slow disk writes give the bits of a run that saves only at its end."""
    fields, when = STREAM | PARTS | MUON | {"checkpoints": {"every": 1, "keep": 9}}, []
    once = fields | {"checkpoints": {"every": 0}}
    _, (expected, *_) = train(rank, f"once{'-'.join(mesh)}", once, mesh)

    def slow(write):
        def written(part, directory, *more):
            began, end = trainer.step, time.monotonic() + 60
            while 0 < began < 4 and trainer.step == began and time.monotonic() < end:
                time.sleep(0.02)
            write(part, directory, *more)
            when.append((began, trainer.step))

        return written

    directory = shared_directory(f"often{'-'.join(mesh)}")
    trainer = create_run(config_of(fields, mesh), directory, silent, world_of(rank))
    with replace_attribute(Part, "write", slow):
        trainer.run(shown=False)
    dist.barrier()
    assert [int(path.name[5:]) for path in list_checkpoints(directory / "checkpoints")] == [4, 3, 2, 1, 0]
    assert any(end > begin for begin, end in when), when
    (path, *_) = list_checkpoints(directory / "checkpoints")
    for name in names_in(expected):
        if name.endswith(".safetensors"):
            assert (path / name).read_bytes() == (expected / name).read_bytes(), name
    dist.barrier()


def on_a_full_disk(write):
    """Limit every file that this process writes meanwhile to 2,000 bytes."""

    def written(part, directory, *more):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            write(part, directory, *more)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return written


def full_disk_case(rank, victim):
    """Check that a rank that cannot write ends the run, naming itself and the file, and that the run can resume."""
    prepare(rank)
    directory = shared_directory(f"full{victim}")
    config = config_of(STREAM | {"checkpoints": {"every": 1, "keep": 9}}, {"shard": 2})
    trainer = create_run(config, directory, silent, world_of(rank))
    trainer.run([lambda row: row.step == 2], shown=False)
    again = open_run(directory, {}, silent, world_of(rank))
    name = f"optimizer-0000{victim + 1}-of-00002.safetensors"
    words = rf"^rank {victim} of 2: \S*step-00000003: cannot be written; .* File too large: \S*/{name}'"
    again._take_step()
    disk = replace_attribute(Part, "write", on_a_full_disk) if rank == victim else nullcontext()
    with pytest.raises(AllRanksError, match=words), disk:
        again.save()
    dist.barrier()
    assert [path.name for path in list_checkpoints(directory / "checkpoints")] == [
        f"step-0000000{i}" for i in (2, 1, 0)
    ]
    assert not list((directory / "checkpoints").glob(".*"))
    dist.barrier()
    last = open_run(directory, {}, silent, world_of(rank))
    assert last.step == 2
    assert last.run(shown=False)
    dist.barrier()


def failed_in_the_background_case(rank):
    """Check that a write that fails while steps are taken ends the run at the next step."""
    prepare(rank)
    directory = shared_directory("fails")
    config = config_of({"schedule": {"steps": 500}, "checkpoints": {"every": 2}}, {"shard": 2})
    trainer = create_run(config, directory, silent, world_of(rank))
    trainer.save()

    def failing(write):
        def written(part, temporary, *more):
            if rank == 1:
                raise OSError(28, "No space left on device", str(temporary / "model-00002-of-00002.safetensors"))
            write(part, temporary, *more)

        return written

    words = r"rank 1 of 2: .*step-00000002: .*No space left.*model-00002-of"
    with pytest.raises(AllRanksError, match=words), replace_attribute(Part, "write", failing):
        trainer.run(shown=False)
    assert 2 <= trainer.step <= 4
    dist.barrier()
    assert [path.name for path in list_checkpoints(directory / "checkpoints")] == ["step-00000000"]
    assert not list((directory / "checkpoints").glob(".*"))
    dist.barrier()


MANIFEST = Manifest(7, 0, "data", False, {}, [])


def silent_rank_case(rank):
    """Check that a rank that does not report its part in time has failed, and that the error names it."""
    directory = shared_directory("silent")
    saver = Saver(directory, world_of(rank), 0.3)

    def late(temporary):
        while rank == 1 and temporary.exists():  # the first rank removes it when it gives up
            time.sleep(0.02)

    part = Part({"model.safetensors": {"x": torch.zeros(1)}} if rank == 0 else {}, late)
    saver.start(part, MANIFEST, previous=-1, keep=2)
    with pytest.raises(AllRanksError, match=r"rank 1 of 2: .*step-00000007: cannot be written; .*no answer"):
        saver.finish()
    assert list_checkpoints(directory) == []
    dist.barrier()


def error_meanwhile_case(rank):
    """Check that a rank waits for what is being written after an error that no other rank knows of."""
    directory = shared_directory("meanwhile")
    saver = Saver(directory, world_of(rank), 30)
    part = Part({f"model-0000{rank + 1}-of-00002.safetensors": {"x": torch.zeros(1)}}, lambda _: time.sleep(0.5))
    saver.start(part, MANIFEST, previous=-1, keep=2)
    with pytest.raises(ZeroDivisionError), saver:
        1 / 0  # noqa: B018
    dist.barrier()
    assert [path.name for path in list_checkpoints(directory)] == ["step-00000007"]
    assert not list(directory.glob(".*"))
    dist.barrier()


def slow_disk_case(rank):
    """Check that a failed run waits for a slow disk only for a while; what is written later is no checkpoint."""
    directory, disk = shared_directory("slow disk"), threading.Event()
    saver = Saver(directory, world_of(rank), 30)
    name = f"model-0000{rank + 1}-of-00002.safetensors"
    part = Part({name: {"x": torch.zeros(1)}}, lambda _: disk.wait(60))
    saver.start(part, MANIFEST, previous=-1, keep=2)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "checkpoint")
    with replace_attribute(saver_module, "_PATIENCE_S", lambda _: 0.1), pytest.raises(ZeroDivisionError), saver:
        1 / 0  # noqa: B018
    assert thread.is_alive()
    assert list_checkpoints(directory) == []
    # A later one has all the time it needs, and does not fail with the one that was given up.
    later = part._replace(write_others=lambda _: (disk.set(), thread.join()))
    saver.start(later, MANIFEST, previous=-1, keep=2)
    saver.finish()
    assert [path.name for path in list_checkpoints(directory)] == ["step-00000007"]
    assert not list(directory.glob(".*"))
    dist.barrier()


RANK_CASES = {
    2: {
        "format": format_case,
        "in the background, shard": functools.partial(background_case, mesh={"shard": 2}),
        "in the background, context": functools.partial(background_case, mesh={"context": 2}),
        "full disk of the first": functools.partial(full_disk_case, victim=0),
        "full disk of the second": functools.partial(full_disk_case, victim=1),
        "failed in the background": failed_in_the_background_case,
        "silent rank": silent_rank_case,
        "error meanwhile": error_meanwhile_case,
        "error on a slow disk": slow_disk_case,
    }
}


@functools.cache
def messages(size):
    return run_cases(__name__, size)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in RANK_CASES.items() for name in cases])
def test_ranks_save_as_one(size, name):
    assert not messages(size)[name], messages(size)[name]
