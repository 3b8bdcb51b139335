import base64
import json

import numpy as np
import pytest
import torch

from anymamba import MaskedLM
from anymamba.cli.main import main
from tests.serving.bodies import WRONG
from tests.serving.running import Running

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """Start a server of a model; return both."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("embeddings") / "vectors"
    stack = {"d_model": 16, "n_layer": 2, "ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 8}}
    model = MaskedLM(vocab_size=257, bidirectional=True, stack=stack).eval()
    model.save_pretrained(directory)
    server = Running(directory, "--max-prompt", "500", "--tokenizer", "bytes")
    yield model, server
    assert server.stop() == 0


@pytest.fixture
def client(embedder):
    with openai.OpenAI(base_url=f"{embedder[1].url}/v1", api_key="none", max_retries=0, timeout=60) as official:
        yield official


def alone(model, ids):
    with torch.no_grad():
        return model.embed(torch.tensor([ids]))[0].tolist()


def test_the_official_client_gets_what_the_model_gives_each_text_alone(embedder, client):
    texts = ["A river.", "ü", "A much longer text about a house by the river. " * 5]
    expected = [alone(embedder[0], list(text.encode())) for text in texts]
    for encoding in ({}, {"encoding_format": "float"}):  # the client asks for base64 by default
        response = client.embeddings.create(model="vectors", input=texts, **encoding)
        assert [entry.embedding for entry in response.data] == expected
        assert [entry.index for entry in response.data] == [0, 1, 2]
        assert response.usage.prompt_tokens == response.usage.total_tokens == sum(len(text.encode()) for text in texts)
    one = client.embeddings.create(model="vectors", input=[1, 2, 256], dimensions=16).data[0].embedding
    assert one == alone(embedder[0], [1, 2, 256])
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-5)
    assert client.models.retrieve("vectors").dimensions == 16


def test_base64_is_little_endian_float32(embedder):
    encoded = embedder[1].post("/v1/embeddings", input="x", encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == alone(embedder[0], [120])


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": ""}, "input", "none of them empty"),
        ({"input": ["a", []]}, "input", "input must be a string"),
        ({"input": [257]}, "input", "between 0 and 256, got 257"),
        ({"input": "x" * 501}, "input", "may have at most 500 tokens, got at least 501"),
        ({"input": ["x"] * 2049}, "input", "up to 2,048"),
        ({"input": "x", "dimensions": 8}, "dimensions", "must be 16 or left out, got 8"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "float or base64"),
        ({"input": "x", "temperature": 1}, "temperature", "unknown field"),
        ({}, "input", "got null"),
    ],
)
def test_a_mistake_names_the_field(embedder, body, param, message):
    status, _, content = embedder[1].ask("/v1/embeddings", body)
    error = json.loads(content)["error"]
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


def test_any_value_is_accepted_or_rejected(embedder):
    for field in ("input", "model", "dimensions", "encoding_format", "user"):
        for value in WRONG:
            status, _, content = embedder[1].ask("/v1/embeddings", {"input": "x", field: value})
            assert status == 200 or (status in (400, 404) and json.loads(content)["error"]["message"]), (field, value)


def test_each_kind_of_model_says_what_it_can_do(embedder, server, client):
    with pytest.raises(openai.BadRequestError, match="this model does not generate text"):
        client.completions.create(model="vectors", prompt="x")
    assert embedder[1].ask("/")[0] == 400
    assert embedder[1].metrics()["anymamba_requests_open"] == 0
    assert json.loads(embedder[1].ask("/health")[2])["status"] == "ok"
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as other,
        pytest.raises(openai.BadRequestError, match="this model does not give embeddings") as error,
    ):
        other.embeddings.create(model="tiny", input="x")
    assert error.value.code == "model_without_embeddings"


def test_options_of_language_models_are_rejected(embedder, tmp_path, capsys):
    embedder[0].save_pretrained(tmp_path)
    assert main(["serve", str(tmp_path), "--weights", "int8"]) == 2
    assert "apply to language models" in capsys.readouterr().err
