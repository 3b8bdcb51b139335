"""Baselines on the held-out text, to compare a model's bits per byte with.

`xz -9` can copy from the held-out text itself, and knows nothing else. A byte n-gram has read some of the training text
and predicts from the preceding bytes:

    p_0 = 1/256        p_k+1(byte | k bytes before) = (count(before, byte) + β p_k(byte)) / (count(before) + β)
"""

from __future__ import annotations

import lzma

import numpy as np
import numpy.typing as npt

ORDER = 5  # bytes of an n-gram, the predicted one included
TRAINING_BYTES = 2**22  # the most training text that an n-gram reads
_BETA = 4.0

_Keys = npt.NDArray[np.uint64]


def xz_bytes(text: bytes) -> int:
    """Return the size of a text compressed with `xz -9`."""
    return len(lzma.compress(text, preset=9))


def ngram_bits(training: bytes, text: bytes) -> float:
    """Return the bits that a byte n-gram model of one text needs for another."""
    grams = np.sort(_keys(training, ORDER))
    p = np.full(len(text), 1 / 256)
    before = np.full(len(text), float(len(grams)))
    for n in range(1, min(ORDER, len(text)) + 1):
        keys = _keys(text, n)
        shift = np.uint64(8 * (ORDER - n))
        # An n-gram is a range of the sorted keys: all that begin with it.
        first = np.searchsorted(grams, keys << shift)
        last = np.searchsorted(grams, (keys + np.uint64(1)) << shift)
        counts = (last - first).astype(np.float64)
        p[n - 1 :] = (counts + _BETA * p[n - 1 :]) / (before[n - 1 :] + _BETA)
        before[n:] = counts[:-1]  # the n-gram before a byte ends there
    return float(-np.log2(p).sum())


def _keys(text: bytes, n: int) -> _Keys:
    """Return every n consecutive bytes of a text as a number, the first byte in the highest position."""
    letters = np.frombuffer(text, np.uint8).astype(np.uint64)
    keys = np.zeros(max(0, len(letters) - n + 1), np.uint64)
    for i in range(n):
        keys = (keys << np.uint64(8)) | letters[i : i + len(keys)]
    return keys
