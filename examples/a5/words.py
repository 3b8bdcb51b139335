"""Words in two generators of A5, the even permutations of five things, and the product after each token.

Letters: b words, t = 1 + n: a start token, then n generators.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from examples.labeled import Labeled

START, FIVE, THREE = range(3)  # tokens: the beginning, a cycle of five, a cycle of three
_CYCLES = {FIVE: (1, 2, 3, 4, 0), THREE: (1, 2, 0, 3, 4)}


def _is_even(p: tuple[int, ...]) -> bool:
    return sum(a > b for a, b in itertools.combinations(p, 2)) % 2 == 0


ELEMENTS = [p for p in itertools.permutations(range(5)) if _is_even(p)]  # the first is the identity
_NUMBER = {p: i for i, p in enumerate(ELEMENTS)}

# The product of element i and token k is element AFTER[i, k].
AFTER = np.array(
    [
        [i if token == START else _NUMBER[tuple(_CYCLES[token][x] for x in p)] for token in (START, FIVE, THREE)]
        for i, p in enumerate(ELEMENTS)
    ]
)


def draw(rng: np.random.Generator, rows: int, length: int) -> Labeled:
    """Draw words of `length` generators; labels are the product after each token, as the index of an element."""
    tokens = np.concatenate([np.full((rows, 1), START), rng.integers(FIVE, THREE + 1, (rows, length))], axis=1)
    products = np.zeros_like(tokens)
    for t in range(1, length + 1):
        products[:, t] = AFTER[products[:, t - 1], tokens[:, t]]
    return Labeled(torch.from_numpy(tokens), torch.from_numpy(products))
