"""Constrained output over HTTP, with the official client."""

import json
import threading
import time

import pytest
import torch

from anymamba.generation import ByteTokenizer, Grammar, Pipeline, compile_grammar, generate

pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Answer(pydantic.BaseModel):
    is_raining: bool
    places: list[bool] = pydantic.Field(max_length=2)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "array", "items": {"type": "null"}, "maxItems": 2}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TALK = [{"role": "user", "content": "Is it raining?"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as official:
        yield official


def ask(client, **options):
    return client.chat.completions.create(model="tiny", messages=TALK, **{"max_tokens": 200, **options})


def json_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_the_client_parses_a_reply_into_a_model_class(client):
    reply = client.chat.completions.parse(
        model="tiny", messages=TALK, max_tokens=300, response_format=Answer, seed=1, temperature=0.8
    )
    assert reply.choices[0].finish_reason == "stop"
    assert isinstance(reply.choices[0].message.parsed, Answer)


def test_every_choice_follows_the_schema(client):
    reply = ask(client, response_format=json_schema(SCHEMA), n=5, seed=2, logprobs=True, top_logprobs=2)
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        assert set(json.loads(choice.message.content)) == {"a", "b"}
        assert "".join(part.token for part in choice.logprobs.content) == choice.message.content


def test_a_stream_has_the_text_of_a_complete_reply(client):
    options = {"response_format": json_schema(SCHEMA), "seed": 5}
    chunks = list(ask(client, stream=True, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == ask(client, **options).choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "options", [{"choices": ["yes", "no"]}, {"regex": "yes|no"}, {"grammar": 'root ::= "yes" | "no"'}]
)
def test_fields_beyond_the_api_of_openai(client, options):
    assert ask(client, extra_body=options).choices[0].message.content in ("yes", "no")
    reply = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=5, extra_body=options)
    assert {choice.text for choice in reply.choices} <= {"yes", "no"}
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}


def test_a_json_object_is_one(client):
    reply = client.chat.completions.create(
        model="tiny",
        messages=TALK,
        max_tokens=200,
        seed=1,
        response_format={"type": "json_object"},
        logit_bias={str(ord("}")): 30},
    )
    assert reply.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(reply.choices[0].message.content), dict)
    assert ask(client, response_format={"type": "text"}).choices[0].message.content


def test_a_constrained_completion_has_the_bits_of_generate_in_any_company(client, served):
    model, _ = served
    compiled = compile_grammar(Grammar.from_schema(SCHEMA), ByteTokenizer())
    prompts = ["one", "two, and more", "three"]
    texts = {}

    def complete(prompt, **options):
        reply = client.completions.create(model="tiny", prompt=prompt, max_tokens=90, seed=3, **options)
        texts[prompt, bool(options)] = reply.choices[0].text

    constrained = {"extra_body": {"response_format": json_schema(SCHEMA)}}
    threads = [threading.Thread(target=complete, args=(p,), kwargs=o) for p in prompts for o in ({}, constrained)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt in prompts:
        ids = torch.tensor([list(prompt.encode())])
        for grammar in (None, compiled):
            expected = generate(model, ids, 90, temperature=1.0, seed=3, segment_len=32, grammar=grammar)
            assert texts[prompt, grammar is not None] == ByteTokenizer().decode(expected.rows()[0])


def test_a_session_goes_on_after_a_text_that_its_grammar_ended(client, served):
    model, _ = served
    text = Pipeline(model, ByteTokenizer())
    body = {"session": "constrained", "choices": ["yes", "no"]}
    first = client.completions.create(model="tiny", prompt="a", temperature=0, extra_body=body).choices[0].text
    second = client.completions.create(
        model="tiny", prompt="b", max_tokens=9, temperature=0, extra_body={"session": "constrained"}
    )
    assert second.choices[0].text == text(f"a{first}b", 9).text
    assert second.usage.prompt_tokens == 2 + len(first)


def test_the_next_turn_of_a_chat_reads_only_what_is_new(client):
    options = {"extra_body": {"choices": ["yes", "no"]}, "temperature": 0}
    talk = [{"role": "user", "content": "Is this a new conversation?"}]
    first = client.chat.completions.create(model="tiny", messages=talk, **options)
    talk += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And now?"},
    ]
    usage = client.chat.completions.create(model="tiny", messages=talk, **options).usage
    assert usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens + first.usage.completion_tokens


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"response_format": json_schema({"type": "foo"})}, "response_format", "the JSON schema cannot be used"),
        ({"response_format": {"type": "xml"}}, "response_format", "must be an object whose type is text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "must be a JSON schema"),
        ({"regex": "("}, "regex", "the regular expression cannot be used"),
        ({"regex": 3}, "regex", "regex must be a text"),
        ({"choices": [1]}, "choices", "list of texts"),
        ({"grammar": "start: missing"}, "grammar", "the grammar cannot be used"),
        ({"grammar": "start: a", "regex": "a"}, "grammar", "expected one of response_format, regex, grammar"),
    ],
)
def test_a_grammar_that_cannot_be_is_a_400(client, options, param, words):
    with pytest.raises(openai.BadRequestError, match=words) as error:
        ask(client, extra_body=options)
    assert error.value.param == param


def test_a_grammar_that_explodes_is_a_400_and_delays_nobody(client, server):
    lines = "\n".join(f"r{i}: r{i + 1}" for i in range(40000))
    slow = "start: " + " | ".join(f'"{i * 7919:x}"' for i in range(60000))
    errors = []

    def explode(grammar):
        try:
            ask(client, extra_body={"grammar": grammar})
        except openai.BadRequestError as error:
            errors.append(str(error))

    grammars = [f'start: r0\n{lines}\nr40000: "a"', slow]
    threads = [threading.Thread(target=explode, args=(grammar,)) for grammar in grammars]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert ask(client, temperature=0).choices[0].finish_reason
        time.sleep(0.1)
    assert len(errors) == 2
    # On a fast processor, the second one may be compiled in time, and exceed the engine's limits afterwards.
    assert all("cannot be used" in error or "too complex" in error for error in errors), errors
