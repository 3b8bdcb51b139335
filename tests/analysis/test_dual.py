import pytest
import torch

from anymamba import Mamba2, SsdPath
from anymamba.analysis import dual_matrix, flatten_ranks, initial_state_term, recurrence, unflatten_ranks, values
from anymamba.blocks.base import Block
from tests.blocks.families import ALGORITHMS, PATHWAYS, WITH_SCAN, make_block, random_cache
from tests.support import FLOOR, assert_near


def through_the_matrix(block, x, cache=None):
    """Compute the block's output with its scan replaced by the matrix."""
    terms = recurrence(block, x, cache)
    y = dual_matrix(block, x, cache) @ values(block, x, cache) + initial_state_term(block, x, cache)
    return terms.finish(unflatten_ranks(y, terms.v.shape[2]) + terms.skip)


@pytest.mark.parametrize("t", [1, 2, 13])
@pytest.mark.parametrize("options", WITH_SCAN)
def test_the_matrix_in_place_of_the_scan_gives_the_blocks_output_by_every_path(options, t):
    torch.manual_seed(0)
    block, x = make_block(options), torch.randn(2, t, 16, dtype=torch.float64)
    y = through_the_matrix(block, x)
    for algorithm in ["fastest", *ALGORITHMS[type(block)]]:
        for pathway in PATHWAYS[type(block)]:
            expected = block(x, path=SsdPath(algorithm, None, pathway))
            assert_near(y, expected, FLOOR[torch.float64], f"{algorithm} {pathway}")


@pytest.mark.parametrize("options", WITH_SCAN)
def test_a_sequence_continues_from_a_cache(options):
    torch.manual_seed(1)
    block, x = make_block(options), torch.randn(2, 7, 16, dtype=torch.float64)
    cache = random_cache(block, 2)
    assert_near(through_the_matrix(block, x, cache), block.prefill(x, cache)[0], FLOOR[torch.float64])


@pytest.mark.parametrize("options", ["mamba1", "mamba2 groups", "mamba3", "mamba3 mimo 2"])
def test_no_token_sees_a_later_one_and_heads_are_chosen(options):
    torch.manual_seed(2)
    block, x = make_block(options), torch.randn(1, 9, 16, dtype=torch.float64)
    whole, ranks = dual_matrix(block, x), recurrence(block, x).v.shape[2]
    later = torch.ones(9, 9).triu(1).repeat_interleave(ranks, 0).repeat_interleave(ranks, 1).bool()
    assert (whole[..., later] == 0).all()
    assert_near(dual_matrix(block, x, heads=[3, 0]), whole[:, [3, 0]], FLOOR[torch.float64])


@pytest.mark.parametrize("options", ["mamba1", "mamba2", "mamba3", "mamba3 mimo 3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_blocks_are_seen_in_float32(options, dtype):
    torch.manual_seed(3)
    block, x = make_block(options, dtype), torch.randn(1, 12, 16, dtype=dtype)
    assert dual_matrix(block, x).dtype == torch.float32
    # Rounding differs from stage to stage: a norm and two projections follow the scan.
    assert_near(through_the_matrix(block, x), block(x), 8 * FLOOR[dtype])


def test_a_hard_reset_leaves_the_weights_after_it_exact():
    torch.manual_seed(4)
    block = Mamba2(d_model=8, d_state=4, headdim=8, dtype=torch.float64)
    block.in_proj.weight.data[-block.nheads :, 0] = 1e6
    x = torch.randn(1, 20, 8, dtype=torch.float64)
    x[:, :, 0] = 0
    x[:, 10, 0] = 1
    assert_near(through_the_matrix(block, x), block(x), FLOOR[torch.float64])
    assert (dual_matrix(block, x)[..., 11:, :10] == 0).all()


def test_rows_are_pairs_of_a_token_and_a_rank():
    x = torch.randn(2, 5, 3, 4, 6)
    rows = flatten_ranks(x)
    assert torch.equal(rows[1, 2, 3 * 2 + 1], x[1, 2, 1, 2])
    assert torch.equal(unflatten_ranks(rows, 3), x)


def test_wrong_arguments_raise():
    block = Mamba2(d_model=16, d_state=8, headdim=8)
    with pytest.raises(ValueError, match=r"whose recurrence is known \(Mamba1, Mamba2, Mamba3\), got Block"):
        dual_matrix(Block(block.config), torch.randn(1, 2, 16))
    with pytest.raises(TypeError, match=r"expected a block .*, got Linear"):
        dual_matrix(torch.nn.Linear(16, 16), torch.randn(1, 2, 16))
    with pytest.raises(ValueError, match="x"):
        dual_matrix(block, torch.randn(1, 2, 15))
    with pytest.raises(ValueError, match="at least one step"):
        dual_matrix(block, torch.randn(1, 0, 16))
    with pytest.raises(ValueError, match="heads must be from 0 to 3, got 4"):
        dual_matrix(block, torch.randn(1, 2, 16), heads=[4])
