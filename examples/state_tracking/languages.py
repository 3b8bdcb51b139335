"""Three languages, drawn at any length: a sequence has an answer, which is known when it ends.

- *parity*: bits; whether the number of ones is odd.
- *arithmetic*: numbers modulo 5 and `+ - *` between them, then `=`; the value, `*` before `+` and `-`.
- *brackets*: nested sums and differences, every one in brackets, negated numbers, then `=`; the value modulo 5.

An expression in brackets of n tokens is drawn as by Delétang et al. (2023): below five tokens it is a number x, as
`x`, `-x`, `(x)` or `(-x)`; from five on it is `(left + right)` or `(left - right)`, with every split equally likely.
A prefix that ends after a number or `)` has a value too: that of the expression with its open brackets closed there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

MODULUS = 5
NONE = -100  # a position without an answer
SYMBOLS = "01234+-*=()"
_PLUS, _MINUS, _TIMES, _EQUALS, _OPEN, _CLOSE = range(MODULUS, len(SYMBOLS))


class Sequences(NamedTuple):
    """Sequences, concatenated.

    Attributes:
        tokens: Tokens of all sequences, (t,).
        lengths: Length of each sequence, (s,).
        answers: Answer of the prefix that ends with each token, (t,); `NONE` where it has none.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    answers: np.ndarray

    @property
    def final(self) -> np.ndarray:
        """Return the answer of each sequence, (s,)."""
        return self.answers[self.lengths.cumsum() - 1]

    def texts(self) -> list[str]:
        """Return each sequence as text."""
        parts = np.split(self.tokens, self.lengths.cumsum()[:-1])
        return ["".join(SYMBOLS[token] for token in part) for part in parts]


class Language(NamedTuple):
    """A language of sequences with answers.

    Attributes:
        name: Name of the task.
        vocab_size: Number of tokens.
        classes: Number of answers.
        possible: Function that returns whether there are sequences of a length.
        draw: Function that draws a sequence of each length, (s,).
        answered: Suffix of the fingerprint of runs, which changes when the answers do.
    """

    name: str
    vocab_size: int
    classes: int
    possible: Callable[[int], bool]
    draw: Callable[[np.random.Generator, np.ndarray], Sequences]
    answered: str = ""

    def lengths(self, low: int, high: int) -> np.ndarray:
        """Return every length from `low` to `high` that has sequences.

        Raises:
            ValueError: There is none.
        """
        lengths = [length for length in range(low, high + 1) if self.possible(length)]
        if not lengths:
            raise ValueError(f"{self.name} has no sequences of {low} to {high} tokens")
        return np.array(lengths)

    def sample(self, chance: np.random.Generator, count: int, low: int, high: int) -> Sequences:
        """Draw sequences, each of a length drawn evenly from the possible ones."""
        return self.draw(chance, chance.choice(self.lengths(low, high), count))


def _draw_parity(chance: np.random.Generator, lengths: np.ndarray) -> Sequences:
    tokens = chance.integers(2, size=int(lengths.sum()))
    ones, begins = tokens.cumsum(), lengths.cumsum() - lengths
    before = np.repeat(ones[begins] - tokens[begins], lengths)
    return Sequences(tokens, lengths, (ones - before) % 2)


def _draw_arithmetic(chance: np.random.Generator, lengths: np.ndarray) -> Sequences:
    numbers = chance.integers(MODULUS, size=(len(lengths), int(lengths.max()) // 2))
    operators = chance.integers(_PLUS, _TIMES + 1, size=numbers.shape)
    last = lengths // 2 - 1
    operators[np.arange(len(lengths)), last] = _EQUALS
    total, term, sign = np.zeros_like(lengths), numbers[:, 0], np.ones_like(lengths)
    values = np.full((len(lengths), 2 * numbers.shape[1]), NONE)
    values[:, 0] = term
    for i in range(1, numbers.shape[1]):
        times = operators[:, i - 1] == _TIMES
        total = np.where(times, total, total + sign * term) % MODULUS
        sign = np.where(times, sign, np.where(operators[:, i - 1] == _MINUS, -1, 1))
        term = np.where(times, term * numbers[:, i], numbers[:, i]) % MODULUS
        values[:, 2 * i] = (total + sign * term) % MODULUS
    values[np.arange(len(lengths)), lengths - 1] = values[np.arange(len(lengths)), lengths - 2]
    pairs, read = np.stack([numbers, operators], axis=2).reshape(values.shape), np.arange(values.shape[1])
    inside = read < lengths[:, None]
    return Sequences(pairs[inside], lengths, values[inside])


def _draw_brackets(chance: np.random.Generator, lengths: np.ndarray) -> Sequences:
    rng = random.Random(int(chance.integers(2**62)))  # for one number at a time
    tokens: list[int] = []
    answers: list[int] = []
    for length in lengths.tolist():
        _append_expression(rng, length - 1, tokens, answers)
        tokens.append(_EQUALS)
        answers.append(answers[-1])
    return Sequences(np.array(tokens), lengths, np.array(answers))


def _append_expression(chance: random.Random, length: int, tokens: list[int], answers: list[int]) -> None:
    """Append an expression to `tokens`, and the values of its prefixes, with brackets closed, to `answers`."""
    value, sign = 0, 1  # of what has been read, and of what comes next
    pending: list[int | tuple[int, int]] = [length]  # lengths of expressions; tokens with the sign of what follows
    while pending:
        item = pending.pop()
        if isinstance(item, tuple):
            token, sign = item
            tokens.append(token)
            answers.append(value if token == _CLOSE else NONE)
        elif item < 5:
            number, negative = int(chance.random() * MODULUS), item % 2 == 0
            before = [_OPEN] * (item > 2) + [_MINUS] * negative
            after = [_CLOSE] * (item > 2)
            value = (value + (-sign * number if negative else sign * number)) % MODULUS
            tokens += [*before, number, *after]
            answers += [NONE] * len(before) + [value] * (1 + len(after))
        else:
            left = 1 + int(chance.random() * (item - 4))
            operator = (_PLUS, sign) if chance.random() < 0.5 else (_MINUS, -sign)
            tokens.append(_OPEN)
            answers.append(NONE)
            pending += [(_CLOSE, sign), item - 3 - left, operator, left]


LANGUAGES = {
    language.name: language
    for language in (
        Language("parity", 2, 2, lambda length: length >= 1, _draw_parity),
        Language("arithmetic", _EQUALS + 1, MODULUS, lambda length: length >= 2 and length % 2 == 0, _draw_arithmetic),
        Language("brackets", _CLOSE + 1, MODULUS, lambda length: length >= 2, _draw_brackets, ", with beginnings"),
    )
}
