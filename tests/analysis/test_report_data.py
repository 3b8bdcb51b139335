import base64
import json
import re

import numpy as np
import pytest
import torch

from anymamba.analysis import dual_matrix, half_lives, layers, rotation_angles, state_measures, step_sizes
from anymamba.analysis.report_data import render_page, report_data, token_texts
from anymamba.cli.main import main
from anymamba.generation.tokenizers import ByteTokenizer
from tests.models.cases import FAMILIES, small_lm

TEXT = "a </script><img src=x> & grüße\n"


def model_of_bytes(family="Mamba2"):
    return small_lm(family, vocab_size=256, pad_vocab_size_multiple=1)


def data_of(model, text=TEXT):
    ids = ByteTokenizer().encode(text)
    return ids, report_data(model, ByteTokenizer(), ids, name="<i>small</i>", text_tokens=len(ids))


def read_embedded_data(content):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', content).group(1))


def unpack(series):
    levels = np.frombuffer(base64.b64decode(series["data"]), "<i2").astype(float)
    x = series["low"] + (levels + 32768) / 65535 * (series["high"] - series["low"])
    return 10**x if series["log"] else x


def lower_triangle(matrix):
    """Return the weights as the page unpacks them."""
    levels = np.frombuffer(base64.b64decode(matrix["data"]), "i1") / 127
    weights = np.zeros((matrix["side"], matrix["side"]))
    weights[np.tril_indices(matrix["side"])] = levels**3 * matrix["most"]
    return weights


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_page_unpacks_is_what_the_functions_give(family):
    model = model_of_bytes(family)
    ids, data = data_of(model)
    page_data = read_embedded_data(render_page(data))
    assert page_data == json.loads(json.dumps(data))
    with torch.no_grad():
        for layer, (block, x) in zip(page_data["layers"], layers(model, torch.tensor([ids])), strict=True):
            measures, lives = state_measures(block, x), half_lives(block, x)
            lives = lives.amax(-1) if lives.ndim == 4 else lives
            expected = {"dt": step_sizes(block, x), "half_life": lives, "norm": measures.norm, "read": measures.read}
            for head in layer["heads"]:
                for name, values in expected.items():
                    np.testing.assert_allclose(
                        unpack(head[name]), values[0, :, head["number"]], rtol=2e-3, err_msg=name
                    )
                weights = dual_matrix(block, x, heads=[head["number"]])[0, 0]
                if ranks := head["matrix"]["ranks"] - 1:
                    weights = weights.unflatten(1, (-1, ranks + 1)).unflatten(0, (-1, ranks + 1))
                    weights = weights.square().sum((1, 3)).sqrt()
                largest = weights.abs().max().item()
                np.testing.assert_allclose(lower_triangle(head["matrix"]), weights, atol=0.013 * largest)
            if family.startswith("Mamba3"):
                rotation = head["rotation"]
                assert rotation["unit"] == ("block" if block.config.rotation == "quaternion" else "pair")
                angles = rotation_angles(block, x)[0, :, head["number"]].T / torch.pi
                levels = np.frombuffer(base64.b64decode(rotation["data"]), "i1").reshape(angles.shape) / 127
                np.testing.assert_allclose(
                    levels * head["rotation"]["most"], angles, atol=0.005 * head["rotation"]["most"]
                )


def test_text_of_the_user_stays_text_and_nothing_is_fetched():
    _, data = data_of(model_of_bytes())
    content = render_page(data)
    assert "<img" not in content
    assert "<i>" not in content
    assert content.count("</script>") == 2
    assert "default-src 'none'" in content
    assert not re.search(r"https?:|url\(|@import|\ssrc=|\shref=", re.sub(r'id="data">.*?</script>', "", content))
    assert "".join(read_embedded_data(content)["tokens"]) == TEXT


def test_undecodable_bytes_and_unfinished_characters_are_shown():
    assert token_texts(ByteTokenizer(), [*"ü".encode(), 0xC3]) == ["", "ü", "\ufffd"]
    _, data = data_of(model_of_bytes(), b"a\xff".decode("utf-8", "surrogateescape"))
    render_page(data).encode("utf-8")


def test_a_page_of_many_heads_and_tokens_stays_small():
    model = small_lm(
        vocab_size=256, n_layer=4, d_model=64, ssm_cfg={"layer": "Mamba2", "d_state": 4, "headdim": 4, "expand": 2}
    )
    _, data = data_of(model, "x" * 160)
    assert sum(len(layer["heads"]) for layer in data["layers"]) == 128
    assert data["layers"][0]["heads"][0]["matrix"]["cell"] == 2
    assert len(render_page(data)) < 4e6


@pytest.fixture
def directory(tmp_path):
    model_of_bytes("Mamba3").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_command_writes_a_page(directory, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["inspect", str(directory), "--prompt", "hello", "--tokens", "3", "--out", str(out)]) == 0
    data = read_embedded_data(out.read_text(encoding="utf-8"))
    assert (data["tokens"], data["whole"], data["name"]) == (["h", "e", "l"], 5, "model")
    assert "the first 3 of 5 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "the text is empty"),
        (["--prompt", "a", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--prompt", "a", "--out", "missing/page.html"], "there is no such directory"),
        (["--prompt", "a", "--out", "."], "it is a directory"),
        (["--file", "missing.txt"], "no such file"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(directory, tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", str(directory), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
