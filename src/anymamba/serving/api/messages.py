"""Messages of a conversation, and the tools that its replies may call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anymamba.core.io import parse_json
from anymamba.serving.api.fields import invalid_value, is_valid_unicode, preview, read_bool

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE = {"role", "content", "name", "refusal", "tool_calls", "tool_call_id", "audio", "annotations", "function_call"}
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_MAX_TOOLS = 128
_TEMPLATE_FIELDS = frozenset({"messages", "tools", "add_generation_prompt"})
TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """The tools of a request that may be called.

    Attributes:
        tools: Tools as the template gets them: {"type": "function", "function": {"name": ..., "parameters": ...}}.
        choice: Which one is called: "auto" for any or none, "required" for any, or the name of one.
        parallel: Whether a reply may have several calls.
    """

    tools: list[dict[str, Any]]
    choice: str
    parallel: bool

    @property
    def functions(self) -> dict[str, dict[str, Any]]:
        """Return the descriptions of the functions by name."""
        return {tool["function"]["name"]: tool["function"] for tool in self.tools}

    @property
    def most(self) -> int | None:
        """Return the largest number of calls; None for any number."""
        return None if self.parallel and self.choice in ("auto", "required") else 1


def read_tools(body: dict[str, Any]) -> ToolOptions | None:
    """Read tools, tool_choice and parallel_tool_calls; None if no tool may be called."""
    tools = body.get("tools")
    choice = body.get("tool_choice")
    parallel = body.get("parallel_tool_calls") is None or read_bool(body, "parallel_tool_calls")
    if tools is not None and (not isinstance(tools, list) or len(tools) > _MAX_TOOLS):
        raise invalid_value("tools", f"tools must be a list of up to {_MAX_TOOLS}, got {preview(tools)}")
    for i, tool in enumerate(tools or []):
        _check_tool(f"tools[{i}]", tool)
    name = choice
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
    if not tools and choice not in (None, "none", "auto"):
        raise invalid_value("tool_choice", f"tool_choice requires tools, got {preview(choice)}")
    if not tools or choice == "none":
        return None
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise invalid_value("tools", f"tools must have different names, got {preview(names)}")
    is_name = isinstance(choice, dict) and isinstance(name, str) and name in names
    if not is_name and choice not in (None, "auto", "required"):
        expected = "none, auto, required, or an object with the name of one of the tools"
        raise invalid_value("tool_choice", f"tool_choice must be {expected}, got {preview(choice)}")
    return ToolOptions(tools=tools, choice=str(name or "auto"), parallel=parallel)


def _check_tool(location: str, tool: Any) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        expected = 'an object with type "function" and a function'
        raise invalid_value(location, f"{location} must be {expected}, got {preview(tool)}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in ("auto", "required"):
        expected = "1 to 64 letters, digits, dots, dashes and underscores"
        raise invalid_value(location, f"{location}.function.name must be {expected}, got {preview(name)}")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid_value(
            location, f"{location}.function.parameters must be a JSON schema, got {preview(parameters)}"
        )


def read_template_values(body: dict[str, Any]) -> dict[str, Any]:
    """Read chat_template_kwargs: values for the chat template other than the conversation and its tools."""
    values = body.get("chat_template_kwargs")
    if values is None:
        return {}
    if not isinstance(values, dict) or not _TEMPLATE_FIELDS.isdisjoint(values):
        expected = f"an object without {', '.join(sorted(_TEMPLATE_FIELDS))}"
        raise invalid_value("chat_template_kwargs", f"chat_template_kwargs must be {expected}, got {preview(values)}")
    return values


def read_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the messages of a conversation, as a template gets them."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid_value("messages", f"messages must be a list of at least one message, got {preview(messages)}")
    return [_read_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _read_message(location: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not set(message) <= _MESSAGE:
        raise invalid_value(location, f"{location} must be an object with role and content, got {preview(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        param = f"{location}.role"
        raise invalid_value(param, f"{param} must be one of {', '.join(_ROLES)}, got {preview(role)}")
    for name in ("audio", "function_call"):  # which clients send as null
        if message.get(name) is not None:
            raise invalid_value(f"{location}.{name}", f"{location}.{name} is not supported")
    fields: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            expected = "a list, in a message of the assistant"
            raise invalid_value(f"{location}.tool_calls", f"{location}.tool_calls must be {expected}")
        fields["tool_calls"] = [_read_call(f"{location}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    if role == "tool":
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str) or not is_valid_unicode(call_id):
            param = f"{location}.tool_call_id"
            raise invalid_value(param, f"{param} must be the id of a call, got {preview(call_id)}")
        fields["tool_call_id"] = call_id
        if isinstance(message.get("name"), str) and is_valid_unicode(message["name"]):
            fields["name"] = message["name"]
    content = message.get("content")
    if content is None and calls:
        return {**fields, "content": ""}
    return {**fields, "content": _read_content(f"{location}.content", content)}


def _read_content(param: str, content: Any) -> str:
    text = content
    if isinstance(content, list):
        is_text = all(
            isinstance(x, dict) and x.get("type") == "text" and isinstance(x.get("text"), str) for x in content
        )
        text = "".join(part["text"] for part in content) if is_text else None
    if not isinstance(text, str) or not is_valid_unicode(text):
        hint = "; it may be null only in a message with tool_calls" if content is None else ""
        raise invalid_value(param, f"{param} must be text, got {preview(content)}{hint}")
    return text


def _read_call(location: str, call: Any) -> dict[str, Any]:
    """Read a call of an earlier reply; templates get its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not is_valid_unicode(name):
        raise invalid_value(location, f"{location} must be an object with a function, got {preview(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else {}
        except ValueError:
            arguments = None
    if not isinstance(arguments, Mapping) or not is_valid_unicode(json.dumps(arguments, ensure_ascii=False)):
        param = f"{location}.function.arguments"
        raise invalid_value(param, f"{param} must be a JSON object as text, got {preview(function.get('arguments'))}")
    call_id = call.get("id") if isinstance(call.get("id"), str) and is_valid_unicode(call["id"]) else ""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
