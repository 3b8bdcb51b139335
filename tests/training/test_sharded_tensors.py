"""Sharded tensors: any rows can be read, and files that do not belong together are rejected."""

import json

import pytest
import torch
from safetensors.torch import save_file

from anymamba.training.checkpoint.sharded_tensors import (
    StoredTensors,
    TensorShard,
    list_shard_files,
    shard_file_name,
    write_shards,
)

WHOLE = {"a": torch.arange(21.0).view(7, 3), "b": torch.arange(5.0, dtype=torch.float64), "count": torch.tensor(3.0)}
# Awkward: several runs of rows in a file, out of order, one row, and a tensor that one file has all of.
SPANS = {"a": [((4, 6), (0, 1)), ((1, 4), (6, 7))], "b": [((0, 5),), ()]}


def write(directory, spans=SPANS, **changed):
    """Write two files; `changed` replaces what their headers say about a tensor."""
    files = []
    for rank in range(2):
        shards_by_name = {"count": WHOLE["count"]} if rank == 0 else {}
        for name, both in spans.items():
            if both[rank]:
                rows = torch.cat([WHOLE[name][begin:end] for begin, end in both[rank]])
                shards_by_name[name] = TensorShard(rows, both[rank], len(WHOLE[name]))
        files.append(directory / shard_file_name("model", rank, 2))
        write_shards(files[-1], shards_by_name)
    if changed:
        tensors = {name: x.rows if isinstance(x, TensorShard) else x for name, x in shards_by_name.items()}
        shards = {name: {"rows": x.total, "spans": x.spans} for name, x in shards_by_name.items()}
        save_file(tensors, files[-1], metadata={"shards": json.dumps({**shards, **changed})})
    return files


def test_what_was_written_in_shards_is_read_whole(tmp_path):
    stored = StoredTensors(write(tmp_path))
    assert sorted(stored) == sorted(WHOLE)
    for name, x in stored.whole().items():
        assert torch.equal(x, WHOLE[name])
        assert x.dtype == stored[name].dtype == WHOLE[name].dtype


def test_any_rows_can_be_read(tmp_path):
    stored = StoredTensors(write(tmp_path))["a"]
    for begin in range(8):
        for end in range(begin, 8):
            rows = stored[begin:end]
            assert rows.shape == (end - begin, 3)
            assert torch.equal(rows, WHOLE["a"][begin:end])


def test_a_rank_that_has_nothing_writes_a_file_that_can_be_read(tmp_path):
    """That is so for an optimizer before its first step."""
    files = [tmp_path / shard_file_name("optimizer", rank, 2) for rank in range(2)]
    write_shards(files[0], {"rng": torch.arange(3)})
    write_shards(files[1], {})
    assert list(StoredTensors(files)) == ["rng"]


def test_rows_that_are_not_asked_for_are_not_read(tmp_path, monkeypatch):
    files = write(tmp_path)
    stored, opened = StoredTensors(files), []
    file = StoredTensors.open_file
    monkeypatch.setattr(StoredTensors, "open_file", lambda self, path: opened.append(path) or file(self, path))
    assert torch.equal(stored["a"][4:6], WHOLE["a"][4:6])
    assert opened == files[:1]


def test_what_was_read_does_not_change_with_the_file(tmp_path):
    files = write(tmp_path)
    stored = StoredTensors(files)
    values = stored["b"][...], stored["count"][...]
    stored.close()
    for file in files:
        file.write_bytes(bytes(file.stat().st_size))
    assert torch.equal(values[0], WHOLE["b"])
    assert torch.equal(values[1], WHOLE["count"])


@pytest.mark.parametrize(
    "entry",
    [
        None,
        3,
        {},
        {"rows": 7},
        {"rows": "7", "spans": [[1, 4], [6, 7]]},
        {"rows": 7, "spans": []},
        {"rows": 7, "spans": [[1, 4]]},
        {"rows": 7, "spans": [[1, 4], [6, 8]]},
        {"rows": 7, "spans": [[1, 4], [7, 6]]},
        {"rows": 7, "spans": [[-1, 2], [6, 7]]},
        {"rows": 7, "spans": [[1, 4], [6.0, 7]]},
        {"rows": 7, "spans": [[1, 4], [6]]},
        {"rows": 7, "spans": [[1, 4], [True, 2]]},
    ],
    ids=str,
)
def test_a_header_that_does_not_say_which_rows_are_there_is_rejected(tmp_path, entry):
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors must list which rows of a "):
        StoredTensors(write(tmp_path, a=entry))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (
            {"rows": 7, "spans": [[0, 3], [6, 7]]},
            "each of the 7 rows of a must be in one file, got 0 to 1 in model-0",
        ),
        ({"rows": 7, "spans": [[1, 4], [5, 6]]}, "each of the 7 rows of a must be in one file"),
        ({"rows": 8, "spans": [[1, 4], [6, 7]]}, r"rows of a as torch.float32 of shape \(7, 3\), got .* \(8, 3\)"),
    ],
)
def test_rows_that_overlap_or_are_missing_are_rejected(tmp_path, entry, words):
    with pytest.raises(ValueError, match=words):
        StoredTensors(write(tmp_path, a=entry))


def test_files_that_do_not_belong_together_are_rejected(tmp_path):
    files = write(tmp_path)
    with pytest.raises(ValueError, match="each of the 7 rows of a"):
        StoredTensors(files[:1])
    with pytest.raises(ValueError, match="each of the 7 rows of a"):
        StoredTensors([*files, files[1]])
    write_shards(files[1], {"a": TensorShard(torch.zeros(4, 2), SPANS["a"][1], 7)})
    with pytest.raises(ValueError, match=r"of shape \(7, 3\), got torch.float32 of shape \(7, 2\)"):
        StoredTensors(files)
    write_shards(files[1], {"a": TensorShard(torch.zeros(4, 3).half(), SPANS["a"][1], 7)})
    with pytest.raises(ValueError, match=r"torch.float32 of shape \(7, 3\), got torch.float16"):
        StoredTensors(files)
    write_shards(files[1], {"a": TensorShard(WHOLE["a"][[1, 2, 3, 6]], SPANS["a"][1], 7), "count": WHOLE["count"]})
    with pytest.raises(ValueError, match="count must be in one file, got 2"):
        StoredTensors(files)
    save_file({"x": torch.zeros(1)}, files[0], metadata={"shards": "[3]"})
    with pytest.raises(ValueError, match="must list its rows as a JSON object, got list"):
        StoredTensors(files[:1])


def test_the_numbers_of_files_must_be_complete():
    numbered = [shard_file_name("model", rank, 3) for rank in range(3)]
    assert (
        list_shard_files("model", [*reversed(numbered), "config.json", "carried-00001-of-00002.safetensors"])
        == numbered
    )
    assert list_shard_files("model", ["model.safetensors", "optimizer.safetensors"]) == ["model.safetensors"]
    assert list_shard_files("carried", numbered) == []
    for wrong in (
        numbered[1:],
        [*numbered, "model.safetensors"],
        [*numbered, "model-00001-of-00002.safetensors"],
        ["model-00001-of-00001.safetensors"],
        ["model-00000-of-00000.safetensors"],
    ):
        with pytest.raises(ValueError, match="must be one file, or the files of all ranks that wrote it, got model"):
            list_shard_files("model", wrong)
