import lzma
import math

import pytest

from anymamba.training.data.baselines import _BETA, ORDER, ngram_bits, xz_bytes


def probability(training, before, byte):
    """Compute the probability by counting, one context after another."""
    p = 1 / 256
    grams = [training[i : i + ORDER] for i in range(len(training) - ORDER + 1)]
    for k in range(min(ORDER, len(before) + 1)):
        context = before[len(before) - k :]
        seen = sum(gram.startswith(context) for gram in grams)
        both = sum(gram.startswith(context + bytes([byte])) for gram in grams)
        p = (both + _BETA * p) / (seen + _BETA)
    return p


@pytest.mark.parametrize(
    ("training", "text"),
    [
        (b"to and fro and to and fro", b"and to"),
        (b"to and fro", b"x"),
        (b"", b"abc"),
        (b"ab", b"ab"),
        (bytes(range(256)), b"\xff\xff\x00\x01\x02\x03"),
        (b"\xff" * 20, b"\xff" * 9),
    ],
)
def test_bits_are_those_of_counting(training, text):
    expected = sum(-math.log2(probability(training, text[:i], byte)) for i, byte in enumerate(text))
    assert ngram_bits(training, text) == pytest.approx(expected, rel=1e-12)


def test_the_probabilities_of_all_bytes_are_one():
    training = b"to and fro and to and fro" * 3
    for before in (b"", b"a", b"fro and", b"zzz"):
        assert sum(probability(training, before, byte) for byte in range(256)) == pytest.approx(1, rel=1e-12)
        bits = [ngram_bits(training, before + bytes([b])) - ngram_bits(training, before) for b in range(256)]
        assert sum(2**-x for x in bits) == pytest.approx(1, rel=1e-9)


def test_what_has_been_read_costs_less():
    text = b"the quick brown fox " * 20
    assert ngram_bits(text, text) < 0.5 * ngram_bits(b"something else entirely " * 20, text) < 8 * len(text)


def test_the_size_of_xz():
    assert xz_bytes(b"text " * 100) == len(lzma.compress(b"text " * 100, preset=9))
