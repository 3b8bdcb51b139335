import pytest
import torch

from anymamba import Mamba2, Mamba3, SsdPath
from anymamba.core.registry import kernels_off
from anymamba.scan import scan
from anymamba.scan.scan import scan_operator
from tests.scan.cases import HAS_KERNELS, make_inputs


def test_the_default_is_the_fastest_with_an_open_chunk_length():
    assert SsdPath() == SsdPath("fastest", None)


def test_the_fastest_is_fused_where_there_is_a_kernel_and_serial_recalculated_elsewhere():
    def chosen(t, algorithm="fastest", device="cpu", dtype=torch.float32):
        inputs = [x.to(device) for x in make_inputs(t=t, dtype=dtype).values()]
        return scan_operator.choose((*inputs, None, None, algorithm))

    portable = scan_operator.portable
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert (chosen(5, dtype=dtype) in portable.values()) is not HAS_KERNELS
    with kernels_off():
        assert chosen(5) is portable["serial_recalculated"]
        assert chosen(1) is portable["recurrent"]
    assert chosen(5, device="meta") is portable["serial_recalculated"]
    assert chosen(5, "serial") is portable["serial"]


def test_asking_for_fused_where_there_is_no_kernel_says_why():
    inputs = {name: x.to("meta") for name, x in make_inputs(dtype=torch.float32).items()}
    with pytest.raises(RuntimeError, match=r"no compiled kernel: there is none for device meta"):
        scan(**inputs, path=SsdPath.fused())


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


def test_for_block_writes_the_chunk_length_out_where_no_kernel_chooses_it():
    block = Mamba2(d_model=64, d_state=128, headdim=64)
    assert SsdPath.for_block(block) == SsdPath()
    for algorithm in ("minimal", "serial", "serial_recalculated"):
        assert SsdPath.for_block(block, algorithm) == SsdPath(algorithm, 96)
    assert SsdPath.for_block(Mamba3(d_model=64, is_mimo=True), "serial") == SsdPath.serial(24)


def test_unknown_algorithms_lengths_and_pathways_are_rejected(unchecked):
    with pytest.raises(ValueError, match=r"one of \('fastest', .*got 'fast'"):
        SsdPath("fast")
    with pytest.raises(ValueError, match=r"pathway must be one of \('single', 'double'\), got 'triple'"):
        SsdPath(pathway="triple")
    with pytest.raises(ValueError, match=r"from 1 to .*, got 0"):
        SsdPath.serial(0)
    for length in (4.0, True, "4"):
        with pytest.raises(TypeError, match=f"chunk_len must be None or an integer, got {length!r}"):
            SsdPath.serial(length)


def test_every_constructor_takes_a_pathway():
    block = Mamba3(d_model=64)
    assert SsdPath.recurrent(pathway="double") == SsdPath("recurrent", None, "double")
    for name in ("minimal", "serial", "serial_recalculated", "fused"):
        assert getattr(SsdPath, name)(64, pathway="double") == SsdPath(name, 64, "double")
        assert getattr(SsdPath, name)(pathway="single") == SsdPath(name)
    for name in ("fastest", "minimal"):
        assert SsdPath.for_block(block, name, pathway="double").pathway == "double"
        assert SsdPath.for_block(block, name).pathway == "single"
