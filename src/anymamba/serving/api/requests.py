"""Requests: the fields of a JSON body, checked one at a time.

Every function that reads a field raises `ApiError` with status 400, whose `param` names the field.
"""

from __future__ import annotations

import json
import math
import reprlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from anymamba.core.config_fields import suggest
from anymamba.core.io import parse_json
from anymamba.generation.sampling import Sampling
from anymamba.serving.api.errors import ApiError, invalid_value

# Fields of the API that have no effect here.
_IGNORED = {
    "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier", "prompt_cache_retention",
}  # fmt: skip
# Fields of the API that are not supported, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""), "response_format": (None, {"type": "text"}), "tools": (None, []), "functions": (None, []),
    "tool_choice": (None, "none", "auto"), "function_call": (None, "none", "auto"), "modalities": (None, ["text"]),
    "audio": (None,), "prediction": (None,), "reasoning_effort": (None, "none"), "verbosity": (None, "medium"),
    "web_search_options": (None,), "parallel_tool_calls": (None, True, False),
}  # fmt: skip

_PREVIEW_CHARS = 1000  # longer values are not formatted for an error message

_Default = TypeVar("_Default", int, None)


def parse_body(content: bytes) -> dict[str, Any]:
    """Parse the JSON object of a request.

    Raises:
        ApiError: The body is not a JSON object in UTF-8.
    """
    try:
        value = parse_json(content.decode("utf-8"))
    except ValueError as error:
        message = f"the body must be a JSON object in UTF-8: {str(error)[:200]}"
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_describe_type(value)}", code="invalid_json")
    return value


def check_fields(body: dict[str, Any], known: set[str], model: str) -> None:
    """Reject unknown fields, unsupported values, and the name of another model.

    Raises:
        ApiError: One of them occurs.
    """
    for name, value in body.items():
        if name not in known and name not in _IGNORED:
            hint = suggest(name[:80], known)
            raise ApiError(400, f"unknown field {preview(name)}{hint}", param=name[:80], code="unknown_parameter")
        if name in _NEUTRAL and not any(value == ok and type(value) is type(ok) for ok in _NEUTRAL[name]):
            message = f"{name} is not supported, got {preview(value)}"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    requested_model = body.get("model", model)
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


def _describe_type(value: Any) -> str:
    types = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return types.get(type(value), "a number")


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


_ROLES = ("system", "developer", "user", "assistant")
_SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias",
}  # fmt: skip
_BOTH = {
    "model", "max_tokens", "n", "stop", "stream", "stream_options", "session", "ignore_eos", "return_token_ids",
    "logprobs", *_SAMPLING,
}  # fmt: skip
_COMPLETION = _BOTH | {"prompt", "echo", "best_of", "suffix"}
_CHAT = _BOTH | {
    "messages", "max_completion_tokens", "top_logprobs", "response_format", "tools", "tool_choice", "functions",
    "function_call", "parallel_tool_calls", "modalities", "audio", "prediction", "reasoning_effort", "verbosity",
    "web_search_options",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on each request, and on all of them together.

    Attributes:
        max_body_bytes: Size of a body.
        max_prompt_tokens: Length of a prompt.
        max_tokens: Length of a reply.
        max_choices: Continuations of a request, summed over its prompts.
        max_requests: Open requests, waiting ones included.
        request_seconds: Time from the arrival of a request to its end.
        body_seconds: Time for the headers of a request to arrive, and again for its body.
    """

    max_body_bytes: int = 4 * 2**20
    max_prompt_tokens: int = 131_072
    max_tokens: int = 4096
    max_choices: int = 16
    max_requests: int = 256
    request_seconds: float = 600.0
    body_seconds: float = 10.0


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """The checked fields of a request for text.

    Attributes:
        messages: Conversation of a chat request, or None for a completion.
        prompts: Prompts of a completion, either texts or lists of token ids.
        sampling: Rule by which tokens are chosen, with its seed set.
        max_tokens: Largest number of tokens per continuation.
        n: Number of continuations per prompt.
        stop_texts: Texts before which a continuation ends.
        logprobs: Number of likely tokens to list for each token, or None for no log-probabilities.
        echo: True if the text of a completion begins with its prompt.
        stream: True if tokens are sent as they are generated.
        include_usage: True if a stream ends with the token counts.
        session: Name of a session, or None.
        ignore_eos: True if the end-of-text token is treated like any other.
        return_token_ids: True if token ids are sent with the text.
    """

    messages: list[dict[str, str]] | None = None
    prompts: list[str] | list[list[int]] = field(default_factory=list)
    sampling: Sampling
    max_tokens: int
    n: int
    stop_texts: tuple[str, ...]
    logprobs: int | None
    echo: bool = False
    stream: bool
    include_usage: bool
    session: str | None
    ignore_eos: bool
    return_token_ids: bool

    @property
    def continuations(self) -> int:
        """Number of continuations, summed over the prompts."""
        return self.n * (1 if self.messages is not None else len(self.prompts))


def read_completion(body: dict[str, Any], limits: Limits, vocab_size: int, model: str) -> GenerationRequest:
    """Read the body of a request to /v1/completions.

    Raises:
        ApiError: A field is invalid.
    """
    check_fields(body, _COMPLETION, model)
    logprobs = read_int(body, "logprobs", None, 0, 20)
    best_of = read_int(body, "best_of", None, 1, limits.max_choices)
    request = GenerationRequest(
        prompts=_read_prompts(body, limits, vocab_size),
        echo=read_bool(body, "echo"),
        logprobs=logprobs,
        max_tokens=read_int(body, "max_tokens", min(16, limits.max_tokens), 0, limits.max_tokens),
        **_read_common_fields(body, limits, vocab_size),
    )
    if best_of is not None and best_of != request.n:
        raise invalid_value("best_of", f"best_of must be equal to n ({request.n}) or left out, got {best_of}")
    return _check_continuations(request, limits)


def read_chat(body: dict[str, Any], limits: Limits, vocab_size: int, model: str) -> GenerationRequest:
    """Read the body of a request to /v1/chat/completions.

    Raises:
        ApiError: A field is invalid.
    """
    check_fields(body, _CHAT, model)
    if body.get("max_tokens") is not None and body.get("max_completion_tokens") is not None:
        raise invalid_value("max_tokens", "expected max_tokens or max_completion_tokens, got both")
    name = "max_tokens" if body.get("max_tokens") is not None else "max_completion_tokens"
    top_logprobs = read_int(body, "top_logprobs", None, 0, 20)
    with_logprobs = read_bool(body, "logprobs")
    if top_logprobs is not None and not with_logprobs:
        raise invalid_value("top_logprobs", "top_logprobs requires logprobs: true")
    request = GenerationRequest(
        messages=_read_messages(body),
        logprobs=(top_logprobs or 0) if with_logprobs else None,
        max_tokens=read_int(body, name, min(1024, limits.max_tokens), 1, limits.max_tokens),
        **_read_common_fields(body, limits, vocab_size),
    )
    return _check_continuations(request, limits)


def _check_continuations(request: GenerationRequest, limits: Limits) -> GenerationRequest:
    if request.continuations > limits.max_choices:
        expected = f"at most {limits.max_choices} continuations (n for each prompt)"
        raise invalid_value("n", f"a request may ask for {expected}, got {request.continuations}")
    if request.session is not None and request.continuations > 1:
        raise invalid_value("n", f"a session takes one continuation at a time, got {request.continuations}")
    return request


def _read_common_fields(body: dict[str, Any], limits: Limits, vocab_size: int) -> dict[str, Any]:
    stream = read_bool(body, "stream")
    options = body.get("stream_options")
    include_usage = False
    if options is not None:
        if not isinstance(options, dict) or not set(options) <= {"include_usage", "include_obfuscation"}:
            expected = "an object with include_usage"
            raise invalid_value("stream_options", f"stream_options must be {expected}, got {preview(options)}")
        if not stream:
            raise invalid_value("stream_options", "stream_options requires stream: true")
        include_usage = read_bool(options, "include_usage")
    session = body.get("session")
    if session is not None and not (
        isinstance(session, str) and 1 <= len(session) <= 256 and is_valid_unicode(session)
    ):
        raise invalid_value("session", f"session must be a string of 1 to 256 characters, got {preview(session)}")
    return {
        "sampling": _read_sampling(body, vocab_size),
        "n": read_int(body, "n", 1, 1, limits.max_choices),
        "stop_texts": _read_stop_texts(body),
        "stream": stream,
        "include_usage": include_usage,
        "session": session,
        "ignore_eos": read_bool(body, "ignore_eos"),
        "return_token_ids": read_bool(body, "return_token_ids"),
    }


def _read_sampling(body: dict[str, Any], vocab_size: int) -> Sampling:
    seed = read_int(body, "seed", None, -(2**63), 2**64 - 1)
    top_k = read_int(body, "top_k", None, -1, 2**31)
    options: dict[str, Any] = {
        "temperature": read_number(body, "temperature", 1.0, 0.0, 100.0),
        "top_p": read_number(body, "top_p", 1.0, 0.0, 1.0, exclude_low=True),
        "min_p": read_number(body, "min_p", 0.0, 0.0, 0.999999),
        "top_k": top_k if top_k is not None and top_k > 0 else None,
        "presence_penalty": read_number(body, "presence_penalty", 0.0, -2.0, 2.0),
        "frequency_penalty": read_number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        "repetition_penalty": read_number(body, "repetition_penalty", 1.0, 0.0, 100.0, exclude_low=True),
        "logit_bias": _read_logit_bias(body, vocab_size),
        "seed": secrets.randbits(63) if seed is None else seed,
    }
    try:
        return Sampling(**options)
    except ValueError as error:  # in the range of the API, but more than float32 can compute
        raise invalid_value(str(error).partition(" ")[0], str(error)) from error


def _read_logit_bias(body: dict[str, Any], vocab_size: int) -> dict[int, float] | None:
    table = body.get("logit_bias")
    if table is None or table == {}:
        return None
    if not isinstance(table, dict) or len(table) > 1024:
        expected = "an object with up to 1,024 token ids"
        raise invalid_value("logit_bias", f"logit_bias must be {expected}, got {preview(table)}")
    bias = {}
    for token in table:
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab_size):
            expected = f"token ids below {vocab_size}"
            raise invalid_value("logit_bias", f"the keys of logit_bias must be {expected}, got {preview(token)}")
        bias[int(token)] = read_number(table, token, 0.0, -100.0, 100.0)
    return bias


def _read_stop_texts(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    is_list = isinstance(stops, list) and len(stops) <= 16
    if not is_list or not all(isinstance(x, str) and 0 < len(x) <= 1024 and is_valid_unicode(x) for x in stops):
        expected = "a string of 1 to 1,024 characters, or a list of up to 16"
        raise invalid_value("stop", f"stop must be {expected}, got {preview(stop)}")
    return tuple(stops)


def _read_prompts(body: dict[str, Any], limits: Limits, vocab_size: int) -> Any:
    prompt = body.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(type(x) is int for x in prompt)):
        prompt = [prompt]
    prompts = prompt if isinstance(prompt, list) else []
    are_texts = all(isinstance(text, str) and is_valid_unicode(text) for text in prompts)
    are_ids = all(isinstance(ids, list) and ids and all(type(i) is int for i in ids) for ids in prompts)
    if not prompts or not (are_texts or are_ids):
        expected = "a string, token ids, or a list of either"
        raise invalid_value("prompt", f"prompt must be {expected}, got {preview(prompt)}")
    if len(prompts) > limits.max_choices:
        raise invalid_value("prompt", f"prompt may be a list of at most {limits.max_choices}, got {len(prompts)}")
    if are_ids and not are_texts:
        outside = next((i for ids in prompts for i in ids if not 0 <= i < vocab_size), None)
        if outside is not None:
            raise invalid_value("prompt", f"token ids must be between 0 and {vocab_size - 1}, got {preview(outside)}")
    return prompts


def _read_messages(body: dict[str, Any]) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid_value("messages", f"messages must be a list of at least one message, got {preview(messages)}")
    return [_read_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _read_message(location: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not set(message) <= {"role", "content", "name", "refusal"}:
        raise invalid_value(location, f"{location} must be an object with role and content, got {preview(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        param = f"{location}.role"
        raise invalid_value(param, f"{param} must be one of {', '.join(_ROLES)}, got {preview(role)}")
    content = message.get("content")
    text = content
    if isinstance(content, list):
        is_text = all(
            isinstance(x, dict) and x.get("type") == "text" and isinstance(x.get("text"), str) for x in content
        )
        text = "".join(part["text"] for part in content) if is_text else None
    if not isinstance(text, str) or not is_valid_unicode(text):
        param = f"{location}.content"
        raise invalid_value(param, f"{param} must be text, got {preview(content)}")
    return {"role": "system" if role == "developer" else role, "content": text}
