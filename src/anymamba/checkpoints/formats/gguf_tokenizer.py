"""Convert the tokenizer in the header of a GGUF file to the tokenizer.json that other formats have.

Two kinds of vocabularies are read: byte pairs with merges ("gpt2"), with the pre-tokenizers that Mamba models have, and
scored tokens ("llama", of sentencepiece), where the adjacent pair that makes the token with the highest score is merged
until no pair is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anymamba.core.io import parse_json

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # kinds of tokens
_SPACE = "▁"
# How a text is split before byte pairs are joined, by llama.cpp's names.
_LIKE_GPT2 = ("gpt-2", "gpt-neox", "olmo", "mpt", "phi-2", "default")
_LIKE_LLAMA3 = ("llama-bpe", "falcon3")
_GROUPS_OF_LLAMA3 = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def tokenizer_files(where: str, field: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """Return the contents of a tokenizer's files by name; `field(name, default)` reads the header.

    Raise `ValueError` for no tokenizer, a damaged one, or one of a kind that cannot be written that way.
    """
    tokens, kind = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.model")
    if (whole := field("tokenizer.huggingface.json")) is not None:
        tokenizer: dict[str, Any] = parse_json(whole, f"{where}: tokenizer.huggingface.json")
    elif kind is None or tokens is None:
        raise ValueError(f"{where}: the file has no tokenizer; pass one with --tokenizer")
    else:
        tokenizer = _tokenizer(where, kind, tokens, field)
    config: dict[str, Any] = {}
    for name in ("bos", "eos"):
        if (token := _token(tokens or [], field(f"tokenizer.ggml.{name}_token_id"))) is not None:
            config[f"{name}_token"] = token
    if (template := field("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _tokenizer(where: str, kind: str, tokens: list[str], field: Callable[..., Any]) -> dict[str, Any]:
    kinds, split = field("tokenizer.ggml.token_type", [_NORMAL] * len(tokens)), field("tokenizer.ggml.pre", "default")
    if len(kinds) != len(tokens):
        raise ValueError(f"{where}: expected a type for each of the {len(tokens)} tokens, got {len(kinds)}")
    if kind == "llama":
        scores = field("tokenizer.ggml.scores")
        if scores is None or len(scores) != len(tokens):
            received = "no scores" if scores is None else f"{len(scores)}"
            raise ValueError(f"{where}: expected a score for each of the {len(tokens)} tokens, got {received}")
        unknown = field("tokenizer.ggml.unknown_token_id", 0)
        parts = _describe_scored_tokens(
            tokens, kinds, scores, unknown, bool(field("tokenizer.ggml.add_space_prefix", True))
        )
    elif kind == "gpt2" and (splitter := _splitter(split)) is not None:
        merges = [merge.split(" ") for merge in field("tokenizer.ggml.merges", [])]
        model: dict[str, Any] = {"type": "BPE", "vocab": _vocabulary(tokens, kinds), "merges": merges}
        model["ignore_merges"] = split in _LIKE_LLAMA3
        parts = {"model": model, "pre_tokenizer": splitter, "decoder": _BYTE_LEVEL}
    else:
        name = kind if kind != "gpt2" else split
        raise ValueError(f"{where}: its tokenizer is of a kind that cannot be read ({name}); pass one with --tokenizer")
    begins_with_bos = field("tokenizer.ggml.add_bos_token", kind == "llama" or split == "llama-bpe")
    bos_id = field("tokenizer.ggml.bos_token_id")
    if begins_with_bos and (bos := _token(tokens, bos_id)) is not None:
        parts["post_processor"] = _prepend_token(bos, bos_id)
    return {"version": "1.0", "added_tokens": _list_added_tokens(tokens, kinds), **parts}


def _token(tokens: list[str], token_id: Any) -> str | None:
    return tokens[token_id] if isinstance(token_id, int) and 0 <= token_id < len(tokens) else None


def _splitter(name: str) -> dict[str, Any] | None:
    """Return the pre-tokenizer of a name; None for an unknown one."""
    if name in _LIKE_GPT2:
        return _BYTE_LEVEL
    if name == "falcon":
        punctuation = {"type": "Punctuation", "behavior": "Contiguous"}
        return {"type": "Sequence", "pretokenizers": [punctuation, _BYTE_LEVEL, _isolate("[0-9][0-9][0-9]")]}
    if name in _LIKE_LLAMA3:
        return {"type": "Sequence", "pretokenizers": [_isolate(_GROUPS_OF_LLAMA3), {**_BYTE_LEVEL, "use_regex": False}]}
    return None


def _isolate(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _prepend_token(token: str, token_id: int) -> dict[str, Any]:
    """Return a post-processor that puts a token before the first text of a sequence."""
    special, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _list_added_tokens(tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    """Return the tokens that are recognized in a text before it is split."""
    return [
        {"id": i, "content": token, "special": kind != _USER_DEFINED, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _vocabulary(tokens: list[str], kinds: list[int]) -> dict[str, int]:
    return {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}


def _describe_scored_tokens(
    tokens: list[str], kinds: list[int], scores: list[float], unknown: int, prefixed: bool
) -> dict[str, Any]:
    """Return tokens with scores as byte pairs: a pair's rank is the score of what it makes."""
    score = {token: s for token, kind, s in zip(tokens, kinds, scores, strict=True) if kind == _NORMAL}
    pairs = [
        (-value, -cut, token[:cut], token[cut:])
        for token, value in score.items()
        for cut in range(1, len(token))
        if token[:cut] in score and token[cut:] in score
    ]
    model = {
        "type": "BPE",
        "vocab": _vocabulary(tokens, kinds),
        "merges": [[left, right] for _, _, left, right in sorted(pairs)],
        "unk_token": _token(tokens, unknown),
        "fuse_unk": True,
        "byte_fallback": kinds.count(_BYTE) == 256,
    }
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = [{**spaces, "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if not prefixed:
        return {"model": model, "normalizer": spaces, "decoder": {"type": "Sequence", "decoders": back}}
    before = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, spaces]}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {"model": model, "normalizer": before, "decoder": {"type": "Sequence", "decoders": [*back, strip]}}
