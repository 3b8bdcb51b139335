"""What a request asks for, read from its body; for every mistake, one error names the field.

§ Fields of a request's body, one at a time: each has the right type and range, or one error names it.

The functions raise `ApiError` with status 400.
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
from anymamba.serving.api.errors import ApiError, invalid

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


def check_fields(body: dict[str, Any], known: set[str], model: str) -> None:
    """Refuse unknown fields, values that are not supported, and the name of another model.

    Raises:
        ApiError: there is one.
    """
    for name, value in body.items():
        if name not in known and name not in _IGNORED:
            raise ApiError(
                400, f"unknown field {shown(name)}{suggest(name, known)}", param=name[:80], code="unknown_parameter"
            )
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
    """Limits on one request, and on all of them together.

    Attributes:
        body: bytes of a request.
        prompt: tokens of a prompt.
        max_tokens: tokens of a reply.
        n: continuations of a request, of all its prompts together.
        requests: open requests, including waiting ones.
        seconds: time for a request, from its arrival to its end.
        body_seconds: time for a request's headers to arrive, and as much again for its body.
    """

    body: int = 4 * 2**20
    prompt: int = 131_072
    max_tokens: int = 4096
    n: int = 16
    requests: int = 256
    seconds: float = 600.0
    body_seconds: float = 10.0


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What a request asks for.

    Attributes:
        messages: of a chat, None for a completion.
        prompts: of a completion: texts, or lists of token ids.
        sampling: how tokens are chosen; its seed is set.
        max_tokens: the most tokens of each continuation.
        n: continuations of each prompt.
        stops: texts before which a continuation ends.
        logprobs: how many likely tokens are listed for each token, None for no log-probabilities.
        echo: whether a completion begins with its prompt.
        stream: whether tokens are sent as they come.
        include_usage: whether a stream ends with the number of tokens.
        session: a conversation's name.
        ignore_eos: whether the token that ends a text is treated like any other.
        return_token_ids: whether token ids are sent as well.
    """

    messages: list[dict[str, str]] | None = None
    prompts: list[str] | list[list[int]] = field(default_factory=list)
    sampling: Sampling
    max_tokens: int
    n: int
    stops: tuple[str, ...]
    logprobs: int | None
    echo: bool = False
    stream: bool
    include_usage: bool
    session: str | None
    ignore_eos: bool
    return_token_ids: bool

    @property
    def rows(self) -> int:
        """Continuations of all prompts."""
        return self.n * (1 if self.messages is not None else len(self.prompts))


def read_completion(body: dict[str, Any], limits: Limits, vocab_size: int, model: str) -> GenerationRequest:
    """What a body of /v1/completions asks for.

    Raises:
        ApiError: a field is wrong.
    """
    check_fields(body, _COMPLETION, model)
    logprobs = whole(body, "logprobs", None, 0, 20)
    best_of = whole(body, "best_of", None, 1, limits.n)
    wanted = GenerationRequest(
        prompts=_prompts(body, limits, vocab_size),
        echo=truth(body, "echo"),
        logprobs=logprobs,
        max_tokens=whole(body, "max_tokens", min(16, limits.max_tokens), 0, limits.max_tokens),
        **_common(body, limits, vocab_size),
    )
    if best_of is not None and best_of != wanted.n:
        raise invalid("best_of", f"best_of must be equal to n ({wanted.n}) or left out, got {best_of}")
    return _checked(wanted, limits)


def read_chat(body: dict[str, Any], limits: Limits, vocab_size: int, model: str) -> GenerationRequest:
    """What a body of /v1/chat/completions asks for.

    Raises:
        ApiError: a field is wrong.
    """
    check_fields(body, _CHAT, model)
    if body.get("max_tokens") is not None and body.get("max_completion_tokens") is not None:
        raise invalid("max_tokens", "expected max_tokens or max_completion_tokens, got both")
    name = "max_tokens" if body.get("max_tokens") is not None else "max_completion_tokens"
    top = whole(body, "top_logprobs", None, 0, 20)
    with_logprobs = truth(body, "logprobs")
    if top is not None and not with_logprobs:
        raise invalid("top_logprobs", "top_logprobs requires logprobs: true")
    wanted = GenerationRequest(
        messages=_messages(body),
        logprobs=(top or 0) if with_logprobs else None,
        max_tokens=whole(body, name, min(1024, limits.max_tokens), 1, limits.max_tokens),
        **_common(body, limits, vocab_size),
    )
    return _checked(wanted, limits)


def _checked(wanted: GenerationRequest, limits: Limits) -> GenerationRequest:
    if wanted.rows > limits.n:
        raise invalid(
            "n", f"a request may ask for at most {limits.n} continuations (n for each prompt), got {wanted.rows}"
        )
    if wanted.session is not None and wanted.rows > 1:
        raise invalid("n", f"a session takes one continuation at a time, got {wanted.rows}")
    return wanted


def _common(body: dict[str, Any], limits: Limits, vocab_size: int) -> dict[str, Any]:
    stream, options = truth(body, "stream"), body.get("stream_options")
    include_usage = False
    if options is not None:
        if not isinstance(options, dict) or not set(options) <= {"include_usage", "include_obfuscation"}:
            raise invalid(
                "stream_options", f"stream_options must be an object with include_usage, got {shown(options)}"
            )
        if not stream:
            raise invalid("stream_options", "stream_options requires stream: true")
        include_usage = truth(options, "include_usage")
    session = body.get("session")
    if session is not None and (not isinstance(session, str) or not 1 <= len(session) <= 256 or not is_text(session)):
        raise invalid("session", f"session must be a string of 1 to 256 characters, got {shown(session)}")
    return {
        "sampling": _sampling(body, vocab_size),
        "n": whole(body, "n", 1, 1, limits.n),
        "stops": _stops(body),
        "stream": stream,
        "include_usage": include_usage,
        "session": session,
        "ignore_eos": truth(body, "ignore_eos"),
        "return_token_ids": truth(body, "return_token_ids"),
    }


def _sampling(body: dict[str, Any], vocab_size: int) -> Sampling:
    seed = whole(body, "seed", None, -(2**63), 2**64 - 1)
    top_k = whole(body, "top_k", None, -1, 2**31)
    return Sampling(
        temperature=real(body, "temperature", 1.0, 0.0, 100.0),
        top_p=real(body, "top_p", 1.0, 0.0, 1.0, above=True),
        min_p=real(body, "min_p", 0.0, 0.0, 0.999999),
        top_k=top_k if top_k is not None and top_k > 0 else None,
        presence_penalty=real(body, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=real(body, "frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=real(body, "repetition_penalty", 1.0, 0.0, 100.0, above=True),
        logit_bias=_bias(body, vocab_size),
        seed=secrets.randbits(63) if seed is None else seed,
    )


def _bias(body: dict[str, Any], vocab_size: int) -> dict[int, float] | None:
    table = body.get("logit_bias")
    if table is None or table == {}:
        return None
    if not isinstance(table, dict) or len(table) > 1024:
        raise invalid("logit_bias", f"logit_bias must be an object with up to 1,024 token ids, got {shown(table)}")
    bias = {}
    for token in table:
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab_size):
            raise invalid(
                "logit_bias", f"the keys of logit_bias must be token ids below {vocab_size}, got {shown(token)}"
            )
        bias[int(token)] = real(table, token, 0.0, -100.0, 100.0)
    return bias


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    fine = isinstance(stops, list) and len(stops) <= 16
    if not fine or not all(isinstance(text, str) and 0 < len(text) <= 1024 and is_text(text) for text in stops):
        raise invalid(
            "stop", f"stop must be a string of 1 to 1,024 characters, or a list of up to 16, got {shown(stop)}"
        )
    return tuple(stops)


def _prompts(body: dict[str, Any], limits: Limits, vocab_size: int) -> Any:
    prompt = body.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(type(x) is int for x in prompt)):
        prompt = [prompt]
    texts = isinstance(prompt, list) and all(isinstance(text, str) and is_text(text) for text in prompt)
    ids = isinstance(prompt, list) and all(isinstance(x, list) and x and all(type(i) is int for i in x) for x in prompt)
    if not prompt or not (texts or ids):
        raise invalid(
            "prompt", f"prompt must be a string, token ids, or a list of either, got {shown(body.get('prompt'))}"
        )
    if len(prompt) > limits.n:
        raise invalid("prompt", f"prompt may be a list of at most {limits.n}, got {len(prompt)}")
    if ids and not texts:
        wrong = next((i for x in prompt for i in x if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise invalid("prompt", f"token ids must be between 0 and {vocab_size - 1}, got {shown(wrong)}")
    return prompt


def _messages(body: dict[str, Any]) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", f"messages must be a list of at least one message, got {shown(messages)}")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(where: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not set(message) <= {"role", "content", "name", "refusal"}:
        raise invalid(where, f"{where} must be an object with role and content, got {shown(message)}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}, got {shown(role)}")
    if isinstance(content, list):
        if not all(isinstance(x, dict) and x.get("type") == "text" and isinstance(x.get("text"), str) for x in content):
            raise invalid(f"{where}.content", f"{where}.content must be text, got {shown(content)}")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not is_text(content):
        raise invalid(f"{where}.content", f"{where}.content must be text, got {shown(content)}")
    return {"role": "system" if role == "developer" else role, "content": content}
