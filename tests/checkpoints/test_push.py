import json
import os
import subprocess
import sys

import pytest

from anymamba import MambaLM
from tests.checkpoints.hub_server import hub
from tests.generation.cases import bare
from tests.models.cases import small_lm

pytest.importorskip("huggingface_hub")


@pytest.fixture
def model(tmp_path):
    """Save a model in a directory, with a tokenizer."""
    small_lm(vocab_size=256, ssm_cfg={"layer": "Mamba2", "headdim": 8}).save_pretrained(tmp_path / "model")
    bare(tmp_path / "model", "<|endoftext|>")
    (tmp_path / "model" / "metrics.csv").write_text("not for the hub")
    return tmp_path / "model"


def command(address, home, *arguments, token="stand-in"):
    environment = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_TOKEN": token, "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-m", "anymamba", *map(str, arguments)],
        env={**os.environ, **environment, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_is_pushed_can_be_fetched(model, tmp_path):
    with hub() as (address, repositories):
        done = command(address, tmp_path / "home", "push", model, "me/mine", "--private")
        assert (done.returncode, done.stdout) == (0, f"{address}/me/mine/commit/{'a' * 40}\n"), done.stderr
        names = {"config.json", "model.safetensors", "README.md", "tokenizer.json"}
        assert repositories["me/mine"].keys() == names
        assert b'anymamba.pipeline("me/mine")' in repositories["me/mine"]["README.md"]
        fetched = command(address, tmp_path / "home", "convert", "me/mine", tmp_path / "back")
        assert fetched.returncode == 0, fetched.stderr
    assert MambaLM.from_pretrained(tmp_path / "back").fingerprint() == MambaLM.from_pretrained(model).fingerprint()
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_another_format_names_the_end_of_a_text(model, tmp_path):
    (model / "README.md").write_text("# Mine")
    with hub() as (address, repositories):
        done = command(address, tmp_path / "home", "push", model, "me/mine", "--format", "transformers")
        assert done.returncode == 0, done.stderr
    config = json.loads(repositories["me/mine"]["config.json"])
    assert (config["model_type"], config["eos_token_id"]) == ("mamba2", 1)
    assert repositories["me/mine"]["README.md"] == b"# Mine"


def test_a_rejected_push_is_one_line(model, tmp_path):
    with hub(rejects_writes=True) as (address, _):
        done = command(address, tmp_path / "home", "push", model, "me/mine")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("anymamba: me/mine: the hub did not accept it (")


def test_a_network_that_fails_is_one_line(model, tmp_path):
    done = command("http://127.0.0.1:9", tmp_path / "home", "push", model, "me/mine")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("anymamba: me/mine: the hub did not accept it (")


def test_a_name_that_is_none_is_rejected_before_anything_is_written():
    with pytest.raises(ValueError, match=r'just-a-name: expected the id of a hub repository \("owner/name"\)'):
        small_lm().push_to_hub("just-a-name")


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ValueError, match=r"to write to the hub, install huggingface_hub \(pip install 'anymamba\[hf\]'\)"
    ):
        small_lm().push_to_hub("me/mine")
