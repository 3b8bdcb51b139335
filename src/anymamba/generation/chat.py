"""Chat templates: a conversation becomes the text that a model was trained to continue."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anymamba.core.io import read_json
from anymamba.generation.sandbox import shared_sandbox

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
_FILE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"
_MORE_FILES = "additional_chat_templates"
_MAX_CHARACTERS = 2**20  # of a template
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template that writes conversations as a model expects them.

    Attributes:
        sources: Jinja2 templates by name: "default", and maybe "tool_use" for conversations with tools.
        tokens: Special tokens by the names that templates use: bos_token, eos_token, ...
        where: Source of the templates, for errors.
        stop: Texts that end a reply, in addition to the tokenizer's end token.
        is_plain: Whether the model has no template, and `PLAIN`, names before texts, is used instead.
    """

    sources: Mapping[str, str] = field(default_factory=lambda: {"default": PLAIN})
    tokens: Mapping[str, str] = field(default_factory=dict)
    where: str = "chat template"
    stop: tuple[str, ...] = ()
    is_plain: bool = False

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> ChatTemplate:
        """Return the template of a model: chat_template.jinja, or `chat_template` in tokenizer_config.json.

        A model that has neither gets the plain one: `User: ...`, an empty line, `Assistant:`.

        Args:
            path: Directory of the model or tokenizer, or a file in it.

        Raises:
            ValueError: There is no such directory, or a file is damaged.
        """
        directory = Path(path)
        directory = directory.parent if directory.is_file() else directory
        if not directory.is_dir():
            raise ValueError(f"{directory}: no such directory")
        config = read_json(directory / _CONFIG) if (directory / _CONFIG).is_file() else {}
        sources = _read_templates(directory, config)
        tokens = _read_special_tokens(directory, config)
        if not sources:
            return cls(tokens=tokens, where="the plain chat template", stop=_PLAIN_STOP, is_plain=True)
        where = directory / (_FILE if (directory / _FILE).is_file() else _CONFIG)
        return cls(sources=sources, tokens=tokens, where=f"{where}: chat template")

    @property
    def takes_tools(self) -> bool:
        """Return whether a template describes tools to the model."""
        return any("tools" in source for source in self.sources.values())

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        **values: Any,
    ) -> str:
        """Return the text of a conversation, including special tokens: encode it without adding any.

        Args:
            messages: Messages, each with a "role" ("system", "user", "assistant", ...), usually a "content", and
                whatever else the template reads; fields that are None count as missing.
            add_generation_prompt: Whether to end with the beginning of the assistant's reply.
            tools: Descriptions of functions that the model may call, as JSON schemas.
            documents: Texts that the model may use.
            **values: Other values for the template by name; the name of a special token replaces that token.

        Raises:
            TypeError: Messages or values are not plain data.
            ValueError: There are no messages, or the template cannot be read, rejects them, or needs more than 2
                seconds, 512 MiB or 16 million characters.
        """
        variables = {
            **self.tokens,
            "messages": [_normalize_message(message) for message in _check_messages(messages)],
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": bool(add_generation_prompt),
            **values,
        }
        try:
            json.dumps(variables)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"messages and values must be plain data, as JSON has it ({error})") from error
        name = "tool_use" if tools is not None and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ValueError(f"{self.where}: expected one named {name!r}, found {', '.join(self.sources)}")
        try:
            return shared_sandbox("template_handler.py").run(template=self.sources[name], values=variables)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from error


def _check_messages(messages: Any) -> Sequence[Message]:
    """Return messages; raise `TypeError` unless they are mappings with a text "role", `ValueError` for none."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f'messages must be a list of {{"role": ..., "content": ...}}, got {_preview(messages)}')
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f'a message must be {{"role": ..., "content": ...}}, got {_preview(message)}')
    if not messages:
        raise ValueError("messages must not be empty")
    return messages


def _normalize_message(message: Message) -> dict[str, Any]:
    """Return a message without fields that are None, and with its reasoning under the names that templates read."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _read_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the templates of a directory by name; template files take precedence, as in transformers."""
    entries = config.get("chat_template")
    if isinstance(entries, str):
        entries = [{"name": "default", "template": entries}]
    templates: dict[str, str] = {}
    for entry in [] if entries is None else entries if isinstance(entries, list) else [entries]:
        name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise ValueError(
                f"{directory / _CONFIG}: chat_template must be a text, or a list of names and templates, "
                f"got {_preview(entry)}"
            )
        templates[name] = source
    files = {"default": directory / _FILE} | {path.stem: path for path in (directory / _MORE_FILES).glob("*.jinja")}
    templates = {name: _read_template(path) for name, path in files.items() if path.is_file()} or templates
    for name, source in templates.items():
        if len(source) > _MAX_CHARACTERS:
            raise ValueError(f"{directory}: chat template {name!r} must have at most {_MAX_CHARACTERS:,} characters")
    return templates


def _read_template(path: Path) -> str:
    """Return the text of a template file; one that is too long is not read to its end."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(_MAX_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _read_special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return special tokens by name: `bos_token`, `eos_token`, `unk_token`, ..."""
    older_file = directory / "special_tokens_map.json"
    fields = {**(read_json(older_file) if older_file.is_file() else {}), **config}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in fields.items()}
    return {name: value for name, value in texts.items() if name.endswith("_token") and isinstance(value, str)}


def _preview(value: Any) -> str:
    """Return the beginning of a value, for an error."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
