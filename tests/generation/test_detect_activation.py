"""A Mamba-3 checkpoint that does not say which activation it was trained with, and block options that say it."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import anymamba
from anymamba import MambaLM
from anymamba.checkpoints.load import load_model
from anymamba.cli.main import main
from anymamba.generation.detect_activation import detect_activation
from anymamba.generation.tokenizers import ByteTokenizer
from tests.models.cases import small_lm

FIXTURES = Path(__file__).parents[1] / "fixtures"
CHOICES = ("heavy_tail", "softplus")
IDS = torch.tensor([list(b"def read(self):\n")])


def silent(activation):
    return FIXTURES / f"mamba3_silent_{activation}"


def activation_of(model):
    (activation,) = {layer.mixer.config.a_activation for layer in model.backbone.layers}
    return activation


@pytest.mark.parametrize("trained", CHOICES)
def test_a_text_finds_the_activation_that_a_model_was_trained_with(trained):
    model = load_model(silent(trained), dtype=torch.float32)
    evidence = detect_activation(model, ByteTokenizer())
    assert evidence.activation == trained
    assert min(evidence.bits, key=evidence.bits.get) == trained
    assert activation_of(model) == model.config.ssm_cfg["a_activation"] == trained
    declared = MambaLM.from_pretrained(silent(trained), dtype=torch.float32, ssm_cfg={"a_activation": trained})
    assert torch.equal(model(IDS).logits, declared(IDS).logits)
    assert detect_activation(declared, ByteTokenizer()) is None


@pytest.mark.usefixtures("unchecked")  # of the tokenizer
def test_a_model_that_learned_nothing_stays_undecided_and_says_what_to_pass(tmp_path):
    small_lm("Mamba3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["ssm_cfg"].pop("a_activation") == "heavy_tail"  # ours say it
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path)
    letters = type("Letters", (), {"encode": lambda self, text: [ord(c) % 29 for c in text]})()
    evidence = detect_activation(model, letters)
    assert evidence.activation == ""
    assert "Choose one with --block a_activation=softplus or heavy_tail" in str(evidence)
    assert activation_of(model) == "heavy_tail"
    model.save_pretrained(tmp_path / "again")
    assert "a_activation" not in json.loads((tmp_path / "again" / "config.json").read_text())["ssm_cfg"]


def test_a_silent_config_is_warned_of_unless_somebody_says(recwarn):
    with pytest.warns(UserWarning, match=r'pass ssm_cfg=\{"a_activation": "softplus"\}'):
        MambaLM.from_pretrained(silent("softplus"))
    with pytest.warns(UserWarning, match="using softplus .* bits per byte of sample texts"):
        text = anymamba.pipeline(silent("softplus"), dtype=torch.float32)
    assert activation_of(text.model) == "softplus"
    recwarn.clear()
    for activation in CHOICES:
        options = {"a_activation": activation}
        model = MambaLM.from_pretrained(silent("softplus"), ssm_cfg=options)
        assert activation_of(model) == activation
        assert anymamba.pipeline(silent("softplus"), ssm_cfg=options).model.config == model.config
    assert not recwarn


def test_the_command_decides_says_so_and_writes_it(tmp_path, capsys):
    assert main(["convert", str(silent("softplus")), str(tmp_path / "out")]) == 0
    error = capsys.readouterr().err
    assert error.startswith(
        "anymamba: the config does not name the activation of Mamba-3's decay rates: using softplus"
    )
    assert error.count("\n") == 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["ssm_cfg"]["a_activation"] == "softplus"
    assert main(["eval", str(tmp_path / "out"), str(Path(__file__).parents[2] / "README.md")]) == 0
    assert "decay rates" not in capsys.readouterr().err
    options = ["--prompt", "def", "--max-new-tokens", "2", "--block", "a_activation=heavy_tail"]
    assert main(["generate", str(silent("softplus")), *options]) == 0
    assert "decay rates" not in capsys.readouterr().err
    assert main(["info", str(silent("softplus"))]) == 0
    assert "not given in the config: heavy_tail or softplus" in capsys.readouterr().out


@pytest.mark.filterwarnings("default")
def test_without_a_tokenizer_the_command_warns(tmp_path, capsys):
    source = shutil.copytree(Path(__file__).parents[1] / "golden" / "lm_mamba3_siso", tmp_path / "in")
    assert main(["convert", str(source), str(tmp_path / "out")]) == 0
    error = capsys.readouterr().err
    assert "no tokenizer to decide with" in error
    assert "pass --block a_activation=softplus" in error
    assert "a_activation" not in json.loads((tmp_path / "out" / "config.json").read_text())["ssm_cfg"]
    assert main(["convert", str(source), str(tmp_path / "declared"), "--block", "a_activation=softplus"]) == 0
    assert capsys.readouterr().err == ""
    assert json.loads((tmp_path / "declared" / "config.json").read_text())["ssm_cfg"]["a_activation"] == "softplus"


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("a_activation=relu", "must be one of heavy_tail, softplus, got 'relu'"),
        ("a_activatoin=softplus", "entries that Mamba3 does not know: ['a_activatoin']"),
        ("is_mimo=true", "the weights do not fit the config"),
        ("d_state=16.5", 'ssm_cfg["d_state"] must be int, got 16.5'),
        ("softplus", "expected NAME=VALUE, got 'softplus'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_wrong_block_option_is_one_line(option, error, capsys):
    assert main(["info", str(silent("softplus")), "--block", option]) == 2
    err = capsys.readouterr().err
    assert error in err
    assert err.count("\n") == 1


def test_unknown_options_are_kept_and_those_without_effect_are_taken(tmp_path):
    source = shutil.copytree(Path(__file__).parents[1] / "golden" / "lm_mamba3_siso", tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    config["ssm_cfg"] |= {"dropout": 0.1, "n_layer": 3, "fuse_pregate_headwise_norm": False, "a_activation": "softplus"}
    plain = load_model(source, ssm_cfg={"a_activation": "softplus"})
    config["ssm_cfg"]["future_option"] = [1, 2]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.warns(
        UserWarning, match="that Mamba3 does not know: future_option; they are kept but not used"
    ) as caught:
        model = MambaLM.from_pretrained(source)
    assert len(caught) == 1
    ids = torch.arange(9).unsqueeze(0)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    model.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["ssm_cfg"] == config["ssm_cfg"]
    with pytest.raises(ValueError, match=r"entries that Mamba2 does not know: \['dropout'\]"):
        anymamba.MambaLMConfig(ssm_cfg={"layer": "Mamba2", "dropout": 0.1})
