"""The tokenizer in the header of a GGUF file, as the tokenizer.json that other formats have beside their weights.

Two kinds of vocabularies are read: byte pairs with merges ("gpt2"), with the ways of splitting a text that Mamba models
have, and pieces with scores ("llama", of sentencepiece), where the pair of neighbors that makes the piece with the
highest score is joined until there is none left.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

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
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def tokenizer_files(where: str, field: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """The tokenizer as files: names and contents.

    Args:
        where: names the file in errors.
        field: a value of the header by its name, with a default.

    Raises:
        ValueError: there is none, or one of a kind that cannot be written that way.
    """
    tokens, kind = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.model")
    if (whole := field("tokenizer.huggingface.json")) is not None:
        tokenizer: dict[str, Any] = json.loads(whole)
    elif kind is None or tokens is None:
        raise ValueError(f"{where}: the file has no tokenizer; pass one with --tokenizer")
    else:
        tokenizer = _tokenizer(where, kind, tokens, field)
    config: dict[str, Any] = {}
    for name in ("bos", "eos"):
        number = field(f"tokenizer.ggml.{name}_token_id")
        if number is not None and tokens is not None and number < len(tokens):
            config[f"{name}_token"] = tokens[number]
    if (template := field("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _tokenizer(where: str, kind: str, tokens: list[str], field: Callable[..., Any]) -> dict[str, Any]:
    """The content of a tokenizer.json."""
    kinds, split = field("tokenizer.ggml.token_type", [_NORMAL] * len(tokens)), field("tokenizer.ggml.pre", "default")
    if kind == "llama":
        scores = field("tokenizer.ggml.scores")
        if scores is None or not len(scores) == len(kinds) == len(tokens):
            found = "no scores" if scores is None else f"{len(scores)} scores and {len(kinds)} kinds"
            raise ValueError(f"{where}: expected a score and a kind for each of the {len(tokens)} tokens, got {found}")
        unknown = field("tokenizer.ggml.unknown_token_id", 0)
        parts = _pieces(tokens, kinds, scores, unknown, bool(field("tokenizer.ggml.add_space_prefix", True)))
    elif kind == "gpt2" and (splitter := _splitter(split)) is not None:
        parts = _byte_pairs(tokens, kinds, field("tokenizer.ggml.merges", []))
        parts |= {"pre_tokenizer": splitter, "decoder": _BYTES}
        parts["model"]["ignore_merges"] = split in _LIKE_LLAMA3
    else:
        found = kind if kind != "gpt2" else split
        raise ValueError(
            f"{where}: its tokenizer is of a kind that cannot be read ({found}); pass one with --tokenizer"
        )
    first = field("tokenizer.ggml.bos_token_id")
    if field("tokenizer.ggml.add_bos_token", kind == "llama" or split == "llama-bpe") and first is not None:
        parts["post_processor"] = _begins_with(tokens[first], first)
    return {"version": "1.0", "added_tokens": _added(tokens, kinds), **parts}


def _splitter(name: str) -> dict[str, Any] | None:
    """The split of a text into words; None for one that is not known here."""
    if name in _LIKE_GPT2:
        return _BYTES
    if name == "falcon":
        punctuation = {"type": "Punctuation", "behavior": "Contiguous"}
        return {"type": "Sequence", "pretokenizers": [punctuation, _BYTES, _isolated("[0-9][0-9][0-9]")]}
    if name in _LIKE_LLAMA3:
        return {"type": "Sequence", "pretokenizers": [_isolated(_GROUPS_OF_LLAMA3), {**_BYTES, "use_regex": False}]}
    return None


def _isolated(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _begins_with(token: str, number: int) -> dict[str, Any]:
    """A post-processor that puts a token before the first text of a sequence."""
    special, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, second],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _added(tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    """Tokens that are found in a text before it is split."""
    return [
        {"id": i, "content": token, "special": kind != _USER_DEFINED, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _vocabulary(tokens: list[str], kinds: list[int]) -> dict[str, int]:
    return {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}


def _byte_pairs(tokens: list[str], kinds: list[int], merges: list[str]) -> dict[str, Any]:
    pairs = [merge.split(" ") for merge in merges]
    return {"model": {"type": "BPE", "vocab": _vocabulary(tokens, kinds), "merges": pairs}}


def _pieces(tokens: list[str], kinds: list[int], scores: list[float], unknown: int, prefixed: bool) -> dict[str, Any]:
    """Pieces with scores as byte pairs: a pair's rank is the score of what it makes."""
    score = {token: s for token, kind, s in zip(tokens, kinds, scores, strict=True) if kind == _NORMAL}
    pairs = [
        (-value, -at, piece[:at], piece[at:])
        for piece, value in score.items()
        for at in range(1, len(piece))
        if piece[:at] in score and piece[at:] in score
    ]
    model = {
        "type": "BPE",
        "vocab": _vocabulary(tokens, kinds),
        "merges": [[left, right] for _, _, left, right in sorted(pairs)],
        "unk_token": tokens[unknown] if unknown < len(tokens) else None,
        "fuse_unk": True,
        "byte_fallback": kinds.count(_BYTE) == 256,
    }
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if not prefixed:
        return {"model": model, "normalizer": spaces, "decoder": {"type": "Sequence", "decoders": back}}
    before = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, spaces]}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {"model": model, "normalizer": before, "decoder": {"type": "Sequence", "decoders": [*back, strip]}}
