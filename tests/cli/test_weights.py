"""The command line with weights in fewer bits."""

import json

import pytest

from anymamba.cli import info
from anymamba.cli.options import WEIGHTS
from anymamba.core.weight_formats import FORMAT_SPECS
from anymamba.kernels.cpu.bindings import LIBRARY
from tests.models.cases import small_lm


@pytest.fixture
def model(tmp_path):
    small_lm(vocab_size=257).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_options_are_the_formats():
    assert tuple(FORMAT_SPECS) == WEIGHTS


@pytest.mark.parametrize("format", FORMAT_SPECS)
def test_a_converted_model_generates_and_scores_what_the_model_loaded_so_does(run, model, tmp_path, format):
    code, out, _ = run("convert", model, tmp_path / "small", "--weights", format)
    assert (code, format in out) == (0, True)
    options = ("--tokenizer", "bytes", "--prompt", "ab", "--max-new-tokens", 5)
    code, direct, _ = run("generate", model, "--weights", format, *options)
    assert code == 0
    assert run("generate", tmp_path / "small", *options)[:2] == (0, direct)
    (tmp_path / "text").write_text("some text to be scored")
    scores = [
        run("eval", where, tmp_path / "text", "--tokenizer", "bytes", *more)
        for where, more in ((model, ("--weights", format)), (tmp_path / "small", ()))
    ]
    assert scores[0][0] == 0
    assert [line for line in scores[0][1].splitlines() if "bits" in line] == [
        line for line in scores[1][1].splitlines() if "bits" in line
    ]


def test_info_shows_bytes_and_bits(run, model, tmp_path):
    assert run("convert", model, tmp_path / "small", "--weights", "int8")[0] == 0
    _, plain, _ = run("info", model)
    _, quantized, _ = run("info", tmp_path / "small")
    _, asked, _ = run("info", model, "--weights", "int8")
    assert "32.00 bits each" in plain
    assert "in int8, computing in torch.float32" in quantized
    lines = [
        [line for line in text.splitlines() if line.startswith(("weights", "parameters"))]
        for text in (quantized, asked)
    ]
    assert lines[0] == lines[1]
    assert [x for x in plain.splitlines() if x.startswith("parameters")] == [lines[0][0]]


def test_info_shows_how_prompts_are_multiplied(run, model, monkeypatch):
    def products(*options):
        code, out, _ = run("info", model, *options)
        assert code == 0
        return [line for line in out.splitlines() if line.startswith("matmul")]

    assert products() == []
    if LIBRARY.handle is None:
        assert "dequantized weights" in products("--weights", "int4")[0]
        return
    assert "in float32, with some rows" in products("--weights", "int4")[0]
    assert "in float32, with some rows" in products("--weights", "bfloat16")[0]
    for has_units, expected in ((True, "in bfloat16, for which"), (False, "in float32: this processor")):
        monkeypatch.setattr(info, "multiplies_bfloat16", lambda has=has_units: has)
        assert expected in products("--weights", "bfloat16", "--dtype", "bfloat16")[0]


def test_a_state_of_other_weights_is_rejected(run, model, tmp_path):
    options = ("--tokenizer", "bytes", "--prompt", "ab", "--max-new-tokens", 2)
    state = tmp_path / "state"
    assert run("generate", model, *options, "--save-state", state)[0] == 0
    code, _, err = run("generate", model, "--weights", "int8", *options, "--load-state", state)
    assert (code, err.count("\n")) == (2, 1)
    assert "fingerprint" in err


def test_mistakes_are_one_line(run, model, tmp_path):
    for arguments, message in (
        (("generate", model, "--weights", "int2"), "expected one of bfloat16, float16, int8, int4, got 'int2'"),
        (("convert", model, tmp_path / "x", "--weights", "int8", "--format", "transformers"), "cannot hold weights"),
    ):
        code, out, err = run(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
    assert not (tmp_path / "x").exists()
    assert run("convert", model, tmp_path / "small", "--weights", "int8")[0] == 0
    code, _, err = run("train", "--model.init", tmp_path / "small", "--out", tmp_path / "run")
    assert (code, err.count("\n")) == (2, 1)
    assert "weights in int8 cannot be trained" in err
    config = tmp_path / "small" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    code, _, err = run("info", tmp_path / "small")
    assert (code, err.count("\n")) == (2, 1)
    assert "quantized with 'gptq'" in err


def test_a_cut_file_is_one_line(run, model, tmp_path):
    assert run("convert", model, tmp_path / "small", "--weights", "int4")[0] == 0
    file = tmp_path / "small" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    code, _, err = run("generate", tmp_path / "small", "--tokenizer", "bytes", "--prompt", "ab")
    assert (code, err.count("\n")) == (2, 1)
    assert "model.safetensors" in err
