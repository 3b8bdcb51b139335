import pytest

from anymamba import Mamba2, SsdPath


def test_the_default_is_serial_recalculated_with_an_open_chunk_length():
    assert SsdPath() == SsdPath.serial_recalculated() == SsdPath("serial_recalculated", None)


@pytest.mark.parametrize(
    ("d_state", "headdim", "expected"),
    [(128, 64, 96), (64, 64, 64), (1, 1, 32), (16, 64, 32), (256, 256, 256), (1024, 1024, 512)],
)
def test_the_optimal_chunk_is_about_the_root_of_state_times_head(d_state, headdim, expected):
    assert SsdPath.optimal_chunk_len(d_state, headdim) == expected


def test_ranks_share_the_fused_chunk():
    assert SsdPath.optimal_chunk_len(128, 64, rank=4) == 24
    assert SsdPath.optimal_chunk_len(1, 1, rank=100) == 1


def test_a_given_chunk_length_wins_over_the_optimal_one():
    assert SsdPath.minimal(48).chunk_len_or_optimal(128, 64) == 48
    assert SsdPath.minimal().chunk_len_or_optimal(128, 64) == 96


def test_for_block_writes_the_chunk_length_out():
    assert SsdPath.for_block(Mamba2(d_model=64, d_state=64, headdim=64)) == SsdPath.serial_recalculated(64)


def test_unknown_algorithms_and_lengths_are_refused(unchecked):
    with pytest.raises(ValueError, match=r"one of \('recurrent', .*got 'fast'"):
        SsdPath("fast")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        SsdPath.serial(0)
