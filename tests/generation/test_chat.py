import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from anymamba.generation import ChatTemplate, sandbox
from anymamba.generation.sandbox import Sandbox, shared_sandbox
from tests.generation.cases import bare

HANDLER = "template_handler.py"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Is 1 < 2 & 'so'?\n"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "日本 👍"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b", "parameters": {"é": [1, 2.5, None]}}}]

# Each uses what templates of published models use.
TEMPLATES = {
    "chatml": """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n'
        + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}
    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "alternating": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
        {%- set system, messages = messages[0]['content'], messages[1:] %}{% endif %}
    {%- for message in messages %}
        {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
            {{- raise_exception('roles must alternate') }}
        {%- endif %}
        {%- if message['role'] == 'user' %}
            {%- set before = system ~ '\\n\\n' if system and loop.first else '' %}
            {{- '[INST] ' ~ before ~ message.content | trim ~ ' [/INST]' }}
        {%- else %}{{ ' ' ~ message['content'] ~ eos_token }}{% endif %}
    {%- endfor %}""",
    "macros": """
    {%- macro header(role) -%}<|{{ role }}|>{%- endmacro -%}
    {%- set ns = namespace(count=0, last='') %}
    {% for message in messages %}
        {% if message.role == 'system' %}{% continue %}{% endif %}
        {%- set ns.count = ns.count + 1 %}
        {%- set ns.last = message.content.split('?')[0].strip() %}
{{ header(message.role) }} {{ message.content }}
        {%- if ns.count > 2 %}{% break %}{% endif %}
    {% endfor %}
{{ ns.count }} {{ ns.last }} {{ unk_token }}|{{ nothing }}|{{ eos_token }}""",
    "tools": """{% if tools is not none %}{% for tool in tools %}{{ tool | tojson(indent=2) }}
{{ tool.function | tojson }}{% endfor %}{% else %}none{% endif %}
{{ messages | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }} {{ documents is defined }}""",
    "generation": """{% for message in messages %}{% if message.role == 'assistant' %}
    {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ message.role }}: {{ message.content | trim }}
{% endif %}{% endfor %}""",
    "reasoning": """{% for message in messages %}{% if message.reasoning_content is defined %}
<think>{{ message.reasoning_content }}</think>{{ message.thinking }}{% endif %}
{{ message.content if message.content is defined else 'missing' }}{% endfor %}{{ enable_thinking }}{{ flavor | upper }}
{{ dict(a=1)['a'] }} {{ strftime_now('%Y') }} {{ range(3) | list }} {{ messages | selectattr('role', 'eq', 'user')
    | map(attribute='content') | list | length }}""",
}
# transformers 5.20 passes fields that are None, or have another usual name, to a template as they are; 5.23 does not.
EMPTY = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": None}]
THINKING = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "hm"}]
CONVERSATIONS = [
    TALK,
    TALK[1:2],
    TALK[2:],
    EMPTY,
    THINKING,
]


def chat(source, **tokens):
    return ChatTemplate(sources={"default": source}, tokens=tokens)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_write_what_transformers_writes(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(bare(tmp_path, "<s>", "</s>")),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATES[name],
    )
    theirs.save_pretrained(tmp_path / "saved")
    ours = ChatTemplate.from_directory(tmp_path / "saved")
    assert not ours.is_plain
    shown = theirs.apply_chat_template(EMPTY, chat_template="{{ messages[1].content is defined }}", tokenize=False)
    conversations = CONVERSATIONS if shown == "False" else CONVERSATIONS[:3]
    options = ({}, {"tools": TOOLS}, {"enable_thinking": False, "flavor": "x"}, {"eos_token": "<other>"})
    for messages, chosen, begin in itertools.product(
        conversations, options, ({"add_generation_prompt": True}, {"add_generation_prompt": False})
    ):
        expected, problem = attempt(theirs.apply_chat_template, messages, tokenize=False, **begin, **chosen)
        if problem is None:
            assert ours.render(messages, **begin, **chosen) == expected
        else:
            with pytest.raises(ValueError, match=re.escape(str(problem))):
                ours.render(messages, **begin, **chosen)


def attempt(function, *arguments, **options):
    """Return what a function returns, and what it raises."""
    try:
        return function(*arguments, **options), None
    except Exception as error:
        return None, error


class TestWhereItIsFound:
    def write(self, directory, config=None, file=None):
        if config is not None:
            (directory / "tokenizer_config.json").write_text(json.dumps(config))
        if file is not None:
            (directory / "chat_template.jinja").write_text(file)
        return ChatTemplate.from_directory(directory)

    def test_in_the_config_with_its_tokens(self, tmp_path):
        tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "add_bos_token": True}
        (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "<unk>", "eos_token": "<older>"}')
        template = self.write(tmp_path, {"chat_template": "{{ bos_token }}{{ messages[0].content }}", **tokens})
        assert template.render(TALK) == "<s>Be brief."
        assert template.tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

    def test_a_file_comes_before_the_config(self, tmp_path):
        assert self.write(tmp_path, {"chat_template": "config"}, "file").render(TALK) == "file"

    def test_several_have_names(self, tmp_path):
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        template = self.write(tmp_path, {"chat_template": named})
        assert (template.render(TALK), template.render(TALK, tools=TOOLS)) == ("plain", "tools")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("other tools")
        template = self.write(tmp_path, file="other")
        assert (template.render(TALK), template.render(TALK, tools=TOOLS)) == ("other", "other tools")
        template = self.write(tmp_path, {"chat_template": named[1:]}, None)
        (tmp_path / "chat_template.jinja").unlink()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
        with pytest.raises(ValueError, match=r"tokenizer_config.json: chat template: expected one named 'default'"):
            ChatTemplate.from_directory(tmp_path).render(TALK)

    def test_where_there_is_none_names_stand_before_texts(self, tmp_path):
        template = ChatTemplate.from_directory(tmp_path)
        assert template.is_plain
        assert template.render(TALK) == (
            "System: Be brief.\n\nUser: Is 1 < 2 & 'so'?\n\nAssistant: Yes.\n\nUser: 日本 👍\n\nAssistant:"
        )
        assert template.render(TALK[:1], add_generation_prompt=False) == "System: Be brief.\n\n"
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert template.render([{"role": "user", "content": parts}]) == "User: a b\n\nAssistant:"
        assert "\nUser:" in template.stop

    def test_a_damaged_file_is_rejected_with_its_name(self, tmp_path):
        with pytest.raises(ValueError, match="nowhere: no such directory"):
            ChatTemplate.from_directory(tmp_path / "nowhere")
        for value in (3, [3], [{"name": "default"}], {"default": "x"}):
            with pytest.raises(ValueError, match=r"tokenizer_config.json: chat_template must be a text, or a list"):
                self.write(tmp_path, {"chat_template": value})
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
        with pytest.raises(ValueError, match=r"chat_template.jinja: not UTF-8 text"):
            self.write(tmp_path, {})
        (tmp_path / "chat_template.jinja").write_text("x" * (2**20 + 1))
        with pytest.raises(ValueError, match="must have at most 1,048,576 characters"):
            self.write(tmp_path, {})


class TestDoor:
    @pytest.mark.parametrize(
        ("messages", "error", "words"),
        [
            ([], ValueError, "messages must not be empty"),
            ("hello", TypeError, "messages must be a list of .* got 'hello'"),
            ({"role": "user", "content": "a"}, TypeError, "messages must be a list"),
            (["hello"], TypeError, "a message must be .* got 'hello'"),
            ([{"content": "a"}], TypeError, "a message must be"),
            ([{"role": "user", "content": object()}], TypeError, "plain data"),
        ],
    )
    def test_an_invalid_conversation_is_rejected(self, unchecked, messages, error, words):
        with pytest.raises(error, match=words):
            chat("x").render(messages)

    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("{{ raise_exception('only users') }}", "chat template: it rejects these messages: only users"),
            ("a\n{% for %}", r"not a readable template \(line 2: "),
            ("{{ nothing.at.all }}", r"it fails on these messages \(UndefinedError: 'nothing' is undefined\)"),
            ("{{ 1 / 0 }}", "ZeroDivisionError"),
            ("{{ messages.append(1) }}", "it does something that a template may not do"),
            ("{{ ''.__class__.__mro__ }}", "it does something that a template may not do"),
            ("{{ cycler.__init__.__globals__.os.system('true') }}", "it does something that a template may not do"),
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it calls itself too often"),
            ("{% include '/etc/passwd' %}", "it fails on these messages"),
        ],
    )
    def test_a_template_that_fails_is_one_line(self, source, words):
        with pytest.raises(ValueError, match=words) as caught:
            chat(source).render(TALK)
        assert "\n" not in str(caught.value)


class TestLimits:
    @pytest.fixture
    def small(self):
        process = Sandbox(HANDLER, characters=10_000, memory=2**28, seconds=0.3)
        yield process
        process.close()

    @pytest.mark.parametrize(
        "source",
        [
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "{{ 9 ** (9 ** 9) }}",
        ],
    )
    def test_a_template_without_an_end_is_ended(self, small, source):
        with pytest.raises(ValueError, match=r"it needs more than 0.3 s"):
            small.run(template=source, values={})
        assert small.run(template="{{ 1 + 1 }}", values={}) == "2"

    @pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the memory of a process")
    @pytest.mark.parametrize(
        "source",
        ["{% set n = 'x' * 10 ** 10 %}", "{{ 'x' | center(10 ** 10) }}", "{{ '%1000000000d' % 1 }}"],
    )
    def test_a_template_that_fills_the_memory_is_ended(self, small, source):
        with pytest.raises(ValueError, match=r"it needs more than 256 MiB of memory"):
            small.run(template=source, values={})
        assert small.run(template="{{ 1 + 1 }}", values={}) == "2"

    def test_a_text_without_an_end_is_rejected(self, small):
        with pytest.raises(ValueError, match=r"it writes more than 10,000 characters"):
            small.run(template="{% for a in range(99999) %}x{% endfor %}", values={})

    def test_a_template_cannot_reach_the_next_one(self, small):
        with pytest.raises(ValueError, match="may not"):
            small.run(template="{{ messages.append(1) }}", values={"messages": []})
        small.run(template="{% set ns = namespace(x=1) %}{% set y = 2 %}", values={})
        assert small.run(template="{{ x }}{{ y }}{{ messages }}", values={}) == ""


def test_threads_share_a_process():
    texts = {}

    def work(i):
        texts[i] = chat("{{ messages[0].content * 3 }}").render([{"role": "user", "content": str(i)}])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {i: str(i) * 3 for i in range(20)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_its_own():
    code = (
        "import os; from sandbox import shared_sandbox\n"
        f"def render(x): return shared_sandbox({HANDLER!r}).run(template=x, values={{}})\n"
        "render('x');"
        "pid = os.fork(); text = render('{{ 1 + 1 }}');"
        "os._exit(text != '2') if pid == 0 else exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or text != '2')"
    )
    alone = {**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parent)}  # it needs no torch
    assert subprocess.run([sys.executable, "-c", code], env=alone).returncode == 0


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs signals")
def test_a_process_that_died_between_two_texts_is_started_again():
    chat("x").render(TALK)
    shared_sandbox(HANDLER)._child.kill()
    shared_sandbox(HANDLER)._child.wait()
    assert chat("y").render(TALK) == "y"
