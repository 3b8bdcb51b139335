"""Constrained output: a grammar, compiled for a tokenizer, says which tokens may come next.

A `Grammar` is a JSON schema, a regular expression, a Lark or GBNF grammar, or a list of texts. `compile_grammar` checks
it in a separate process with limits on time and memory (`grammar_handler.py`), then compiles it for the tokens of a
tokenizer. Each row has a `TokenMatcher`: `allowed` is the mask for `sample_tokens`, `add` takes the chosen token.

The mask is exact: it allows a token if and only if some text of the grammar begins with the text so far and the
token's bytes. JSON has its properties in the schema's order, and bounded whitespace. The engine is `llguidance`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from anymamba.generation.sandbox import shared_sandbox
from anymamba.generation.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or that became too complex for the engine."""


@dataclass(frozen=True)
class Grammar:
    """A set of texts; the class methods make one.

    Attributes:
        kind: Language of the source: "json_schema", "regex", or "lark" for Lark and GBNF.
        source: JSON schema, regular expression or grammar.
        before: Text before a JSON value.
        after: Text after it.
    """

    kind: Literal["json_schema", "regex", "lark"]
    source: str
    before: str = ""
    after: str = ""

    @classmethod
    def from_schema(cls, schema: Any, *, before: str = "", after: str = "") -> Grammar:
        """Return the JSON values that a schema describes, between two texts.

        Args:
            schema: JSON schema as a mapping or a text, or a class with `model_json_schema`, such as a pydantic model.
            before: Text before the value.
            after: Text after the value.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise GrammarError(f"the JSON schema is not readable JSON ({error})") from error
        if not isinstance(schema, Mapping):
            raise TypeError(f"expected a JSON schema as a mapping or a model class, got {type(schema).__name__}")
        try:
            return cls("json_schema", json.dumps(schema), before, after)
        except (TypeError, ValueError) as error:
            raise TypeError(f"a JSON schema must be plain data, as JSON has it ({error})") from error

    @classmethod
    def from_choices(cls, choices: Any) -> Grammar:
        """Return a list of texts."""
        if isinstance(choices, str) or not all(isinstance(choice, str) and choice for choice in choices):
            raise TypeError(f"choices must be a list of texts that are not empty, got {choices!r:.60}")
        if not choices:
            raise GrammarError("expected at least one choice, got none")
        texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
        return cls("lark", f"start: CHOICE\nCHOICE: {texts}")


def read_grammar(schema: Any = None, regex: Any = None, grammar: Any = None, choices: Any = None) -> Grammar | None:
    """Return the grammar that one of four options describes, or None if all are None.

    Raises:
        TypeError: An option of the wrong type.
        ValueError: More than one option.
    """
    options = {"schema": schema, "regex": regex, "grammar": grammar, "choices": choices}
    names = [name for name, value in options.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"expected one of schema, regex, grammar and choices, got {' and '.join(names)}")
    for name, text in (("regex", regex), ("grammar", grammar)):
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{name} must be a text, got {type(text).__name__}")
    if schema is not None:
        return Grammar.from_schema(schema)
    if choices is not None:
        return Grammar.from_choices(choices)
    if regex is not None:
        return Grammar("regex", regex)
    return None if grammar is None else Grammar("lark", grammar)


class CompiledGrammar:
    """A grammar for the tokens of a tokenizer; `compile_grammar` makes one, and any number of rows can use it."""

    def __init__(self, matcher: Any, vocabulary: _Vocabulary) -> None:
        """Keep the engine's matcher at its beginning."""
        self._matcher = matcher
        self._vocabulary = vocabulary

    def start(self, vocab_size: int) -> TokenMatcher:
        """Return the matcher of a new row, for a model with this number of tokens."""
        return TokenMatcher(self._matcher.deep_copy(), self._vocabulary, vocab_size)


class TokenMatcher:
    """The tokens of one row, matched against a grammar.

    Attributes:
        allowed: True for the tokens that may come next (v,), among them the end tokens once the text is complete.
        is_complete: Whether the row has ended: an end token came, or no longer text begins with this one.
    """

    def __init__(self, matcher: Any, vocabulary: _Vocabulary, vocab_size: int) -> None:
        """Begin with no tokens."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._text_tokens = len(vocabulary.tokens) - 1  # without the engine's own end token
        self._end_tokens = [token for token in vocabulary.end if token < vocab_size]
        self._twins = {token: first for token, first in vocabulary.twins.items() if token < vocab_size}
        self.is_complete = False
        self.allowed: Bool[Tensor, " v"] = self._compute_mask()

    def add(self, token: int) -> None:
        """Add an allowed token.

        Raises:
            GrammarError: The grammar has become too complex for the engine.
            ValueError: The token is not allowed.
        """
        if self.is_complete or not bool(self.allowed[token]):
            raise ValueError(f"expected a token that the grammar allows, got {token}")
        if token in self._end_tokens:
            self.is_complete = True
            return
        self._matcher.consume_token(self._twins.get(token, token))
        self.allowed = self._compute_mask()

    def _compute_mask(self) -> Bool[Tensor, " v"]:
        # 1) The engine's mask has one bit per token of the tokenizer, whose vocabulary may be smaller or larger.
        content = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            message = " ".join(str(self._matcher.get_error()).split())[:200]
            raise GrammarError(f"the grammar became too complex: {message}")
        bits = np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little", count=self._vocab_size)
        allowed = torch.from_numpy(bits).bool()
        # 2) The end tokens are allowed where the text is complete; it has ended if nothing else is.
        allowed[self._text_tokens :] = False  # the model may have more tokens than the tokenizer
        if self._twins:
            allowed[list(self._twins)] = allowed[list(self._twins.values())]
        allowed[self._end_tokens] = False
        is_text = bool(self._matcher.is_accepting())
        if not bool(allowed.any()):
            if not is_text:
                raise GrammarError("the grammar asks for text that the model has no tokens for")
            self.is_complete = True
        allowed[self._end_tokens] = is_text
        return allowed


_lock = threading.Lock()
_vocabularies: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()


def compile_grammar(grammar: Grammar, tokenizer: Tokenizer) -> CompiledGrammar:
    """Compile a grammar for the tokens of a tokenizer.

    Args:
        grammar: Grammar, which is first compiled in a separate process, for at most 2 seconds and in 512 MiB.
        tokenizer: Tokenizer of the model: the byte tokenizer, or one whose file says which bytes each token stands for.

    Raises:
        GrammarError: The grammar cannot be compiled, allows no text, or is too large.
        ValueError: The engine is not installed, or cannot use the tokenizer.
    """
    llguidance = _import_engine()
    vocabulary = _find_vocabulary(llguidance, tokenizer)
    try:
        source = shared_sandbox("grammar_handler.py").run(**vars(grammar))
    except ValueError as error:
        raise GrammarError(f"the {_NAMES[grammar.kind]} cannot be used: {error}") from error
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(vocabulary.engine, source, log_level=0, limits=limits)
    if matcher.is_error():
        message = " ".join(matcher.get_error().split())[:300]
        raise GrammarError(f"the {_NAMES[grammar.kind]} cannot be used: {message}")
    return CompiledGrammar(matcher, vocabulary)


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}


def _import_engine() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError("constrained output needs llguidance (pip install 'anymamba[serve]')") from error
    return llguidance


def _find_vocabulary(llguidance: Any, tokenizer: Tokenizer) -> _Vocabulary:
    """Return the engine's form of a tokenizer, which takes up to a second to make, and is kept with the tokenizer."""
    with _lock:
        if tokenizer not in _vocabularies:
            _vocabularies[tokenizer] = _Vocabulary(llguidance, tokenizer)
        return _vocabularies[tokenizer]


class _Vocabulary:
    """The bytes of every token, in the form that the engine expects, and one more token that ends a text.

    The tokenizer may have no end token, or several; the engine needs one of its own. Of tokens with the same bytes, the
    engine knows only the first.

    Attributes:
        engine: The engine's tokenizer.
        twins: The other tokens with the same bytes, each with the first.
        end: Tokens of the tokenizer that end a text.
    """

    bos_token_id = None

    def __init__(self, llguidance: Any, tokenizer: Tokenizer) -> None:
        if isinstance(tokenizer, ByteTokenizer):
            tokens = [bytes([i]) for i in range(256)]
            special: set[int] = set()
        elif isinstance(tokenizer, FileTokenizer):
            tokens, special = _read_tokens(llguidance, tokenizer)
        else:
            raise ValueError(f"constrained output needs a tokenizer of this library, got {type(tokenizer).__name__}")
        texts = {token: content for token, content in enumerate(tokens) if token not in special}
        first: dict[bytes, int] = {}
        for token, content in texts.items():
            first.setdefault(content, token)
        self.twins = {token: first[content] for token, content in texts.items() if token != first[content]}
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*special, *self.twins, self.eos_token_id]
        # 0xff begins no character, so no grammar asks for these.
        hidden = set(self.special_token_ids)
        self.tokens = [b"\xff<%d>" % i if i in hidden else content for i, content in enumerate([*tokens, b""])]
        self.end = tokenizer.end
        self.engine = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), slices=[])

    def __call__(self, text: bytes | str) -> list[int]:
        return []  # only text that is forced would be tokenized, and `grammar_handler.py` lets the engine force none


def _read_tokens(llguidance: Any, tokenizer: FileTokenizer) -> tuple[list[bytes], set[int]]:
    """Return the bytes of every token of a tokenizer.json, and the special tokens, which have no text."""
    try:
        engine_tokenizer = llguidance.LLTokenizer(tokenizer.to_json(), slices=[])
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the engine's panics are not exceptions
        message = " ".join(str(error).split())[:200]
        raise ValueError(f"{tokenizer.path}: constrained output cannot use this tokenizer: {message}") from error
    ids = range(engine_tokenizer.vocab_size)
    special = {i for i in ids if engine_tokenizer.is_special_token(i)}
    return [engine_tokenizer.decode_bytes([i]) for i in ids], special
