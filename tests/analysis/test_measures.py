import math

import pytest
import torch

from anymamba import Mamba1, Mamba2, Mamba3
from anymamba.analysis import (
    dual_matrix,
    effective_rank,
    half_lives,
    horizons,
    initial_state_term,
    recurrence,
    rotation_angles,
    state_measures,
    step_sizes,
    unflatten_ranks,
    values,
)
from tests.blocks.families import FEW_WITH_SCAN, make_block, random_cache
from tests.support import FLOOR, assert_near

EXACT = FLOOR[torch.float64]


@pytest.fixture(params=FEW_WITH_SCAN)
def block(request):
    torch.manual_seed(0)
    return make_block(request.param)


@pytest.mark.parametrize("t", [1, 6])
def test_what_is_read_from_the_blocks_own_states_is_what_the_matrix_gives(block, t):
    x = torch.randn(2, t, 16, dtype=torch.float64)
    cache, ranks = random_cache(block, 2), recurrence(block, x).v.shape[2]
    y = unflatten_ranks(
        dual_matrix(block, x, cache) @ values(block, x, cache) + initial_state_term(block, x, cache), ranks
    )
    measures = state_measures(block, x, cache)
    assert_near(measures.read, y.movedim(3, 2).flatten(3).norm(dim=-1), EXACT)
    last = block.prefill(x, cache)[1].ssm
    assert_near(measures.norm[:, -1], last.reshape(2, measures.norm.shape[2], -1).norm(dim=-1), EXACT)
    assert measures.rank.shape == (2, t, 1 if isinstance(block, Mamba1) else measures.norm.shape[2])


def test_a_state_is_half_after_its_half_life():
    torch.manual_seed(1)
    block = Mamba2(d_model=16, d_state=8, headdim=8, dtype=torch.float64)
    block.conv1d.weight.data.zero_()  # tokens write nothing
    block.conv1d.bias.data.zero_()
    x = torch.randn(1, 1, 16, dtype=torch.float64)
    lives = half_lives(block, x)
    tokens = 4
    block.A_log.data += torch.log(lives[0, 0] / tokens)  # so that half is left after four tokens
    assert_near(half_lives(block, x), torch.full((1, 1, 4), 4.0, dtype=torch.float64), EXACT)
    start = random_cache(block, 1)
    after = block.prefill(x.expand(1, tokens, 16), start)[1]
    assert_near(after.ssm, start.ssm / 2, EXACT)


def test_horizons_average_decays_as_they_multiply(block):
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    kept = recurrence(block, x).log_decay.sum(1).exp()
    assert_near(0.5 ** (5 / horizons(block, x)), kept, EXACT)


def test_step_sizes_are_those_of_the_formula():
    torch.manual_seed(2)
    block = Mamba3(d_model=16, d_state=8, headdim=8, dtype=torch.float64)
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    widths = {part.name: part.rows for part in block.projection_parts()["in_proj"]}
    raw = block.in_proj(x).split(list(widths.values()), -1)[list(widths).index("dt")]
    assert_near(step_sizes(block, x), torch.nn.functional.softplus(raw + block.dt_bias), EXACT)


@pytest.mark.parametrize("rotation", ["complex", "quaternion", "fixed"])
def test_rotations_add_up_to_the_rotation_of_the_cache(rotation):
    torch.manual_seed(3)
    block = Mamba3(d_model=16, d_state=8, headdim=8, rope_fraction=1, rotation=rotation, dtype=torch.float64)
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    if rotation == "quaternion":  # rotations about different axes do not add up, but the first is the rotation
        rotation_state, angle = block.prefill(x[:, :1])[1].rotation, rotation_angles(block, x)[:, 0]
        assert_near(rotation_state[..., 0], (angle / 2).cos(), EXACT)
        return
    rotation_state = block.prefill(x)[1].rotation
    angle = rotation_angles(block, x).sum(1)
    assert_near(torch.polar(torch.ones_like(rotation_state), rotation_state).real, angle.cos(), EXACT)
    assert_near(rotation_state.sin(), angle.sin(), EXACT)


def test_only_states_of_mamba3_rotate():
    with pytest.raises(ValueError, match="expected a block with rotated states, got a Mamba2"):
        rotation_angles(Mamba2(d_model=16, headdim=8), torch.randn(1, 2, 16))


def test_the_effective_rank_counts_equal_directions():
    matrix = torch.diag(torch.tensor([3.0, 3.0, 3.0, 0.0, 0.0], dtype=torch.float64))
    assert_near(effective_rank(matrix), torch.tensor(3.0, dtype=torch.float64), EXACT)
    turned, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
    assert_near(effective_rank(1e-200 * matrix @ turned), torch.tensor(3.0, dtype=torch.float64), EXACT)
    assert effective_rank(torch.zeros(4, 6)) == 0
    values = torch.linalg.svdvals(wide := torch.randn(7, 3, 4, dtype=torch.float64))
    assert_near(effective_rank(wide), values.square().sum(-1).square() / values.pow(4).sum(-1), EXACT)


def test_a_decay_of_nothing_is_an_infinite_half_life():
    block = Mamba2(d_model=16, d_state=8, headdim=8, dt_limit=(0.0, 0.0))
    assert (half_lives(block, torch.randn(1, 2, 16)) == math.inf).all()
