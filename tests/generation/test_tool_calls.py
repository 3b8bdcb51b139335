"""Tool calls: what each family of models writes becomes calls, in any pieces, and nothing else does."""

import json
import random

import pytest
import torch

from anymamba.generation import ByteTokenizer, Pipeline, compile_grammar, generate
from anymamba.generation.tool_calls import FORMATS, ToolCall, ToolCallParser, detect_format
from tests.models.cases import small_lm

NAMES = ("add", "find")
ADD = ToolCall("add", {"a": 1, "b": [2.5, None]})
FIND = ToolCall("find", {"text": 'x "<tool_call>" {é}'})
TEXTS = {
    "hermes": [
        (
            'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2.5, null]}}\n</tool_call>\n'
            '<tool_call>\n{"name": "find", "arguments": {"text": "x \\"<tool_call>\\" {é}"}}\n</tool_call>\n',
            "Let me see.",
            [ADD, FIND],
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2.5, null]}}</tool_call> Done.', "Done.", [ADD]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2.5, null]}}', "", [ADD]),
    ],
    "nemotron": [
        (
            '<TOOLCALL>[{"name": "add", "arguments": {"a": 1, "b": [2.5, null]}}, '
            '{"name": "find", "arguments": {"text": "x \\"<tool_call>\\" {é}"}}]</TOOLCALL>',
            "",
            [ADD, FIND],
        )
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": [2.5, null]}}]', "", [ADD]),
        (' [{"name": "add", "arguments": {"a": 1, "b": [2.5, null]}}]', "", [ADD]),
    ],
    "granite": [
        ('<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": [2.5, null]}}]', "", [ADD]),
        ('<tool_call>[{"name": "add", "arguments": {"a": 1, "b": [2.5, null]}}]', "", [ADD]),
    ],
    "llama3": [
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": [2.5, null]}}', "", [ADD]),
        ('{"name": "add", "parameters": {"a": 1, "b": [2.5, null]}}; {"name": "add", "parameters": {}}', "", None),
    ],
    "json": [
        ('{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": [2.5, null]}"}', "", [ADD]),
        ('{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, null]}}}', "", [ADD]),
    ],
}
PLAIN = [
    "",
    "It is 5.",
    "  {1, 2} is a set",
    '{"name": "Bob", "arguments": {}}',
    '{"name": "add"}',
    "[1, 2]",
    "a <tool_call",
    "<tool_call>\nadd(1)\n</tool_call> and <TOOLCALL>[]</TOOLCALL>",
    '<tool_call>{"name": "subtract", "arguments": {}}</tool_call>',
    '{"name": "add", "arguments": {"a": ',
    '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
    '{"name": "add", "arguments": {"a": 1e999}}',
    "[TOOL_CALLS]",
    "text \n\n ",
]


def parse(form, text, seed, most=None):
    """Push a text in random pieces; return the content and the calls."""
    rng = random.Random(seed)
    parser = ToolCallParser(FORMATS[form], NAMES, most)
    content, calls = "", []
    while text:
        size = rng.choice([1, 1, 2, 5, 30])
        piece, new = parser.push(text[:size])
        content += piece
        calls += new
        text = text[size:]
    piece, new = parser.finish()
    return content + piece, calls + new


@pytest.mark.parametrize("form", FORMATS)
def test_calls_are_parsed_in_any_pieces(form):
    for text, content, calls in TEXTS[form]:
        expected = [ADD, ToolCall("add", {})] if calls is None else calls
        for seed in range(20):
            assert parse(form, text, seed) == (content, expected)
        assert parse(form, text, 0, most=1) == (content, expected[:1])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("text", PLAIN)
def test_what_is_not_a_call_stays_as_it_is(form, text):
    for seed in range(10):
        assert parse(form, text, seed) == (text, [])


def test_content_is_not_held_back_longer_than_it_must():
    parser = ToolCallParser(FORMATS["hermes"], NAMES)
    assert parser.push("It is <b>5</b>") == ("It is <b>5</b>", [])
    assert parser.push(" <tool_c") == ("", [])
    assert parser.push("ake>") == (" <tool_cake>", [])
    parser = ToolCallParser(FORMATS["json"], NAMES)
    assert parser.push(" It") == (" It", [])
    assert parser.push("{") == ("{", [])


def test_arguments_are_an_object_even_if_the_schema_does_not_say_so():
    grammar = FORMATS["json"].make_grammar([{"name": "f", "parameters": {"properties": {"a": {"type": "null"}}}}])
    assert json.loads(grammar.source)["anyOf"][0]["properties"]["arguments"]["type"] == "object"


def test_a_template_tells_the_format():
    for name, form in FORMATS.items():
        for sign in form.signs:
            assert detect_format(f"{{% if tools %}}{sign}{{% endif %}}") is FORMATS[name]
    assert detect_format("{{ tools }}") is FORMATS["json"]


@pytest.mark.parametrize("form", FORMATS)
def test_constrained_calls_are_parsed_and_follow_their_schemas(form):
    pytest.importorskip("llguidance")
    node = {
        "$defs": {"unit": {"enum": ["m", "km"]}},
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/unit"}, "far": {"type": "boolean"}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    other = {**node, "$defs": {"unit": {"enum": ["s"]}}}
    tools = [{"name": "add", "parameters": node}, {"name": "find", "parameters": other}]
    text = Pipeline(small_lm(vocab_size=256, pad_vocab_size_multiple=1), ByteTokenizer())
    grammar = FORMATS[form].make_grammar(tools, most=1)
    compiled = compile_grammar(grammar, text.tokenizer)
    seen = set()
    for seed in range(12):
        prompt = torch.tensor([[seed + 1]])
        row = generate(text.model, prompt, 200, grammar=compiled, seed=seed, temperature=30.0).rows()[0]
        content, (call,) = parse(form, text.tokenizer.decode(row), seed)
        assert content == ""
        assert call.arguments["unit"] in (["m", "km"] if call.name == "add" else ["s"])
        assert set(call.arguments) <= {"unit", "far"}
        assert json.dumps(call.arguments)
        seen.add(call.name)
    assert seen == {"add", "find"}
