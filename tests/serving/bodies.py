# ruff: noqa: E501
"""Malformed bodies: every answer to them is 200, or a JSON error with a status of 4xx."""

import json
import random

WRONG = [
    None, True, False, 0, -1, 1, 2.5, -0.0, 1e308, 10**30, -(10**30), float("nan"), float("inf"), "", "x", "\u0000", "\ud800",
    "1", [], [[]], [None], [1], [-1], [10**12], ["x"], ["\ud800"], [[1, "x"]], {}, {"x": 1}, {"type": "text"}, "y" * 5000,
    [0] * 300, {"1": 1}, {"-1": 1}, {"999999": 1}, {"1": "x"}, {"1": 1000}, {"a": {"b": {"c": []}}},
]  # fmt: skip
FIELDS = [
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "best_of", "stop", "stream", "stream_options",
    "session", "ignore_eos", "return_token_ids", "logprobs", "top_logprobs", "temperature", "top_p", "top_k", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "echo", "suffix", "tools", "tool_choice", "parallel_tool_calls", "user",
    "response_format", "regex", "grammar", "choices", "unknown", "", "\ud800",
]  # fmt: skip
MESSAGES = [
    [], [{}], [{"role": "user"}], [{"role": "tool", "content": "x"}], [{"role": [], "content": "x"}], ["x"], [None],
    [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}], [{"role": "user", "content": "\ud800"}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}], [{"role": "assistant", "tool_calls": 1}],
    [{"role": "tool", "content": "x", "tool_call_id": "a"}], [{"role": "user", "content": "x", "extra": 1}], [{"role": "user", "content": ""}], [{"role": "user", "content": "x"}] * 50,
]  # fmt: skip


def bodies(count, seed):
    """Yield pairs of a path and the bytes of a body."""
    chance = random.Random(seed)
    for _ in range(count):
        chat = chance.random() < 0.5
        body = {"max_tokens": 2}
        body |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
        for _ in range(chance.choice([1, 1, 2, 4])):
            body[chance.choice(FIELDS)] = chance.choice(WRONG)
        if chat and chance.random() < 0.3:
            body["messages"] = chance.choice(MESSAGES)
        content = json.dumps(body).encode()
        yield "/v1/chat/completions" if chat else "/v1/completions", _damage(content, chance)


def _damage(content, chance):
    kind = chance.randrange(12)
    if kind == 0:  # cut short
        return content[: chance.randrange(len(content))]
    if kind == 1:  # broken UTF-8, and other bytes
        position = chance.randrange(len(content))
        return content[:position] + bytes(chance.randrange(256) for _ in range(4)) + content[position + 1 :]
    if kind == 2:
        deep = chance.choice([70, 5000, 100_000])
        return chance.choice([b"[" * deep, b"[" * deep + b"]" * deep, b'{"a":' * deep + b"1" + b"}" * deep])
    if kind == 3:
        return chance.choice(
            [b"", b"null", b"[]", b'"x"', b"1" * 5000, b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{} {}", b"{'a': 1}"]
        )
    if kind == 4:
        return content.decode().encode("utf-16")
    return content
