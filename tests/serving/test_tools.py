"""Tool calls over HTTP, with the official client."""

import json

import pytest

from anymamba.generation import ByteTokenizer, ChatTemplate
from anymamba.generation.tool_calls import FORMATS
from anymamba.serving.api.fields import ApiError
from anymamba.serving.api.requests import Limits, read_chat
from anymamba.serving.api.responses import ResponseBuilder
from anymamba.serving.scheduler.continuation import PromptDone, SequenceDone, TokenEvent, TokenText
from tests.serving.running import Running, make_model

pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

# As Hermes' and Qwen's templates: tools before the messages, calls as JSON between tags.
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking %}<think>{% endif %}{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["Kyiv", "Lviv"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "clock", "description": "The time."}},
]
WEATHER = {"type": "function", "function": {"name": "weather"}}
TALK = [{"role": "user", "content": "Is it raining?"}]
HISTORY = [
    *TALK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "abc123def", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Kyiv"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "abc123def", "content": "no"},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tools") / "tiny"
    make_model(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def client(directory):
    running = Running(directory)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60) as official:
        yield official
    assert running.stop() == 0


def ask(client, messages=TALK, **options):
    return client.chat.completions.create(model="tiny", messages=messages, **{"max_tokens": 200, **options})


def test_a_tool_that_must_be_called_is_called_with_arguments_of_its_schema(client):
    for options in ({"tool_choice": WEATHER}, {"tool_choice": "required", "tools": TOOLS[:1]}):
        (choice,) = ask(client, seed=1, **{"tools": TOOLS, **options}).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        arguments = json.loads(call.function.arguments)
        assert arguments["place"] in ("Kyiv", "Lviv")
        assert set(arguments) <= {"place", "days"}
        assert len(call.id) == 9


def test_a_stream_has_the_calls_of_a_complete_reply(client):
    options = {"tools": TOOLS, "tool_choice": WEATHER, "seed": 4}
    chunks = list(ask(client, stream=True, **options))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    (call,) = ask(client, **options).choices[0].message.tool_calls
    assert [(delta.index, delta.function) for delta in deltas] == [(0, deltas[0].function)]
    assert deltas[0].function.model_dump() == call.function.model_dump()
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_conversation_goes_on_after_a_call(client, directory):
    template = ChatTemplate.from_directory(directory)
    shown = [
        HISTORY[0],
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"place": "Kyiv"}}}],
        },
        HISTORY[2],
    ]
    reply = ask(client, HISTORY, tools=TOOLS, max_tokens=5, temperature=0)
    text = template.render(shown, tools=TOOLS)
    assert reply.usage.prompt_tokens == len(text.encode())
    assert '<tool_call>\n{"name": "weather", "arguments": {"place": "Kyiv"}}\n</tool_call>' in text
    without = ask(client, HISTORY, tools=TOOLS, tool_choice="none", max_tokens=5).usage.prompt_tokens
    assert without == len(template.render(shown).encode())


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_a_model_chooses_to_write_are_parsed(parallel):
    body = {"messages": TALK, "tools": TOOLS, "parallel_tool_calls": parallel}
    request = read_chat(body, Limits(), 256, "m")
    text = 'Well.\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    text += '<tool_call>{"name": "weather", "arguments": {"place": "Lviv"}}</tool_call>'
    builder = ResponseBuilder(request, "m", ByteTokenizer(), FORMATS["hermes"])
    chunks = builder.add(0, PromptDone(3, 0, []))
    for character in text:
        chunks += builder.add(0, TokenEvent(0, TokenText(ord(character), character, [])))
    chunks += builder.add(0, SequenceDone(0, "end", ""))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    names = ["clock", "weather"] if parallel else ["clock"]
    assert "".join(delta.get("content", "") for delta in deltas) == "Well."
    streamed = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [(call["index"], call["function"]["name"]) for call in streamed] == [*enumerate(names)]
    choice = builder.complete()["choices"][0]
    assert choice["message"]["content"] == "Well."
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [call["function"] for call in streamed]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "tool_calls"


def test_a_reply_without_calls_is_as_without_tools(client):
    prompt = ask(client, tools=TOOLS, max_tokens=20, temperature=0)
    assert prompt.choices[0].message.tool_calls is None
    assert prompt.choices[0].finish_reason == "length"
    chunks = list(ask(client, tools=TOOLS, max_tokens=20, temperature=0, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == prompt.choices[0].message.content


def test_a_template_without_tools_rejects_them(server):
    body = {"messages": TALK, "tools": TOOLS}
    status, _, content = server.ask("/v1/chat/completions", body)
    assert status == 400
    assert json.loads(content)["error"]["message"] == "the model's chat template does not describe tools to the model"
    server.post("/v1/chat/completions", **body, tool_choice="none", max_tokens=2)


def test_values_for_the_template_reach_it(client, directory):
    template = ChatTemplate.from_directory(directory)
    reply = ask(client, extra_body={"chat_template_kwargs": {"thinking": True}}, max_tokens=2)
    assert reply.usage.prompt_tokens == len(template.render(TALK, thinking=True).encode())
    assert "<think>" in template.render(TALK, thinking=True)


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": {}}, "tools", "must be a list"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]", "must be an object with type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, r"tools\[0\]", "letters, digits"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "different names"),
        ({"tools": TOOLS, "tool_choice": "weather"}, "tool_choice", "an object with the name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "of one of"),
        ({"tool_choice": "required"}, "tool_choice", "requires tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "an object without"),
        ({"tools": TOOLS, "regex": "a"}, "regex", "expected tools or regex"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"messages": [{"role": "assistant", "content": None}]}, r"messages\[0\].content", "only in a message with"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].tool_call_id", "the id of a call"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
            r"messages\[0\].tool_calls",
            "assistant",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            r"messages\[0\].tool_calls\[0\].function.arguments",
            "must be a JSON object as text",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, r"messages\[0\].tool_calls\[0\]", "a function"),
    ],
)
def test_wrong_tools_and_messages_are_named(body, param, words):
    with pytest.raises(ApiError, match=words) as error:
        read_chat({"messages": TALK, **body}, Limits(), 256, "m")
    assert error.value.param == param.replace("\\", "")


def test_an_assistants_null_content_is_fine_with_calls():
    request = read_chat({"messages": HISTORY}, Limits(), 256, "m")
    assert request.messages[1]["content"] == ""
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == {"place": "Kyiv"}
    assert request.messages[2] == HISTORY[2]
