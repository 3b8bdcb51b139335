"""Compiled grammars of recent requests: clients send the same one again and again."""

from __future__ import annotations

from collections import OrderedDict

from anymamba.generation.grammar import CompiledGrammar, Grammar, GrammarError, compile_grammar
from anymamba.generation.tokenizers import Tokenizer
from anymamba.serving.api.fields import ApiError, invalid_value

_MAX_GRAMMARS = 64


class GrammarCache:
    """The grammars that were used last, compiled for the tokens of a tokenizer; for one thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Begin with no grammars."""
        self._tokenizer = tokenizer
        self._grammars: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    def compile(self, grammar: Grammar, field: str) -> CompiledGrammar:
        """Return a grammar that was made from a field of a request; raise `ApiError` if it cannot be used."""
        if grammar not in self._grammars:
            try:
                self._grammars[grammar] = compile_grammar(grammar, self._tokenizer)
            except GrammarError as error:
                raise invalid_value(field, str(error)) from error
            except ValueError as error:  # no engine, or none for this tokenizer
                raise ApiError(400, str(error), param=field, code="unsupported_parameter") from error
            if len(self._grammars) > _MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(grammar)
        return self._grammars[grammar]
