"""The tuner's choice among what it measured; building and measuring are its own work, not the suite's."""

import argparse

import pytest
from benchmarks.tune import Choice, Measured, best, medians, parse_tile, report, warning

NOW = Choice("8x2", 64)


def test_the_fastest_training_step_is_chosen_and_the_present_one_kept_within_the_noise():
    timings = {NOW: Measured(9.0, 40.0, 1.0), Choice("12x2", 64): Measured(8.0, 39.5, 1.0)}
    assert best(timings, NOW) == NOW
    timings[Choice("6x4", 96)] = Measured(9.5, 35.0, 1.0)
    assert best(timings, NOW) == Choice("6x4", 96)
    assert "kOwnTile[2] = {6, 4};" in report(timings, NOW, "avx512")
    assert "CHUNK_ROWS = 96" in report(timings, NOW, "avx512")


def test_medians_are_taken_and_libraries_that_disagree_are_rejected():
    samples = {NOW: [Measured(1, 4, 5.0), Measured(9, 9, 5.0), Measured(2, 5, 5.0)]}
    assert medians(samples)[NOW] == Measured(2, 5, 5.0)
    with pytest.raises(ValueError, match="the libraries disagree"):
        medians({**samples, Choice("4x2", 64): [Measured(1, 1, 5.1)]})


@pytest.mark.parametrize("text", ["8", "8x", "0x2", "8x2x2", "ax2"])
def test_a_tile_that_is_none_is_rejected(text):
    with pytest.raises(argparse.ArgumentTypeError, match="a tile is rows x vectors"):
        parse_tile(text)


def test_a_busy_machine_is_named_and_an_idle_one_is_not():
    assert warning([0.0, 0.05, None], "do not trust it") == ""
    assert warning([], "do not trust it") == ""
    assert warning([0.0, 1.25, None, 0.5], "do not trust it") == "other programs used 1.25 cores: do not trust it\n"
