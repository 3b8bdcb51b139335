import pytest
import torch

from anymamba import Mamba2, SsdPath
from anymamba.scan.scan import resolve_path
from tests.scan.cases import HAS_KERNELS


def test_the_default_is_the_fastest_with_an_open_chunk_length():
    assert SsdPath() == SsdPath("fastest", None)


def test_the_fastest_is_fused_where_there_is_a_kernel_and_serial_recalculated_elsewhere():
    cpu = "fused" if HAS_KERNELS else "serial_recalculated"
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert resolve_path(None, torch.device("cpu"), dtype) == SsdPath(cpu)
        assert resolve_path(SsdPath(chunk_len=7), torch.device("cpu"), dtype) == SsdPath(cpu, 7)
    assert resolve_path(None, torch.device("meta"), torch.float32) == SsdPath("serial_recalculated")
    assert resolve_path(SsdPath.serial(5), torch.device("cpu"), torch.float32) == SsdPath.serial(5)


def test_asking_for_fused_where_there_is_no_kernel_says_why():
    with pytest.raises(RuntimeError, match=r"no compiled kernel: there is none for device meta"):
        resolve_path(SsdPath.fused(), torch.device("meta"), torch.float32)


def test_the_kernels_fuse_ranks_into_their_chunk():
    assert SsdPath.fused().chunk_len_or_optimal(128, 64) == 64
    assert SsdPath.fused().chunk_len_or_optimal(128, 64, rank=4) == 16
    assert SsdPath.fused().chunk_len_or_optimal(128, 64, rank=100) == 1


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
    assert SsdPath.for_block(Mamba2(d_model=64, d_state=64, headdim=64)) == SsdPath(chunk_len=64)


def test_unknown_algorithms_lengths_and_pathways_are_refused(unchecked):
    with pytest.raises(ValueError, match=r"one of \('fastest', .*got 'fast'"):
        SsdPath("fast")
    with pytest.raises(ValueError, match=r"from 1 to .*, got 0"):
        SsdPath.serial(0)
    with pytest.raises(ValueError, match=r"pathway must be one of \('single', 'double'\), got 'triple'"):
        SsdPath(pathway="triple")
