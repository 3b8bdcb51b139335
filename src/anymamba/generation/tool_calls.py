"""Tool calls: how models write them, as text that is parsed and as a grammar that they follow.

A `ToolFormat` is the way in which a family of models writes calls: JSON between two markers, or JSON at the beginning
of a reply. `ToolCallParser` takes the text of one reply as it is written, and returns its content and its calls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from anymamba.generation.grammar import Grammar

_MAX_CALL = 2**16  # characters after which text is no longer taken for the beginning of a call


def _read_number(text: str) -> float:
    """Return a number; raise ValueError for one that JSON cannot write."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a number of JSON")
    return number


_DECODER = json.JSONDecoder(parse_float=_read_number, parse_constant=_read_number)


class ToolCall(NamedTuple):
    """A call that a model asks for."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """The way in which a family of models writes tool calls.

    Attributes:
        opening: Text before calls; empty if only a reply that begins with JSON has calls.
        closing: Text after calls.
        space: White space between a marker and the JSON.
        markers: Texts that may come before that JSON; as special tokens, they leave no text.
        is_list: Whether calls are a JSON list, or one object.
        arguments: Name of the field with the arguments.
        signs: Texts in a chat template that tell this format.
    """

    opening: str = ""
    closing: str = ""
    space: str = ""
    markers: tuple[str, ...] = ()
    is_list: bool = False
    arguments: str = "arguments"
    signs: tuple[str, ...] = ()

    def parse_calls(self, text: str, names: Collection[str]) -> list[ToolCall]:
        """Return the calls that a text consists of, or none if it is anything but calls of these tools."""
        text = text.strip()
        for marker in self.markers:
            text = text.removeprefix(marker).strip()
        calls = []
        while text:
            try:
                value, end = _DECODER.raw_decode(text)
            except (ValueError, RecursionError):
                return []
            for entry in value if isinstance(value, list) else [value]:
                if (call := _read_call(entry, names)) is None:
                    return []
                calls.append(call)
            text = text[end:].lstrip(" \n;")  # Llama puts semicolons between calls
        return calls

    def may_begin_calls(self, text: str) -> bool:
        """Return whether a reply that begins with this text may consist of calls."""
        text = text.lstrip()
        return text[:1] in ("", "{", "[") or any(text.startswith(m) or m.startswith(text) for m in self.markers)

    def make_grammar(self, tools: Sequence[Mapping[str, Any]], *, most: int | None = None) -> Grammar:
        """Return the grammar of calls of these tools, whose arguments follow their schemas.

        A list may have up to `most` calls; other formats have one.
        """
        calls = []
        for i, tool in enumerate(tools):
            place = f"#{'/items' if self.is_list else ''}/anyOf/{i}/properties/{self.arguments}"
            parameters = _move_references({"type": "object", **(tool.get("parameters") or {})}, place)
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": tool["name"]}, self.arguments: parameters},
                    "required": ["name", self.arguments],
                    "additionalProperties": False,
                }
            )
        schema: dict[str, Any] = {"anyOf": calls}
        if self.is_list:
            schema = {"type": "array", "items": schema, "minItems": 1, **({} if most is None else {"maxItems": most})}
        return Grammar.from_schema(schema, before=self.opening + self.space, after=self.space + self.closing)


FORMATS = {
    "nemotron": ToolFormat(opening="<TOOLCALL>", closing="</TOOLCALL>", is_list=True, signs=("<TOOLCALL>",)),
    "granite": ToolFormat(markers=("<|tool_call|>", "<tool_call>"), is_list=True, signs=("<|tool_call|>",)),
    "hermes": ToolFormat(opening="<tool_call>", closing="</tool_call>", space="\n", signs=("<tool_call>",)),
    "mistral": ToolFormat(markers=("[TOOL_CALLS]",), is_list=True, signs=("[TOOL_CALLS]",)),
    "llama3": ToolFormat(
        markers=("<|python_tag|>",), arguments="parameters", signs=("<|python_tag|>", '"parameters": ')
    ),
    "json": ToolFormat(),
}


def detect_format(template: str) -> ToolFormat:
    """Return the format of a chat template, by what it contains; JSON in the open if nothing tells."""
    matches = (form for form in FORMATS.values() if any(sign in template for sign in form.signs))
    return next(matches, FORMATS["json"])


def _read_call(entry: Any, names: Collection[str]) -> ToolCall | None:
    """Return the call that a JSON value describes, or None if it describes none of these tools."""
    if not isinstance(entry, dict):
        return None
    function = entry.get("function")
    entry = function if isinstance(function, dict) else entry
    arguments = entry.get("arguments", entry.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return None
    name = str(entry.get("name"))
    return ToolCall(name, arguments) if name in names and isinstance(arguments, dict) else None


def _move_references(schema: Any, place: str) -> Any:
    """Return a schema whose references to itself hold where it becomes part of another one."""
    if isinstance(schema, list):
        return [_move_references(entry, place) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {name: _move_references(entry, place) for name, entry in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


class ToolCallParser:
    """The text of one reply as it is written: content is passed on, and calls are held back until they are complete.

    What turns out not to be a call of a known tool is content.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], most: int | None = None) -> None:
        """Begin with no text; of more than `most` calls, the later ones are dropped."""
        self._form = form
        self._names = names
        self._left = most
        self._buffer = ""
        self._is_after_call = False
        self._is_beginning = not form.opening  # the text so far may be calls

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text; return content and calls that are complete."""
        self._buffer += text
        if self._form.opening:
            return self._read_marked()
        if self._is_beginning and self._form.may_begin_calls(self._buffer) and len(self._buffer) < _MAX_CALL:
            return "", []
        self._is_beginning = False
        return self._take(), []

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return what was held back: no more text follows."""
        text = self._take()
        opening = self._form.opening
        if self._is_beginning or (opening and opening in text):
            calls = self._parse(text.replace(opening, "", 1) if opening else text)
            if calls is not None:
                return "", calls
        return text, []

    def _read_marked(self) -> tuple[str, list[ToolCall]]:
        content = ""
        calls: list[ToolCall] = []
        opening, closing = self._form.opening, self._form.closing
        while True:
            if self._is_after_call:  # white space after a call is not content
                self._buffer = self._buffer.lstrip()
                self._is_after_call = not self._buffer
            before, is_open, rest = self._buffer.partition(opening)
            if not is_open:
                # What may be the beginning of a call is held back, with the white space before it.
                held = max((n for n in range(len(opening)) if before.endswith(opening[:n])), default=0)
                cut = len(before[: len(before) - held].rstrip())
                self._buffer = before[cut:]
                return content + before[:cut], calls
            inner, is_closed, after = rest.partition(closing)
            if not is_closed and len(rest) < _MAX_CALL:
                cut = len(before.rstrip())
                content += before[:cut]
                self._buffer = self._buffer[cut:]
                return content, calls
            if (new := self._parse(inner)) is not None:
                content += before.rstrip()
                calls += new
                self._buffer = after
                self._is_after_call = True
            else:
                content += before + opening + inner + is_closed
                self._buffer = after

    def _parse(self, text: str) -> list[ToolCall] | None:
        """Return the calls that a text consists of, up to the number that is left; None if it is content."""
        calls = self._form.parse_calls(text, self._names)
        if not calls:
            return None
        if self._left is not None:
            calls = calls[: self._left]
            self._left -= len(calls)
        return calls

    def _take(self) -> str:
        text = self._buffer
        self._buffer = ""
        return text
