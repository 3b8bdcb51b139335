"""Words of A5: the group, and a short run of the command."""

import itertools

import numpy as np
import pytest

from examples.a5.__main__ import main
from examples.a5.task import A5Config, A5Section, A5Task
from examples.a5.words import AFTER, ELEMENTS, FIVE, THREE, draw


def test_the_generators_make_the_whole_group_and_nothing_else():
    assert len(ELEMENTS) == 60
    assert ELEMENTS[0] == (0, 1, 2, 3, 4)
    reached, new = {0}, {0}
    while new:
        new = {int(AFTER[i, token]) for i in new for token in (FIVE, THREE)} - reached
        reached |= new
    assert reached == set(range(60))
    for token, order in ((FIVE, 5), (THREE, 3)):
        element = 0
        for k in range(1, order + 1):
            element = AFTER[element, token]
            assert (element == 0) == (k == order)


def test_products_are_those_of_permutations():
    words = draw(np.random.default_rng(0), 20, 12)
    cycles = {FIVE: (1, 2, 3, 4, 0), THREE: (1, 2, 0, 3, 4)}
    for tokens, products in zip(words.inputs.tolist(), words.labels.tolist(), strict=True):
        element = tuple(range(5))
        assert products[0] == 0
        for token, product in zip(tokens[1:], products[1:], strict=True):
            element = tuple(cycles[token][x] for x in element)
            assert ELEMENTS[product] == element


def test_the_command_writes_a_table_and_a_picture(tmp_path, capsys):
    assert main(["--seed", "0", "--steps", "2", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "a5.md").read_text() == out.removesuffix("\n")
    assert (tmp_path / "a5.png").read_bytes().startswith(b"\x89PNG")
    rows = [line.split("|") for line in out.splitlines()[2:4]]
    assert [row[1].strip() for row in rows] == ["quaternion", "complex"]
    assert all(0 <= float(row[4]) <= 100 for row in rows)


def test_batches_repeat_from_the_seed():
    def batch(seed, step):
        return A5Task(A5Config(seed=seed, a5=A5Section(rows=4))).batches(step)[0].inputs.tolist()

    assert batch(0, 1) == batch(0, 1)
    assert all(batch(*a) != batch(*b) for a, b in itertools.combinations([(0, 1), (0, 2), (1, 1)], 2))


def test_bad_input_is_rejected(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--steps", "0", "--out", str(tmp_path)])
    assert "steps must be at least 1, got 0" in capsys.readouterr().err
