"""Chat templates: a conversation as the text that a model was trained to continue."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anymamba.core.io import read_json
from anymamba.generation.template_sandbox import renderer

Message = Mapping[str, Any]

# For models without their own template: names before texts, an empty line between them.
PLAIN = """
{%- for message in messages -%}
    {{- message.role | capitalize }}: {% if message.content is string -%}
        {{- message.content | trim -}}
    {%- else -%}
        {{- message.content | map(attribute="text") | join(" ") | trim -}}
    {%- endif -%}
    {{- "\\n\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%} Assistant: {%- endif -%}
"""
_PLAIN_STOP = ("\nUser:", "\nSystem:")
_FILE, _CONFIG, _FURTHER = "chat_template.jinja", "tokenizer_config.json", "additional_chat_templates"
_LONGEST = 2**20  # characters of a template
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """Writes conversations as a model expects them.

    Attributes:
        sources: jinja2 templates by name; "default", and maybe "tool_use" for conversations with tools.
        tokens: special tokens by the names that templates use: bos_token, eos_token, ...
        where: the source of the templates, for errors.
        stop: texts that end a reply besides the tokenizer's end token.
        is_plain: the model has no template, and `PLAIN`, names before texts, is used instead.
    """

    sources: Mapping[str, str] = field(default_factory=lambda: {"default": PLAIN})
    tokens: Mapping[str, str] = field(default_factory=dict)
    where: str = "chat template"
    stop: tuple[str, ...] = ()
    is_plain: bool = False

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> ChatTemplate:
        """The template of a model: chat_template.jinja, or `chat_template` in tokenizer_config.json.

        A model that has neither gets the plain one: `User: ...`, an empty line, `Assistant:`.

        Args:
            path: directory of the model or tokenizer, or a file in it.

        Raises:
            ValueError: there is no such directory, or a file is damaged.
        """
        directory = Path(path)
        directory = directory.parent if directory.is_file() else directory
        if not directory.is_dir():
            raise ValueError(f"{directory}: no such directory")
        config = read_json(directory / _CONFIG) if (directory / _CONFIG).is_file() else {}
        named, tokens = _templates(directory, config), _tokens(directory, config)
        if not named:
            return cls(tokens=tokens, where="the plain chat template", stop=_PLAIN_STOP, is_plain=True)
        where = directory / (_FILE if (directory / _FILE).is_file() else _CONFIG)
        return cls(sources=named, tokens=tokens, where=f"{where}: chat template")

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        **values: Any,
    ) -> str:
        """The text of a conversation, including special tokens: encode it without adding any.

        Args:
            messages: each with a "role" ("system", "user", "assistant", ...), usually a "content", and whatever else
                the template reads; fields that are None count as missing.
            add_generation_prompt: end with the beginning of the assistant's reply.
            tools: descriptions of functions that the model may call, as JSON schemas.
            documents: texts that it may use.
            **values: further values for the template by name; the name of a special token replaces that token.

        Raises:
            TypeError: messages or values are not plain data.
            ValueError: there are no messages, or the template cannot be read, refuses them, or takes more than 2
                seconds, 512 MiB or 16 million characters.
        """
        given = {
            **self.tokens,
            "messages": [_message(message) for message in check_messages(messages)],
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": bool(add_generation_prompt),
            **values,
        }
        try:
            json.dumps(given)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"messages and values must be plain data, as JSON has it ({error})") from error
        try:
            return renderer().render(self._source(tools), given)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from error

    def _source(self, tools: Sequence[Any] | None) -> str:
        """The template for a conversation with these tools."""
        name = "tool_use" if tools is not None and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ValueError(f"expected one named {name!r}, found {', '.join(self.sources)}")
        return self.sources[name]


def check_messages(messages: Any) -> Sequence[Message]:
    """Messages that can be rendered.

    Raises:
        TypeError: they are not a list of tables with a text "role".
        ValueError: there are none.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f'messages must be a list of {{"role": ..., "content": ...}}, got {_short(messages)}')
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f'a message must be {{"role": ..., "content": ...}}, got {_short(message)}')
    if not messages:
        raise ValueError("messages must not be empty")
    return messages


def _message(message: Message) -> dict[str, Any]:
    """A message without fields that are None; the reasoning before a reply gets the names that templates read."""
    kept = {name: value for name, value in message.items() if value is not None}
    thought = next((kept[name] for name in _REASONING if name in kept), None)
    return kept if thought is None else {"thinking": thought, **kept, "reasoning_content": thought}


def _templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """The templates of a directory by name; a template file takes precedence, as in transformers."""
    said = config.get("chat_template")
    if isinstance(said, str):
        said = [{"name": "default", "template": said}]
    found: dict[str, str] = {}
    for entry in [] if said is None else said if isinstance(said, list) else [said]:
        name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise ValueError(
                f"{directory / _CONFIG}: chat_template must be a text, or a list of names and templates, "
                f"got {_short(entry)}"
            )
        found[name] = source
    files = {"default": directory / _FILE} | {path.stem: path for path in (directory / _FURTHER).glob("*.jinja")}
    read = {name: _read(path) for name, path in files.items() if path.is_file()}
    found = read or found
    for name, source in found.items():
        if len(source) > _LONGEST:
            raise ValueError(f"{directory}: chat template {name!r} must have at most {_LONGEST:,} characters")
    return found


def _read(path: Path) -> str:
    """The text of a template file; one that is too long is not read to its end."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(_LONGEST + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by name: `bos_token`, `eos_token`, `unk_token`, ..."""
    older = directory / "special_tokens_map.json"
    found = {**(read_json(older) if older.is_file() else {}), **config}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: value for name, value in texts.items() if name.endswith("_token") and isinstance(value, str)}


def _short(value: Any) -> str:
    """The beginning of a value, for an error."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
