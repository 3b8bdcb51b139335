import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from anymamba.training.api import create_run
from anymamba.training.checkpoint import saver as saver_module
from anymamba.training.checkpoint import sharded_tensors
from tests.training.cases import silent, tiny, write_corpus

MAKEFILE = Path(__file__).parents[2] / "Makefile"
FRESH, RESUMED = "train examples/demo.toml --out runs/demo", "train --resume runs/demo"

pytestmark = pytest.mark.skipif(shutil.which("make") is None or sys.platform == "win32", reason="needs make and bash")


@pytest.fixture
def demo(tmp_path):
    """Run `make demo` in an empty directory; return the arguments of `anymamba` there."""
    command = tmp_path / "bin" / "anymamba"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\necho $* >> {tmp_path / 'asked'}\n")
    command.chmod(0o755)

    def make():
        (tmp_path / "asked").write_text("")
        # The environment counts as installed.
        options = ["--old-file", ".venv/.installed", f"BIN={command.parent}"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        subprocess.run(["make", "-f", MAKEFILE, *options, "demo"], cwd=tmp_path, env=environment, check=True)
        training, generating = (tmp_path / "asked").read_text().splitlines()
        assert generating.startswith("generate runs/demo --prompt")
        return training

    return make


def begin_demo(tmp_path):
    return create_run(tiny(write_corpus(tmp_path / "corpus")), tmp_path / "runs" / "demo", silent)


def test_a_demo_that_was_stopped_or_finished_continues(demo, tmp_path):
    assert demo() == FRESH
    trainer = begin_demo(tmp_path)
    trainer.save()
    assert demo() == RESUMED
    assert trainer.run()
    assert demo() == RESUMED


def test_a_demo_that_failed_in_its_first_save_starts_again(demo, tmp_path, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    trainer = begin_demo(tmp_path)
    monkeypatch.setattr(sharded_tensors, "write_tensors", interrupt)
    monkeypatch.setattr(saver_module.shutil, "rmtree", lambda *arguments, **options: None)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    monkeypatch.undo()
    assert list((tmp_path / "runs" / "demo" / "checkpoints").glob(".step-*/model.safetensors"))
    assert demo() == FRESH
    assert begin_demo(tmp_path).run()
