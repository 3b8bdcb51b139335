"""Grammars as the grammar engine's own source, checked by compiling them, in the process of `sandbox_worker.py`.

A grammar that exceeds the engine's limits, or this process's, is rejected here and never reaches the caller's process.
This file runs as a script. It imports only llguidance and the standard library.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# A space, or a line break with an indentation: enough to write JSON on one line or on many, and never without an end.
WHITESPACE = r"( |\n[ \t]{0,16})"
# Without it, the engine allows only one way to write text that the grammar forces: that of the tokenizer.
_ALL_TOKENS = '%llguidance {"no_forcing": true}\n'
_STACK_BYTES = 2**22  # half of what other threads usually have, so that what compiles here compiles there


class ByteVocabulary:
    """A token for each byte, and one that ends a text."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)

    def __init__(self) -> None:
        """Make the tokens."""
        self.tokens = [bytes([i]) for i in range(256)] + [b"\xff<end>"]

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text."""
        return list(text.encode() if isinstance(text, str) else text)


_tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary()), slices=[])


def write_source(kind: str, text: str, before: str, after: str) -> str:
    """Return a grammar in the engine's own language."""
    if kind == "json_schema":
        options: JsonCompileOptions = {"whitespace_pattern": WHITESPACE, "lenient": False}
        compiled = json.loads(LLMatcher.grammar_from_json_schema(text, overrides=options))
        value = f"%json {json.dumps(compiled['grammars'][0]['json_schema'])}"
        lark = "start: " + " ".join([*([json.dumps(before)] if before else []), value])
        lark += f" {json.dumps(after)}" if after else ""
    elif kind == "regex":
        lark = f"start: /{regex_to_lark(text, use_ascii='')}/"
    else:
        lark = any_to_lark(text)
    return LLMatcher.grammar_from_lark(_ALL_TOKENS + lark)


def compile_grammar(kind: str, source: str, before: str, after: str) -> dict[str, Any]:
    """Return the source of a grammar that compiles and has a text of at least one byte, or what is wrong with it."""
    try:
        source = write_source(kind, source, before, after)
    except RecursionError:
        return {"problem": "it is nested too deeply"}
    except Exception as error:  # the converter's own errors have no common class
        return {"problem": " ".join(str(error).split())[:300]}
    matcher = LLMatcher(_tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False))
    mask = b"" if matcher.is_error() else matcher.deep_copy().compute_bitmask()
    if matcher.is_error():
        return {"problem": " ".join(matcher.get_error().split())[:300]}
    if not any(mask[:32]):
        return {"problem": "it allows no text but the empty one"}
    return {"text": source}


def reply(request: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """Compile a grammar in a thread with a small stack: one that is nested too deeply ends this process."""
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(compile_grammar(**request)))
    threading.stack_size(_STACK_BYTES)
    thread.start()
    thread.join()
    return answers[0] if answers else {"problem": "it cannot be compiled", "ended": True}
