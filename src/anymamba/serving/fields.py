"""Fields of a request's body, one at a time: each has the right type and range, or one error names it.

The functions raise `ApiError` with status 400.
"""

from __future__ import annotations

import difflib
import json
import math
import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

from anymamba.ground.files import parse_json
from anymamba.serving.errors import ApiError, invalid

# Fields of the API that have no effect here.
_IGNORED = {
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "prompt_cache_key",
    "service_tier",
    "prompt_cache_retention",
}
# Fields of the API that are not supported, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""), "response_format": (None, {"type": "text"}), "tools": (None, []), "functions": (None, []),
    "tool_choice": (None, "none", "auto"), "function_call": (None, "none", "auto"), "modalities": (None, ["text"]),
    "audio": (None,), "prediction": (None,), "reasoning_effort": (None, "none"), "verbosity": (None, "medium"),
    "web_search_options": (None,), "parallel_tool_calls": (None, True, False),
}  # fmt: skip

_Default = TypeVar("_Default", int, None)


def parse_body(content: bytes) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        ApiError: the body is something else.
    """
    try:
        value = parse_json(content.decode("utf-8"))
    except ValueError as error:
        message = f"the body must be a JSON object in UTF-8: {str(error)[:200]}"
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_kind(value)}", code="invalid_json")
    return value


def expect_fields(body: dict[str, Any], known: set[str], model: str) -> None:
    """Refuse unknown fields, values that are not supported, and the name of another model.

    Raises:
        ApiError: there is one.
    """
    for name, value in body.items():
        if name not in known and name not in _IGNORED:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ApiError(400, f"unknown field {shown(name)}{hint}", param=name[:80], code="unknown_parameter")
        if name in _NEUTRAL and not any(value == fine and type(value) is type(fine) for fine in _NEUTRAL[name]):
            raise ApiError(
                400, f"{name} is not supported, got {shown(value)}", param=name, code="unsupported_parameter"
            )
    asked = body.get("model", model)
    if asked is not None and not isinstance(asked, str):
        raise invalid("model", f"model must be a name, got {shown(asked)}")
    if asked not in (None, model):
        message = f"there is no model {shown(asked)}; this server has {model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _number(body: dict[str, Any], name: str, fine: Callable[[Any], bool], what: str) -> Any:
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not fine(value)):
        raise invalid(name, f"{name} must be {what}, got {shown(value)}")
    return value


def whole(body: dict[str, Any], name: str, default: _Default, low: int, high: int) -> int | _Default:
    """A field that must be a whole number between two others, both included; `default` where it is missing or null."""
    what = f"a whole number from {low} to {high}"
    value = _number(body, name, lambda x: isinstance(x, int) and low <= x <= high, what)
    return default if value is None else value


def real(body: dict[str, Any], name: str, default: float, low: float, high: float, *, above: bool = False) -> float:
    """A field that must be a number between two others, both included; with `above`, the lower one is not."""
    what = f"a number {'above' if above else 'from'} {low:g} {'and up to' if above else 'to'} {high:g}"
    value = _number(body, name, lambda x: low <= x <= high and (x != low or not above) and math.isfinite(x), what)
    return default if value is None else float(value)


def truth(body: dict[str, Any], name: str) -> bool:
    """A field that must be true or false; false where it is missing or null."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(name, f"{name} must be true or false, got {shown(value)}")
    return bool(value)


def is_text(text: str) -> bool:
    """Whether it has no unpaired surrogate, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def shown(value: Any) -> str:
    """A value as JSON, shortened to fit a line; if it is not JSON, as Python shows it."""
    try:
        text = json.dumps(
            value if isinstance(value, str | int | float | bool | None) else json.loads(json.dumps(value))
        )
    except (ValueError, RecursionError):
        text = reprlib.repr(value)
    return text if len(text) <= 80 else f"{text[:60]} ... ({len(text)} characters)"
