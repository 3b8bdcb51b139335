"""Published checkpoints whose files leave out the tokenizer and Mamba-3's activation."""

import json
import shutil

import pytest

from anymamba.checkpoints import known
from anymamba.checkpoints.known import find_known_checkpoint
from anymamba.checkpoints.open import open_checkpoint, read_config
from anymamba.cli.main import main
from anymamba.generation.tokenizers import load_tokenizer
from anymamba.models.config import MambaLMConfig, is_ambiguous
from tests.models.cases import small_lm

# As published, in July 2026.
SISO_187M = {
    "d_model": 768,
    "d_intermediate": 1536,
    "n_layer": 12,
    "vocab_size": 128256,
    "ssm_cfg": {"layer": "Mamba3", "d_state": 128, "expand": 2, "headdim": 64, "is_mimo": False, "chunk_size": 64},
    "pad_vocab_size_multiple": 16,
}
MIMO = {**SISO_187M["ssm_cfg"], "is_mimo": True, "mimo_rank": 4, "chunk_size": 16}


@pytest.mark.parametrize(
    ("fields", "name", "tokenizer"),
    [
        (SISO_187M, "mamba3-siso-187m", "meta-llama/Llama-3.1-8B"),
        ({**SISO_187M, "d_intermediate": 1264, "ssm_cfg": MIMO}, "mamba3-mimo-187m", "meta-llama/Llama-3.1-8B"),
        ({"d_model": 768, "n_layer": 24, "vocab_size": 50277}, "mamba-130m", "EleutherAI/gpt-neox-20b"),
        (
            {"d_model": 2560, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"}},
            "mamba2-2.7b",
            "EleutherAI/gpt-neox-20b",
        ),
    ],
)
def test_published_checkpoints_are_recognized_by_their_sizes(fields, name, tokenizer):
    checkpoint = find_known_checkpoint(MambaLMConfig.from_dict(fields))
    assert checkpoint.name == f"state-spaces/{name}"
    assert checkpoint.tokenizer == tokenizer
    assert checkpoint.activation == ("heavy_tail" if "mamba3" in name else "")


@pytest.mark.parametrize("change", [{"n_layer": 13}, {"d_model": 1024}, {"vocab_size": 50277}, {"ssm_cfg": {}}])
def test_other_sizes_are_not(change):
    assert find_known_checkpoint(MambaLMConfig.from_dict({**SISO_187M, **change})) is None


def test_the_activation_of_a_published_checkpoint_is_known_and_of_others_is_not(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SISO_187M))
    config = read_config(tmp_path)
    assert config.ssm_cfg["a_activation"] == "heavy_tail"
    assert not is_ambiguous(config)
    (tmp_path / "config.json").write_text(json.dumps({**SISO_187M, "n_layer": 13}))
    assert is_ambiguous(read_config(tmp_path))


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Return the directory of a tiny Mamba-3 that the table takes for a published one, and the tokenizer's name."""
    directory = tmp_path / "model"
    small_lm("Mamba3", vocab_size=1000).save_pretrained(directory)
    raw = json.loads((directory / "config.json").read_text())
    del raw["ssm_cfg"]["a_activation"]
    (directory / "config.json").write_text(json.dumps(raw))
    monkeypatch.setitem(known._MODELS, ("Mamba3", False, raw["d_model"], raw["n_layer"]), "official/tiny")
    monkeypatch.setitem(known._VOCABULARIES, "Mamba3", 1000)
    monkeypatch.setitem(known._TOKENIZERS, 1000, "official/tokenizer")
    return directory


def serve_hub(monkeypatch, tokenizer):
    """Make the hub have the repository of the tokenizer, or nothing for None."""
    hub = pytest.importorskip("huggingface_hub")

    def snapshot_download(name, allow_patterns):
        assert name == "official/tokenizer"
        if tokenizer is None:
            raise OSError("403: access to this repository is restricted\nlog in")
        return str(tokenizer)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)


@pytest.mark.filterwarnings("always:.*using that of official/tokenizer")
def test_generate_uses_the_tokenizer_and_activation_of_a_published_checkpoint(
    published, byte_level, monkeypatch, capsys
):
    serve_hub(monkeypatch, byte_level)
    assert main(["generate", str(published), "--prompt", "some text", "--max-new-tokens", "4"]) == 0
    err = capsys.readouterr().err
    assert "no tokenizer.json next to the weights: using that of official/tokenizer, as for official/tiny" in err
    assert "activation" not in err
    with pytest.warns(UserWarning, match="official/tokenizer"):
        assert load_tokenizer(None, published, 1000).end == [0]
    # What the user says has precedence.
    checkpoint = open_checkpoint(published, {"a_activation": "softplus"})
    assert checkpoint.config.ssm_cfg["a_activation"] == "softplus"
    shutil.copy(byte_level / "tokenizer.json", published)
    assert main(["generate", str(published), "--prompt", "some text", "--max-new-tokens", "4"]) == 0
    assert "using that of" not in capsys.readouterr().err


def test_a_tokenizer_that_cannot_be_fetched_is_named_in_one_line(published, monkeypatch, capsys):
    serve_hub(monkeypatch, None)
    assert main(["generate", str(published), "--prompt", "some text"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "official/tiny was trained with the tokenizer of official/tokenizer" in line
    assert "access to this repository is restricted" in line
    assert line.endswith("pass its tokenizer.json, or the hub id of a copy, with --tokenizer")


def test_a_vocabulary_of_known_size_suggests_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SISO_187M, "n_layer": 13}))
    with pytest.raises(ValueError, match=r"size of meta-llama/Llama-3\.1-8B's") as error:
        load_tokenizer(None, tmp_path, 128256)
    assert "\n" not in str(error.value)


def test_info_names_the_published_checkpoint(published, capsys):
    assert main(["info", str(published)]) == 0
    out = capsys.readouterr().out
    assert "official/tiny, with the tokenizer of official/tokenizer" in out
    assert "heavy_tail or softplus" not in out
