"""Limits on what a tokenizer.json may do to a text, read off its steps before any text is tokenized.

A tokenizer.json is somebody else's program: its normalizer may double a text forty times. And a prompt that is too long
should be rejected before minutes are spent on its tokens. Both follow from how much each step may lengthen or shorten
a text. Steps are the JSON objects of the file, such as `{"type": "NFC"}`.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from typing import Any

MAX_GROWTH = 1000.0

# The most bytes that a byte of text may become; Unicode's own figures for its normalization forms.
_GROWTH = {"NFC": 3.0, "NFD": 3.0, "NFKC": 11.0, "NFKD": 11.0, "Lowercase": 1.5, "ByteLevel": 2.0}
_GROWTH["BertNormalizer"] = 5.0
# Unicode's composition shortens a text to no less than this fraction of its bytes.
_NFC_SHRINKAGE = 3
# Steps that neither drop text nor shorten it, other than NFC.
_PRESERVING = ("NFC", "NFD", "Prepend", "ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")


def check_growth(where: str, tokenizer: Any) -> None:
    """Raise `ValueError` if the normalizer or decoder may make a text more than `MAX_GROWTH` times longer."""
    for part in ("normalizer", "decoder"):
        growth = math.prod(map(growth_of, _steps(getattr(tokenizer, part))))
        if growth > MAX_GROWTH:
            raise ValueError(
                f"{where}: the {part} may make a text {growth:,.0f} times longer; at most {MAX_GROWTH:,.0f} times is "
                "accepted"
            )


def max_bytes_per_token(tokenizer: Any) -> int | None:
    """Return the most bytes of a text that one token can stand for.

    None if any amount of text may become one token or none, as with words that are replaced by an unknown token, or
    spaces that are dropped.
    """
    model = tokenizer.model
    steps = [*_steps(tokenizer.normalizer), *_steps(tokenizer.pre_tokenizer)]
    names = [step["type"] for step in steps]
    added = tokenizer.get_added_tokens_decoder().values()
    if tokenizer.truncation is not None or not all(map(_preserves_text, steps)):
        return None
    if any(token.lstrip or token.rstrip for token in added):  # these take any number of spaces with them
        return None
    if getattr(model, "continuing_subword_prefix", None):  # a byte within a word may then be unknown, and is dropped
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if type(model).__name__ == "BPE" and "ByteLevel" in names and len(_byte_alphabet() & vocabulary.keys()) == 256:
        sizes = [len(token) for token in vocabulary]  # a character stands for a byte
    elif getattr(model, "byte_fallback", False) and all(f"<0x{i:02X}>" in vocabulary for i in range(256)):
        sizes = [len(token.encode()) for token in vocabulary]
    else:
        return None
    longest = max((*sizes, *(len(token.content.encode()) for token in added)))
    return longest * (_NFC_SHRINKAGE if "NFC" in names else 1)


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder, with sequences flattened."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = [*next(value for value in step.values() if isinstance(value, list)), *waiting]
        else:
            yield step


def growth_of(step: dict[str, Any]) -> float:
    """Return how many times longer a step may make a text."""
    if step["type"] == "Prepend":
        return 1.0 + len(step["prepend"].encode())
    if step["type"] == "Precompiled":
        # A sentencepiece map: the size of a trie, the trie, and replacements that end with 0.
        charsmap = base64.b64decode(step["precompiled_charsmap"])
        replacements = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
        return float(max(1, *map(len, replacements)))
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String", "").encode()  # a regular expression may match nothing
        content = step["content"].encode()
        return max(1.0, len(content) / len(pattern)) if pattern else 1.0 + len(content)
    return _GROWTH.get(step["type"], 1.0)


def _preserves_text(step: dict[str, Any]) -> bool:
    """Return whether a step keeps every character, in as many bytes or more; NFC counts as one that does."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in _PRESERVING


def _byte_alphabet() -> set[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return set(ByteLevel.alphabet())
