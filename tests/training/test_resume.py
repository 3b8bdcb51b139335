"""Any number of ranks can read the checkpoints of several; what is wrong with one is named."""

import functools
import json
import re
import shutil
import sys

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from anymamba.core.io import digest_file, open_tensors, read_json, write_json
from anymamba.training import TrainingConfig
from anymamba.training.api import create_run, open_run
from anymamba.training.checkpoint.manifest import list_checkpoints, manifest_checksum
from anymamba.training.checkpoint.resume import load_latest
from anymamba.training.checkpoint.sharded_tensors import StoredTensor
from tests.ranks import run_cases, shared_directory
from tests.training.cases import silent
from tests.training.test_process_group import (
    MUON,
    PARTS,
    STREAM,
    alone,
    assert_same_run,
    config_of,
    resume_case,
    world_of,
)
from tests.training.test_saver import names_in, replace_attribute, train

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


def cut(path):
    file = path / "optimizer-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip(path):
    file = path / "carried-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def remove(path):
    (path / "model-00002-of-00002.safetensors").unlink()


def of_another(path):
    name = "model-00001-of-00002.safetensors"
    shutil.copyfile(list_checkpoints(path.parent)[1] / name, path / name)


def sign(path, files):
    """Write a manifest with the right checksums, as a forger would."""
    manifest = {**read_json(path / "training.json"), "files": {name: digest_file(path / name) for name in files}}
    manifest.pop("checksum")
    write_json(path / "training.json", {**manifest, "checksum": manifest_checksum(manifest)})


def unlist(path):
    sign(path, [name for name in names_in(path) if name not in ("training.json", "model-00002-of-00002.safetensors")])


def other_rows(path, change=lambda entry: {**entry, "spans": [[b + 1, e + 1] for b, e in entry["spans"]]}):
    file = path / "model-00002-of-00002.safetensors"
    with open_tensors(file) as opened:
        table = json.loads(opened.metadata()["shards"])
    name = "backbone.embedding.weight"
    save_file(load_file(file), file, metadata={"shards": json.dumps({**table, name: change(table[name])})})
    sign(path, [name for name in names_in(path) if name != "training.json"])


def same_rows(path):
    other_rows(path, lambda entry: {**entry, "spans": [[b - 1, e - 1] for b, e in entry["spans"]]})


def more_rows(path):
    other_rows(path, lambda entry: {**entry, "rows": entry["rows"] + 1})


DAMAGES = {
    cut: "optimizer-00002-of-00002.safetensors must have the checksum",
    flip: "carried-00001-of-00002.safetensors must have the checksum",
    remove: "model-00002-of-00002.safetensors must have the checksum .* got missing",
    of_another: "model-00001-of-00002.safetensors must have the checksum",
    unlist: "model must be one file, or the files of all ranks that wrote it, got model-00001-of-00002.safetensors",
    other_rows: "model-00002-of-00002.safetensors must list which rows of backbone.embedding.weight",
    same_rows: "each of the 256 rows of backbone.embedding.weight must be in one file",
    more_rows: r"model-00002-of-00002.safetensors must have rows of backbone.embedding.weight as .*\(256, 16\)",
}


def damage_case(rank):
    """Check that damage to a shard is named, and that all ranks, and one process, use the checkpoint before it."""
    train(rank, "sound", STREAM, {"shard": 2})
    for damage, words in DAMAGES.items():
        directory = shared_directory(f"damaged by {damage.__name__}")
        if rank == 0:
            shutil.copytree(shared_directory("sound"), directory)
            damage(list_checkpoints(directory / "checkpoints")[0])
        dist.barrier()
        told = []
        assert open_run(directory, {}, told.append, world_of(rank)).step == 2
        assert len(told) == (1 if rank == 0 else 0)
        if rank == 0:
            assert load_latest(directory / "checkpoints", told.append).manifest.step == 2
            for line in told:
                pattern = rf"step-00000004: damaged: {words}.*; using the checkpoint before it"
                assert re.search(pattern, line), (line, words)
        dist.barrier()


def own_rows_case(rank):
    """Check that a rank on a mesh that shards the weights reads only its own rows, and what is not sharded."""
    fields = STREAM | MUON
    train(rank, "half", fields, {}, stop=3)
    read = []

    def wrap_get(get):
        def count_rows(stored, rows):
            rows_read = get(stored, rows)
            read.append(rows_read.numel())
            return rows_read

        return count_rows

    with replace_attribute(StoredTensor, "__getitem__", wrap_get):
        trainer = open_run(shared_directory("half"), {"parallel.shard": "2"}, silent, world_of(rank))
    path = list_checkpoints(shared_directory("half") / "checkpoints")[0]
    total = sum(x.numel() for file in path.glob("*.safetensors") for x in load_file(file).values())
    assert sum(read) < 0.7 * total, (sum(read), total)
    trainer.run(shown=False)
    if rank == 0:
        assert_same_run(shared_directory("half"), alone(rank, fields))
    else:
        alone(rank, fields)
    dist.barrier()


def init_case(rank):
    """Check that a run that started from another model's weights continues from shards, without that model."""
    train(rank, "first", {}, {"shard": 2})
    config = {"model": {"init": str(shared_directory("moved"))}, "schedule": {"steps": 4}}
    if rank == 0:
        shared_directory("moved").mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(shared_directory("first") / name, shared_directory("moved") / name)
    dist.barrier()
    values = {**config_of({}, {"shard": 2}).to_dict(), **config}
    directory = shared_directory("second")
    trainer = create_run(TrainingConfig.from_dict(values), directory, silent, world_of(rank))
    trainer.run([lambda row: row.step == 3], shown=False)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(shared_directory("moved"))
    dist.barrier()
    assert open_run(directory, {}, silent, world_of(rank)).run(shown=False)
    dist.barrier()


RANK_CASES = {
    2: {"damage": damage_case, "own rows": own_rows_case, "begun with a model": init_case},
    4: {
        "resumed, hybrid to shards": functools.partial(
            resume_case, name="d", fields=STREAM | PARTS | MUON, first={"replicate": 2, "shard": 2}, then={"shard": 4}
        ),
        "resumed, shards to hybrid": functools.partial(
            resume_case, name="e", fields=STREAM | PARTS | MUON, first={"shard": 4}, then={"shard": 2, "context": 2}
        ),
    },
}


@functools.cache
def messages(size):
    return run_cases(__name__, size)


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in RANK_CASES.items() for name in cases])
def test_ranks_read_what_others_wrote(size, name):
    assert not messages(size)[name], messages(size)[name]
