"""A run that is rejected changes no file."""

import os

import pytest

from anymamba.core.io import run_lock
from anymamba.training.api import create_run
from anymamba.training.data import shards as shards_module
from tests.training.cases import silent, tiny, write_corpus
from tests.training.test_tabular import config_of, write_files


def listing(directory):
    return sorted(path.relative_to(directory) for path in directory.rglob("*"))


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


REJECTED = {
    "too little text": {"batch": {"tokens": 65536, "length": 65536}},
    "does not know": {"model": {"n_layer": 1, "d_model": 8, "block": {"wibble": 1}}},
    "no such file": {"data": {"sources": ["nowhere"]}},
    "needs TensorBoard": {"evaluation": {"tensorboard": True}},
}


@pytest.mark.parametrize("message", REJECTED)
def test_no_directory_is_left(corpus, tmp_path, monkeypatch, message):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        create_run(tiny(corpus, **REJECTED[message]), tmp_path / "new" / "run", silent)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_files_that_were_there_stay(corpus, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="too little text"):
        create_run(tiny(corpus, **REJECTED["too little text"]), directory, silent)
    assert [path.name for path in sorted(directory.iterdir())] == [".lock", "notes.txt"]


@pytest.mark.parametrize("shards", [0, 1])
def test_a_full_disk_leaves_a_directory_only_with_what_is_tokenized(corpus, tmp_path, monkeypatch, shards):
    def write(*arguments):
        if len(written) == shards:
            raise OSError(28, "No space left on device")
        written.append(arguments)
        write_shard(*arguments)

    written, write_shard = [], shards_module._write_shard
    monkeypatch.setattr(shards_module, "_write_shard", write)
    elsewhere = {"shards": str(tmp_path / "corpus" / "shards")} if shards == 0 else {}
    with pytest.raises(OSError, match="No space left"):
        create_run(tiny(corpus, data=elsewhere), tmp_path / "new" / "run", silent)
    assert (tmp_path / "new").exists() == bool(shards)


def test_a_run_on_files_leaves_none_either(tmp_path):
    write_files(tmp_path)
    before = listing(tmp_path)
    config = config_of(tmp_path, "classification")
    (tmp_path / "waves.csv").write_text("x\n")
    with pytest.raises(ValueError, match=r"waves\.csv"):
        create_run(config, tmp_path / "new" / "run", silent)
    assert listing(tmp_path) == before


@pytest.mark.skipif(os.name == "nt", reason="there are no locks")
def test_what_another_process_has_made_stays(corpus, tmp_path):
    directory = tmp_path / "run"
    (directory / "data").mkdir(parents=True)
    with run_lock(directory), pytest.raises(ValueError, match="another process is using this run"):
        create_run(tiny(corpus), directory, silent)
    assert [path.name for path in sorted(directory.iterdir())] == [".lock", "data"]
