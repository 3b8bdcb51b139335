"""Requests for text: the fields of a JSON body, checked one at a time; an invalid one raises `ApiError`."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from anymamba.generation.grammar import Grammar, GrammarError, read_grammar
from anymamba.generation.sampling import Sampling
from anymamba.serving.api.fields import (
    UNSUPPORTED,
    check_fields,
    check_token_ids,
    invalid_value,
    is_valid_unicode,
    list_texts,
    preview,
    read_bool,
    read_int,
    read_number,
)
from anymamba.serving.api.messages import TOOL_FIELDS, ToolOptions, read_messages, read_template_values, read_tools

_COMMON = {
    "model", "max_tokens", "n", "stop", "stream", "stream_options", "session", "ignore_eos", "return_token_ids",
    "logprobs", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "response_format", "regex", "grammar", "choices",
}  # fmt: skip
_COMPLETION = _COMMON | {"prompt", "echo", "best_of", "suffix"}
_CHAT = (
    _COMMON
    | UNSUPPORTED.keys()
    | TOOL_FIELDS
    | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}
) - {"suffix"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on each request, and on all of them together."""

    max_body_bytes: int = 4 * 2**20
    max_prompt_tokens: int = 131_072
    max_tokens: int = 4096  # of a reply
    max_choices: int = 16  # continuations of a request, summed over its prompts
    max_requests: int = 256  # open at a time, waiting ones included
    request_seconds: float = 600.0  # from the arrival of a request to its end
    body_seconds: float = 10.0  # for the headers of a request to arrive, and again for its body


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """The checked fields of a request for text."""

    messages: list[dict[str, Any]] | None = None  # the conversation of a chat request, or None for a completion
    prompts: list[str] | list[list[int]] = field(default_factory=list)  # of a completion
    sampling: Sampling  # with its seed set
    max_tokens: int  # of each continuation
    n: int  # continuations per prompt
    stop_texts: tuple[str, ...]  # a continuation ends before them
    tools: ToolOptions | None = None  # that a chat may call
    template_values: dict[str, Any] = field(default_factory=dict)  # further values for the chat template
    grammar: Grammar | None = None  # that continuations follow
    grammar_field: str = ""  # that has the grammar, for errors
    logprobs: int | None  # likely tokens to list for each token, or None for no log-probabilities
    echo: bool = False  # the text of a completion begins with its prompt
    stream: bool
    include_usage: bool  # a stream ends with the token counts
    session: str | None  # its name
    ignore_eos: bool  # the end-of-text token is treated like any other
    return_token_ids: bool

    @property
    def continuations(self) -> int:
        """Number of continuations, summed over the prompts."""
        return self.n * (1 if self.messages is not None else len(self.prompts))


def read_completion(body: dict[str, Any], limits: Limits, vocab_size: int, model: str) -> GenerationRequest:
    """Read the body of a request to /v1/completions."""
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
    """Read the body of a request to /v1/chat/completions."""
    check_fields(body, _CHAT, model)
    if body.get("max_tokens") is not None and body.get("max_completion_tokens") is not None:
        raise invalid_value("max_tokens", "expected max_tokens or max_completion_tokens, got both")
    name = "max_tokens" if body.get("max_tokens") is not None else "max_completion_tokens"
    top_logprobs = read_int(body, "top_logprobs", None, 0, 20)
    with_logprobs = read_bool(body, "logprobs")
    if top_logprobs is not None and not with_logprobs:
        raise invalid_value("top_logprobs", "top_logprobs requires logprobs: true")
    request = GenerationRequest(
        messages=read_messages(body),
        tools=read_tools(body),
        template_values=read_template_values(body),
        logprobs=(top_logprobs or 0) if with_logprobs else None,
        max_tokens=read_int(body, name, min(1024, limits.max_tokens), 1, limits.max_tokens),
        **_read_common_fields(body, limits, vocab_size),
    )
    if request.tools is not None and request.grammar is not None:
        message = f"expected tools or {request.grammar_field}, got both; tool_choice none turns tools off"
        raise invalid_value(request.grammar_field, message)
    return _check_continuations(request, limits)


def read_text(body: dict[str, Any], model: str) -> str:
    """Read the body of a request to /tokenize."""
    check_fields(body, {"model", "prompt"}, model)
    prompt = body.get("prompt")
    if not isinstance(prompt, str) or not prompt or not is_valid_unicode(prompt):
        raise invalid_value("prompt", f"prompt must be a text, got {preview(prompt)}")
    return prompt


def read_tokens(body: dict[str, Any], vocab_size: int, model: str) -> list[int]:
    """Read the body of a request to /detokenize."""
    check_fields(body, {"model", "tokens"}, model)
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or list_texts(tokens) != [tokens]:
        raise invalid_value("tokens", f"tokens must be a list of token ids, got {preview(tokens)}")
    check_token_ids("tokens", [tokens], vocab_size)
    return tokens


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
        **_read_grammar(body),
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
    for token, value in table.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab_size):
            expected = f"token ids below {vocab_size}"
            raise invalid_value("logit_bias", f"the keys of logit_bias must be {expected}, got {preview(token)}")
        name = f"logit_bias.{token}"
        bias[int(token)] = read_number({name: value}, name, 0.0, -100.0, 100.0)
    return bias


def _read_stop_texts(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    is_list = isinstance(stops, list) and len(stops) <= 16
    if not is_list or not all(isinstance(x, str) and 0 < len(x) <= 1024 and is_valid_unicode(x) for x in stops):
        expected = "a string of 1 to 1,024 characters, or a list of up to 16"
        raise invalid_value("stop", f"stop must be {expected}, got {preview(stop)}")
    return tuple(stops)


def _read_grammar(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields `grammar` and `grammar_field` of a request, if its body has a grammar."""
    schema = _read_schema(body)
    options = {name: value for name in ("regex", "grammar", "choices") if (value := body.get(name)) is not None}
    names = [*(["response_format"] if schema is not None else []), *options]
    if len(names) > 1:
        raise invalid_value(names[1], f"expected one of response_format, regex, grammar and choices, got {names}")
    try:
        grammar = read_grammar(schema, **options)
    except (TypeError, GrammarError) as error:
        raise invalid_value(names[0], str(error)) from error
    return {} if grammar is None else {"grammar": grammar, "grammar_field": names[0]}


def _read_schema(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the JSON schema that `response_format` asks for."""
    response_format = body.get("response_format")
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        schema = response_format.get("json_schema")
        schema = schema.get("schema") if isinstance(schema, dict) else None
        if isinstance(schema, dict):
            return schema
        param = "response_format.json_schema.schema"
        raise invalid_value(param, f"{param} must be a JSON schema, got {preview(schema)}")
    expected = "an object whose type is text, json_object or json_schema"
    raise invalid_value("response_format", f"response_format must be {expected}, got {preview(response_format)}")


def _read_prompts(body: dict[str, Any], limits: Limits, vocab_size: int) -> Any:
    prompt = body.get("prompt")
    prompts = list_texts(prompt)
    if not prompts:
        expected = "a string, token ids, or a list of either"
        raise invalid_value("prompt", f"prompt must be {expected}, got {preview(prompt)}")
    if len(prompts) > limits.max_choices:
        raise invalid_value("prompt", f"prompt may be a list of at most {limits.max_choices}, got {len(prompts)}")
    check_token_ids("prompt", prompts, vocab_size)
    return prompts
