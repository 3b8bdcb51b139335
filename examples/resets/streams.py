"""The streams of the reset tasks: three symbols, two that act and one, R, that resets.

| task | symbols | the label after each symbol, of what came since the last R |
|---|---|---|
| majority | - + R | the sign of the vote; ties have none and are not scored |
| rotor | - + R | the rotations forward minus the rotations back, mod 3 |
| spinor | i j R | the product in the quaternion group, newest factor on the left |

Each task has three families of streams. In `random` every eighth symbol is an R. The other two each defeat a
shortcut, and have one R only:

- majority `long-prefix`: a long run of one vote, R, then a majority of one for the other side. A decay near 1 lets the
  run through.
- majority `long-suffix`: R early, then a block of votes and a later, smaller block for the other side. A decay below 1
  lets the recent votes win.
- rotor `drift`: seven of eight rotations go the same way, so the count leaves every interval that a real state could
  hold.
- rotor `balanced`, spinor `shuffle`: a shuffled bag of equally many of both. Neither the position nor the counts
  tell anything.
- spinor `runs`: blocks of three to eight of the same symbol.

Letters: b rows, t time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from examples.labeled import IGNORED

FIRST, SECOND, RESET = 0, 1, 2
LENGTH = 32  # of the training streams
SHORTEST = 8  # length at which every family exists

Symbols = Int[np.ndarray, "b t"]
Labels = Int[np.ndarray, "b t"]
Generator = np.random.Generator


def random_votes(rng: Generator, rows: int, length: int) -> Symbols:
    """Draw R with probability 1/8, else one of the other two."""
    return np.where(rng.random((rows, length)) < 1 / 8, RESET, rng.integers(2, size=(rows, length)))


def random_rotations(rng: Generator, rows: int, length: int) -> Symbols:
    """Draw R, and random votes after it."""
    return _after_reset(random_votes(rng, rows, length - 1))


def long_prefix(rng: Generator, rows: int, length: int) -> Symbols:
    """Draw a run of one vote, R, and j = 5, 7, ... votes: first (j + 1) / 2 for the other side, then the rest."""
    run = rng.integers(2, size=(rows, 1))
    votes = 5 + 2 * rng.integers(length // 4, size=(rows, 1))
    after = np.arange(length) - (length - 1 - votes)  # positions after the R
    symbols = np.where((after > 0) & (after <= (votes + 1) // 2), 1 - run, run)
    return np.where(after == 0, RESET, symbols)


def long_suffix(rng: Generator, rows: int, length: int) -> Symbols:
    """Draw one to three votes, R, and two blocks of votes: the earlier is larger, by one or two."""
    before = rng.integers(1, 4, size=(rows, 1))
    early = rng.integers(2, size=(rows, 1))
    late_votes = (length - before - 2) // 2
    position = np.arange(length)
    symbols = np.where(position < length - late_votes, early, 1 - early)
    symbols = np.where(position < before, rng.integers(2, size=(rows, length)), symbols)
    return np.where(position == before, RESET, symbols)


def drift(rng: Generator, rows: int, length: int) -> Symbols:
    """Draw R, and a walk of which seven steps of eight go the same way."""
    direction = rng.integers(2, size=(rows, 1))
    return _after_reset(np.where(rng.random((rows, length - 1)) < 1 / 8, 1 - direction, direction))


def shuffle(rng: Generator, rows: int, length: int) -> Symbols:
    """Draw R, and equally many of both symbols (one more of the first if the number is odd) in random order."""
    bag = np.where(2 * np.arange(length - 1) < length - 1, FIRST, SECOND)
    return _after_reset(rng.permuted(np.tile(bag, (rows, 1)), axis=1))


def runs(rng: Generator, rows: int, length: int) -> Symbols:
    """Draw R, and blocks of three to eight of the same symbol."""
    ends = rng.integers(3, 9, size=(rows, 1, length // 3 + 1)).cumsum(axis=2)
    block = (ends <= np.arange(length - 1)[:, None]).sum(axis=2)
    return _after_reset((block + rng.integers(2, size=(rows, 1))) % 2)


def _after_reset(symbols: Symbols) -> Symbols:
    return np.concatenate([np.full_like(symbols[:, :1], RESET), symbols], axis=1)


def _counts(symbols: Symbols) -> Int[np.ndarray, "b t"]:
    """Return the count of the second symbol minus that of the first since the last R."""
    total = np.cumsum(np.where(symbols == RESET, 0, 2 * symbols - 1), axis=1)
    position = np.where(symbols == RESET, np.arange(symbols.shape[1]), -1)
    last = np.maximum.accumulate(position, axis=1)
    at_reset = np.take_along_axis(total, np.maximum(last, 0), axis=1)
    return total - np.where(last >= 0, at_reset, 0)


def vote_signs(symbols: Symbols) -> Labels:
    """Return 0 for a negative vote, 1 for a positive one, `IGNORED` for a tie."""
    counts = _counts(symbols)
    return np.where(counts == 0, IGNORED, counts > 0)


def rotations_mod_3(symbols: Symbols) -> Labels:
    """Return the net rotation in thirds of a circle: 0, 1 or 2."""
    return _counts(symbols) % 3


# Elements 1, i, j, k, -1, -i, -j, -k; [g] is what i g and j g are.
_TIMES = np.array([[1, 4, 3, 6, 5, 0, 7, 2], [2, 7, 4, 1, 6, 3, 0, 5]])


def quaternion_products(symbols: Symbols) -> Labels:
    """Return the product in the quaternion group: 0 to 7 for 1, i, j, k, -1, -i, -j, -k."""
    state, labels = np.zeros(len(symbols), dtype=np.int64), np.empty_like(symbols)
    for t, symbol in enumerate(symbols.T):
        state = np.where(symbol == RESET, 0, _TIMES[np.minimum(symbol, SECOND), state])
        labels[:, t] = state
    return labels


@dataclass(frozen=True)
class Stream:
    """A task: its alphabets, its families of streams, and the labels of any stream."""

    symbols: tuple[str, ...]
    classes: tuple[str, ...]
    families: dict[str, Callable[[Generator, int, int], Symbols]]
    labels: Callable[[Symbols], Labels]

    def draw(self, family: str, rng: Generator, rows: int, length: int) -> tuple[Symbols, Labels]:
        """Draw streams of a family, and return them with their labels.

        Raises:
            ValueError: There is no such family, or the length is too short for it.
        """
        if family not in self.families:
            raise ValueError(f"family must be one of {', '.join(self.families)}, got {family!r}")
        if length < SHORTEST:
            raise ValueError(f"length must be at least {SHORTEST}, got {length}")
        symbols = self.families[family](rng, rows, length)
        return symbols, self.labels(symbols)

    def mixture(self, rng: Generator, rows: int, length: int) -> tuple[Symbols, Labels]:
        """Draw streams to train on: half of them `random`, a quarter of each other family."""
        first, *others = (self.draw(family, rng, rows, length)[0] for family in self.families)
        choice = rng.integers(4, size=(rows, 1))
        symbols = np.select([choice == 0, choice == 1], others, first)
        return symbols, self.labels(symbols)


STREAMS = {
    "majority": Stream(
        ("-", "+", "R"),
        ("negative", "positive"),
        {"random": random_votes, "long-prefix": long_prefix, "long-suffix": long_suffix},
        vote_signs,
    ),
    "rotor": Stream(
        ("-", "+", "R"),
        ("0", "1", "2"),
        {"random": random_rotations, "drift": drift, "balanced": shuffle},
        rotations_mod_3,
    ),
    "spinor": Stream(
        ("i", "j", "R"),
        ("1", "i", "j", "k", "-1", "-i", "-j", "-k"),
        {"random": random_rotations, "shuffle": shuffle, "runs": runs},
        quaternion_products,
    ),
}
