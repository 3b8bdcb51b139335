"""Fields of a JSON body: how each kind is read, and the errors that reject them.

Every function that reads a field raises `ApiError`, whose `param` names the field.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

from anymamba.core.config_fields import suggest
from anymamba.core.io import parse_json

_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
# Fields of the API that have no effect here.
_IGNORED = {
    "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier", "prompt_cache_retention",
}  # fmt: skip
# Fields of the API that are not supported, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""), "functions": (None, []), "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]), "audio": (None,),
    "prediction": (None,), "reasoning_effort": (None, "none"), "verbosity": (None, "medium"),
    "web_search_options": (None,),
}  # fmt: skip

_PREVIEW_CHARS = 1000  # longer values are not formatted for an error message

_Default = TypeVar("_Default", int, None)


class ApiError(Exception):
    """An error that is sent to the client: a message for people, the name of the invalid field, a code for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str, headers: dict[str, str] | None = None
    ) -> None:
        """Create an error with this HTTP status."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the response."""
        kind = _ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid_value(param: str, message: str) -> ApiError:
    """Return the error for an invalid field."""
    return ApiError(400, message, param=param, code="invalid_value")


def too_many_requests(count: int) -> ApiError:
    """Return the error for a request beyond the limit on open requests."""
    message = f"the server has reached its limit of {count} open requests; try again later"
    return ApiError(429, message, code="too_many_requests", headers={"Retry-After": "1"})


def internal_error() -> ApiError:
    """Return the error for an unexpected failure, whose details belong in the log."""
    return ApiError(500, "internal server error; see the server's log", code="internal_error")


def parse_body(content: bytes) -> dict[str, Any]:
    """Parse the JSON object of a request."""
    try:
        value = parse_json(content.decode("utf-8"))
    except ValueError as error:
        message = f"the body must be a JSON object in UTF-8: {str(error)[:200]}"
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(value, dict):
        types = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
        message = f"the body must be a JSON object, got {types.get(type(value), 'a number')}"
        raise ApiError(400, message, code="invalid_json")
    return value


def check_fields(body: dict[str, Any], known: set[str], model: str) -> None:
    """Reject unknown fields, unsupported values, and the name of another model."""
    for name, value in body.items():
        if name not in known and name not in _IGNORED:
            hint = suggest(name[:80], known)
            raise ApiError(400, f"unknown field {preview(name)}{hint}", param=name[:80], code="unknown_parameter")
        if name in UNSUPPORTED and not any(value == ok and type(value) is type(ok) for ok in UNSUPPORTED[name]):
            message = f"{name} is not supported, got {preview(value)}"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    requested_model = body.get("model")
    if requested_model is not None and not isinstance(requested_model, str):
        raise invalid_value("model", f"model must be a name, got {preview(requested_model)}")
    if requested_model not in (None, model):
        message = f"there is no model {preview(requested_model)}; this server has {model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _read_real(body: dict[str, Any], name: str, is_valid: Callable[[Any], bool], expected: str) -> Any:
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not is_valid(value)):
        raise invalid_value(name, f"{name} must be {expected}, got {preview(value)}")
    return value


def read_int(body: dict[str, Any], name: str, default: _Default, low: int, high: int) -> int | _Default:
    """Read an integer from `low` to `high`, both included; return `default` if it is missing or null."""
    expected = f"an integer from {low} to {high}"
    value = _read_real(body, name, lambda x: isinstance(x, int) and low <= x <= high, expected)
    return default if value is None else value


def read_number(
    body: dict[str, Any], name: str, default: float, low: float, high: float, *, exclude_low: bool = False
) -> float:
    """Read a number from `low` to `high`, both included unless `exclude_low`; return `default` if it is missing."""
    expected = f"a number {'above' if exclude_low else 'from'} {low:g} {'and up to' if exclude_low else 'to'} {high:g}"
    value = _read_real(
        body, name, lambda x: low <= x <= high and (x != low or not exclude_low) and math.isfinite(x), expected
    )
    return default if value is None else float(value)


def read_bool(body: dict[str, Any], name: str) -> bool:
    """Read true or false; return False if it is missing or null."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid_value(name, f"{name} must be true or false, got {preview(value)}")
    return bool(value)


def is_valid_unicode(text: str) -> bool:
    """Return whether a text has no unpaired surrogates, which JSON can spell and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def preview(value: Any) -> str:
    """Format a value as JSON, shortened to fit a line; only the size of a large object or list is given."""
    if isinstance(value, str) and len(value) > _PREVIEW_CHARS:
        return f"{json.dumps(value[:_PREVIEW_CHARS])[:60]} ... ({len(value)} characters)"
    if not _is_small(value):
        return f"{'an object' if isinstance(value, dict) else 'a list'} with {len(value):,} entries"
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = reprlib.repr(value)
    return text if len(text) <= 80 else f"{text[:60]} ... ({len(text)} characters)"


def _is_small(value: Any) -> bool:
    """Return whether a value has few entries, nested ones included; no more than these few are visited."""
    budget = _PREVIEW_CHARS
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict | list | str):
            budget -= len(item)
        if budget < 0:
            return False
        if isinstance(item, dict | list):
            pending += item.values() if isinstance(item, dict) else item
    return True


def list_texts(value: Any) -> list[Any]:
    """Return a field that takes one text, one list of token ids, or several of either, as a list; empty if invalid."""
    texts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(texts, list):
        return []
    is_valid = all(isinstance(text, str) and is_valid_unicode(text) for text in texts) or all(map(_is_ids, texts))
    return texts if is_valid else []


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def check_token_ids(param: str, texts: list[Any], vocab_size: int) -> None:
    """Check the token ids among texts."""
    ids = (i for text in texts if not isinstance(text, str) for i in text)
    outside = next((i for i in ids if not 0 <= i < vocab_size), None)
    if outside is not None:
        raise invalid_value(param, f"token ids must be between 0 and {vocab_size - 1}, got {preview(outside)}")
