import asyncio
import json
import threading

import pytest
from starlette.requests import Request

from anymamba.serving.api.fields import ApiError, parse_body, preview
from anymamba.serving.api.requests import Limits, read_chat, read_completion, read_text, read_tokens
from anymamba.serving.routes import read_request
from tests.serving.bodies import bodies

LIMITS = Limits(max_tokens=100, max_choices=4)


def completion(**body):
    return read_completion({"prompt": "x", **body}, LIMITS, 256, "m")


def chat(**body):
    return read_chat({"messages": [{"role": "user", "content": "x"}], **body}, LIMITS, 256, "m")


def test_fields_that_are_left_out_have_the_defaults_of_the_api():
    request = completion()
    assert (request.max_tokens, request.n, request.stop_texts, request.stream, request.logprobs) == (
        16,
        1,
        (),
        False,
        None,
    )
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, None)
    assert request.sampling.seed != completion().sampling.seed
    assert chat().max_tokens == 100


@pytest.mark.parametrize(
    ("read", "body", "message"),
    [
        (lambda body: read_text(body, "m"), {"prompt": [1]}, "prompt must be a text"),
        (lambda body: read_text(body, "m"), {"prompt": ""}, "prompt must be a text"),
        (lambda body: read_text(body, "m"), {"text": "a"}, "unknown field"),
        (lambda body: read_tokens(body, 256, "m"), {"tokens": "a"}, "must be a list of token ids"),
        (lambda body: read_tokens(body, 256, "m"), {"tokens": [[1]]}, "must be a list of token ids"),
        (lambda body: read_tokens(body, 256, "m"), {"tokens": [256]}, "between 0 and 255, got 256"),
    ],
)
def test_texts_and_tokens_to_convert_are_checked(read, body, message):
    with pytest.raises(ApiError, match=message):
        read(body)


def test_both_forms_of_a_field_are_one():
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(stop="a").stop_texts == completion(stop=["a"]).stop_texts == ("a",)
    assert chat(max_completion_tokens=7).max_tokens == chat(max_tokens=7).max_tokens == 7
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "developer", "content": parts}]).messages == [{"role": "system", "content": "ab"}]


@pytest.mark.parametrize(
    ("read", "body", "param", "message"),
    [
        (completion, {"n": 5}, "n", "n must be an integer from 1 to 4, got 5"),
        (completion, {"n": True}, "n", "n must be an integer"),
        (completion, {"n": 2, "prompt": ["a", "b", "c"]}, "n", "may ask for at most 4 continuations .*, got 6"),
        (completion, {"n": 2, "session": "s"}, "n", "a session takes one continuation"),
        (completion, {"prompt": [256]}, "prompt", "token ids must be between 0 and 255, got 256"),
        (completion, {"prompt": None}, "prompt", "prompt must be a string"),
        (completion, {"top_p": 0}, "top_p", "above 0"),
        (completion, {"temperature": float("nan")}, "temperature", "got NaN"),
        (completion, {"repetition_penalty": 1e-40}, "repetition_penalty", "between 1e-30 and"),
        (completion, {"repetition_penalty": 1e-40}, "repetition_penalty", "repetition_penalty must be"),
        (completion, {"seed": 2**64}, "seed", "seed must be an integer"),
        (completion, {"logit_bias": {"256": 1}}, "logit_bias", "below 256"),
        (completion, {"logit_bias": {"1": 101}}, "logit_bias.1", "from -100"),
        (completion, {"stop": ["a"] * 17}, "stop", "up to 16"),
        (completion, {"best_of": 3, "n": 2}, "best_of", "best_of must be equal to n"),
        (completion, {"suffix": "x"}, "suffix", "not supported"),
        (completion, {"tokens": 8}, "tokens", 'unknown field "tokens"; did you mean max_tokens'),
        (completion, {"stream_options": {}}, "stream_options", "requires stream"),
        (completion, {"session": "x" * 257}, "session", "1 to 256 characters"),
        (chat, {"top_logprobs": 1}, "top_logprobs", "requires logprobs"),
        (chat, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "one of system"),
        (chat, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "must be text"),
        (chat, {"functions": [{}]}, "functions", "not supported"),
        (chat, {"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "got both"),
    ],
)
def test_a_mistake_names_the_field(read, body, param, message):
    with pytest.raises(ApiError, match=message) as error:
        read(**body)
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"n": }', "not readable JSON (Expecting value: line 1 column 7 (char 6))"),
        (b"[" * 10**5, "not readable JSON (nested too deeply)"),
        (b"\xff", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_a_body_that_is_not_json_is_rejected_with_the_position(content, message):
    error = problem("/v1/completions", content)
    assert (error.status, str(error)) == (400, f"the body must be a JSON object in UTF-8: {message}")


def problem(path, content):
    """Return what is wrong with a body, None if nothing is."""
    try:
        (read_chat if "chat" in path else read_completion)(parse_body(content), LIMITS, 256, "m")
    except ApiError as error:
        return error
    return None


def test_any_body_is_read_or_rejected_in_one_line():
    errors = [error for path, content in bodies(3000, seed=2) if (error := problem(path, content)) is not None]
    assert 1500 < len(errors) < 3000
    for error in errors:
        assert error.status in (400, 404)
        assert "\n" not in error.message
        assert len(error.message) < 600
        json.dumps(error.body()).encode()


def test_the_server_answers_any_body_with_a_client_error_or_success(server):
    statuses = set()
    for path, content in bodies(300, seed=3):
        status, _, answer = server.ask(path, content, timeout=30)
        assert status == 200 or (400 <= status < 500 and json.loads(answer)["error"]["message"]), (status, content)
        statuses.add(status)
    assert {200, 400} <= statuses
    assert server.ask("/health")[0] == 200


class Unvisited(dict):
    def values(self):
        raise AssertionError("a large value must not be visited")


def test_a_large_value_is_described_by_its_size():
    assert preview(Unvisited.fromkeys(map(str, range(300_000)))) == "an object with 300,000 entries"
    assert preview([[0] * 600, [0] * 600]) == "a list with 2 entries"
    assert preview("x" * 10**6) == f'"{"x" * 59} ... (1000000 characters)'
    assert preview({"a": [1, None]}) == '{"a": [1, null]}'
    with pytest.raises(ApiError, match="got an object with 300,000 entries"):
        completion(logit_bias=Unvisited.fromkeys(map(str, range(300_000)), 1))


@pytest.mark.parametrize(("size", "is_elsewhere"), [(10, False), (2**17, True)])
def test_long_bodies_are_parsed_in_another_thread(size, is_elsewhere):
    content = json.dumps({"prompt": "x" * size}).encode()

    async def receive():
        return {"type": "http.request", "body": content, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
    thread = asyncio.run(read_request(request, LIMITS, lambda _: threading.get_ident()))
    assert (thread != threading.get_ident()) == is_elsewhere
