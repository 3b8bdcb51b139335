import math

import pytest
import torch

from anymamba import Mamba3, Mamba3Config, SsdPath, rotated_trapezoid_scan, ssd
from anymamba.blocks.layers import RMSNorm
from anymamba.ops.discretization import bounded_vector, heavy_tail
from anymamba.ops.rotation import (
    conjugate,
    cumulative_products,
    cumulative_rotation,
    multiply,
    quaternion_from_vector,
    rotate,
)
from tests.blocks.families import SMALL, make_block, tensors_of, unroll
from tests.scan.cases import ALGORITHMS
from tests.support import FLOOR, assert_near

D = torch.float64


def capture(block, x):
    """Return what the block passes to its recurrence: x, normed B and C, dt, log-decay, gamma, kappa, angular rates."""
    _, xs, k, q, *raw = block._split(block.in_proj(x))
    return xs, block.B_norm(k), block.C_norm(q), *block._discretize(raw, None)


def recur(block, x, **changed):
    """Run the block's recurrence on what `capture` returns, with some of it replaced."""
    xs, k, q, dt, log_decay, gamma, kappa, rate = capture(block, x)
    tokens = {"dt": dt, "log_decay": log_decay, "gamma": gamma, "kappa": kappa} | changed
    cache, config = block.init_cache(x.shape[0]), block.config
    y, state, _, _ = rotated_trapezoid_scan(
        xs,
        k,
        q,
        block.B_bias,
        block.C_bias,
        rate,
        **tokens,
        D=block.D,
        value_weight=block.mimo_x if config.is_mimo else None,
        initial_state=cache.ssm,
        previous_k=cache.k,
        previous_x=cache.v,
        initial_rotation=cache.rotation,
        rotation_kind=config.rotation_kind,
    )
    return y, state


def values_of(block, xs):
    """Map (b, t, h, p) to (b, t, r, h, p)."""
    return xs.unsqueeze(2) * (block.mimo_x.transpose(0, 1) if block.config.is_mimo else 1)


def test_without_trapezoid_and_rotation_the_recurrence_is_mamba2s(monkeypatch):
    """Own weights only, range 0, no bias, no norm: Mamba-2's SSD on the same dt, A, B, C, D."""
    block = Mamba3(**SMALL, ngroups=2, rotation_range=0, dtype=D)
    for bias in (block.B_bias, block.C_bias):
        bias.data.zero_()
    monkeypatch.setattr(RMSNorm, "forward", lambda norm, x: x)
    x = torch.randn(2, 13, 16, dtype=D)
    xs, k, q, dt, log_decay, *_ = capture(block, x)
    only_own = {"gamma": dt, "kappa": torch.zeros_like(dt)}
    y, state = recur(block, x, **only_own)
    expected = []
    h = torch.zeros(2, 4, 8, 8, dtype=D)
    k, q = (m[:, :, 0].repeat_interleave(2, dim=2) for m in (k, q))
    for t in range(13):
        h = torch.exp(log_decay[:, t])[..., None, None] * h
        h = h + dt[:, t, :, None, None] * xs[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)
        expected.append((h * q[:, t].unsqueeze(-2)).sum(-1) + block.D.unsqueeze(-1) * xs[:, t])
    assert_near(y.squeeze(2), torch.stack(expected, 1), FLOOR[D])
    assert_near(state, h, FLOOR[D])
    constant = torch.full_like(dt, -0.7)
    y_ssd, _ = ssd(xs, dt, constant[0, 0], k, q, block.D)
    y_same, _ = recur(block, x, log_decay=dt * constant, **only_own)
    assert_near(y_same.squeeze(2), y_ssd, FLOOR[D])


@pytest.mark.parametrize("options", ["mamba3 groups", "mamba3 mimo 2", "mamba3 mimo 4"])
def test_rotating_the_state_equals_rotating_keys_and_queries(options):
    """Rotate the state itself back by each token's angle, with keys and queries left alone."""
    block = make_block(options)
    x = torch.randn(2, 9, 16, dtype=D)
    xs, k, q, dt, log_decay, gammas, kappas, rate = capture(block, x)
    heads = block.config.nheads // block.config.ngroups
    k, q = (
        m.repeat_interleave(heads, dim=3) + bias.transpose(0, 1) for m, bias in ((k, block.B_bias), (q, block.C_bias))
    )
    pairs, half = block.config.num_rotations, block.config.d_state // 2
    interleaved = not block.config.is_mimo
    firsts = torch.arange(0, 2 * pairs, 2) if interleaved else torch.arange(pairs)
    seconds = firsts + (1 if interleaved else half)
    v = values_of(block, xs)
    state, before, expected = torch.zeros(2, 4, 8, 8, dtype=D), torch.zeros(2, 4, 8, 8, dtype=D), []
    for t in range(9):
        angle = dt[:, t, :, None] * rate[:, t][:, None]
        cos, sin = angle.cos().unsqueeze(2), angle.sin().unsqueeze(2)

        def rotate_back(s, cos=cos, sin=sin):
            out = s.clone()
            out[..., firsts] = s[..., firsts] * cos + s[..., seconds] * sin
            out[..., seconds] = s[..., seconds] * cos - s[..., firsts] * sin
            return out

        alpha, gamma, kappa = (m[:, t, :, None, None] for m in (torch.exp(log_decay), gammas, kappas))
        now = torch.einsum("brhp,brhn->bhpn", v[:, t], k[:, t])
        state = alpha * rotate_back(state + kappa * before) + gamma * now
        before = now
        expected.append(torch.einsum("bhpn,brhn->brhp", state, q[:, t]) + block.D.unsqueeze(-1) * v[:, t])
    assert_near(recur(block, x)[0], torch.stack(expected, 1), FLOOR[D])


def test_a_quaternion_about_one_axis_is_the_complex_rotation():
    """Left multiplication about the first axis rotates (w, x) and (y, z) alike: two pairs at half the angle each."""
    block = make_block("mamba3 quaternion")
    _, k, q, dt, *_ = capture(block, torch.randn(2, 7, 16, dtype=D))
    rate = torch.randn(2, 7, 4, 1, 1, dtype=D)
    vectors = torch.cat([rate, torch.zeros(2, 7, 4, 1, 2, dtype=D)], -1).flatten(2)
    rotation = cumulative_rotation("quaternion", vectors, dt, block.init_cache(2).rotation, None)
    # Conjugated, because a block is multiplied by the conjugate of the running product.
    angle = -(dt * rate[..., 0, 0] / 2).cumsum(1)
    plane = torch.polar(torch.ones_like(angle), angle)[:, :, None, :, None]
    for raw_keys, bias in ((k, block.B_bias), (q, block.C_bias)):
        expanded = raw_keys.repeat_interleave(2, dim=3) + bias.transpose(0, 1)
        pairs = torch.view_as_complex(expanded[..., :4].unflatten(-1, (2, 2)).contiguous())
        expected = torch.cat([torch.view_as_real(pairs * plane).flatten(-2), expanded[..., 4:]], -1)
        assert_near(rotate("quaternion", raw_keys, bias, rotation), expected, FLOOR[D])


def test_a_fixed_rotation_is_by_the_distance_alone():
    """<q_t, k_s> sees cos((t - s) rate), with rates from 1 down to a ten-thousandth, whatever the tokens are."""
    block = Mamba3(d_model=16, d_state=8, headdim=8, rope_fraction=1, rotation="fixed", dtype=D)
    rate = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=D)
    for length in (1, 3, 7):
        _, cache = block.prefill(torch.randn(2, length, 16, dtype=D))
        assert_near(cache.rotation, (length * rate).expand(2, 4, 4) % (2 * math.pi), FLOOR[D])


@pytest.mark.parametrize(
    "options",
    [
        "mamba3",
        "mamba3 no rotation",
        "mamba3 fixed rotation",
        "mamba3 quaternion",
        "mamba3 mimo 3",
        "mamba3 mimo quaternion",
    ],
)
def test_the_stationary_output_is_the_limit_of_a_long_unroll(options):
    block = make_block(options)
    x = torch.randn(3, 16, dtype=D)
    y, cache = block.prefill(x.unsqueeze(1).expand(-1, 10_000, -1))
    assert_near(block.step_infinite(x), y[:, -1], 1e-9)


def test_the_stationary_output_is_differentiable():
    for options in ("mamba3", "mamba3 quaternion"):
        block = make_block(options)
        x = torch.randn(2, 16, dtype=D, requires_grad=True)
        assert torch.autograd.gradcheck(block.step_infinite, (x,))


def test_rank_one_mimo_is_siso_up_to_the_pairing():
    """Half-split pairs of rank-1 MIMO are interleaved pairs of SISO after a permutation of the state's channels."""
    siso, mimo = make_block("mamba3 full rotation"), None
    mimo = Mamba3(**SMALL, rope_fraction=1.0, rotation_range=2.0, is_mimo=True, mimo_rank=1, dtype=D)
    order = torch.arange(8).view(2, 4).t().flatten()  # channel of MIMO that stands at each channel of SISO
    back = order.argsort()
    weights = {name: p.clone() for name, p in siso.state_dict().items()}
    for name in ("B_bias", "C_bias", "B_norm.weight", "C_norm.weight"):
        weights[name] = weights[name][..., back]
    start = 2 * 32
    for offset in (0, 8):
        rows = slice(start + offset, start + offset + 8)
        weights["in_proj.weight"][rows] = siso.in_proj.weight.data[rows][back]
    weights |= {name: torch.ones_like(getattr(mimo, name)) for name in ("mimo_x", "mimo_z", "mimo_o")}
    mimo.load_state_dict(weights, strict=True)
    x = torch.randn(2, 10, 16, dtype=D)
    y_siso, cache_siso = siso.prefill(x)
    y_mimo, cache_mimo = mimo.prefill(x)
    assert_near(y_mimo, y_siso, FLOOR[D])
    assert_near(cache_mimo.ssm[..., order], cache_siso.ssm, FLOOR[D])


def test_the_decay_rate_is_negative_varies_with_the_input_and_keeps_its_floor():
    for activation in ("heavy_tail", "softplus"):
        block = Mamba3(**SMALL, a_activation=activation, A_floor=0.05, dtype=D)
        x = 30 * torch.randn(2, 50, 16, dtype=D)
        dt, log_decay = capture(block, x)[3:5]
        rate = log_decay / dt
        assert (rate <= -0.05 * (1 - 1e-12)).all()
        assert rate.std() > 0.1
        assert (rate <= -0.05 * (1 - 1e-12)).any()


def test_the_heavy_tail_is_smooth_and_positive():
    x = torch.tensor([-1e6, -1.0, 0.0, 2.0], dtype=D, requires_grad=True)
    y = heavy_tail(x)
    assert torch.allclose(y, torch.tensor([1 / (1 + 1e6), 0.5, 1.0, 3.0], dtype=D))
    y.sum().backward()
    assert torch.allclose(x.grad[1:], torch.tensor([0.25, 1.0, 1.0], dtype=D))


def test_a_running_angle_stays_small_and_exact_over_a_long_sequence():
    """A float32 sum of a hundred thousand angles would be off by a visible rotation."""
    dt, rate = torch.rand(1, 100_000, 4), math.pi * torch.randn(1, 100_000, 2).tanh()
    rotation = cumulative_rotation("interleaved", rate, dt, torch.zeros(1, 4, 2), None)
    assert 0 <= rotation.min() <= rotation.max() <= 2 * math.pi + 1e-6
    exact = (dt.double().unsqueeze(-1) * rate.double().unsqueeze(2)).cumsum(1)
    assert (rotation[:, -1].double() - exact[:, -1]).cos().min() > 1 - 1e-10


@pytest.mark.parametrize("bounds", [None, [0, 1, 70, 150]], ids=["batch", "packed"])
def test_running_angles_equal_the_plain_sum_in_values_and_gradients(bounds):
    rate, dt = torch.randn(1, 150, 2, dtype=D), torch.rand(1, 150, 4, dtype=D)
    start = torch.rand(3 if bounds else 1, 4, 2, dtype=D)
    leaves = [x.requires_grad_() for x in (rate, dt, start)]
    head = torch.randn(1, 150, 4, 2, dtype=D)
    rotation = cumulative_rotation("halves", rate, dt, start, None if bounds is None else torch.tensor(bounds))
    parts = (dt.unsqueeze(-1) * rate.unsqueeze(2)).split([1, 69, 80] if bounds else [150], dim=1)
    expected = torch.cat([p.cumsum(1) + s for p, s in zip(parts, start.unsqueeze(1).split(1), strict=True)], 1)
    assert_near((rotation - expected).cos(), torch.ones_like(rotation), FLOOR[D])
    grads = torch.autograd.grad((rotation * head).sum(), leaves)
    for actual, expected_grad in zip(grads, torch.autograd.grad((expected * head).sum(), leaves), strict=True):
        assert_near(actual, expected_grad, FLOOR[D])


def test_quaternions_multiply_as_hamilton_said():
    one, i, j, k = torch.eye(4, dtype=D)
    for product, expected in ((multiply(i, j), k), (multiply(j, k), i), (multiply(k, i), j), (multiply(j, i), -k)):
        assert torch.equal(product, expected)
    p, q = torch.randn(2, 5, 4, dtype=D)
    assert_near(multiply(p, conjugate(p)), p.square().sum(-1, keepdim=True) * one, FLOOR[D])
    assert_near(conjugate(multiply(p, q)), multiply(conjugate(q), conjugate(p)), FLOOR[D])


@pytest.mark.parametrize("t", [1, 2, 5, 9, 17])
def test_running_products_equal_the_loop_and_pass_gradcheck(t):
    q = torch.nn.functional.normalize(torch.randn(2, t, 3, 4, dtype=D), dim=-1)
    start = torch.nn.functional.normalize(torch.randn(2, 3, 4, dtype=D), dim=-1)
    expected, running = [], start
    for step in range(t):
        running = multiply(q[:, step], running)
        expected.append(running)
    assert_near(cumulative_products(q, start, None), torch.stack(expected, 1), FLOOR[D])

    def from_any(q, start):
        unit = [torch.nn.functional.normalize(x, dim=-1) for x in (q, start)]
        return cumulative_products(*unit, None)

    if t <= 5:
        leaves = (torch.randn(1, t, 1, 4, dtype=D).requires_grad_(), torch.randn(1, 1, 4, dtype=D).requires_grad_())
        assert torch.autograd.gradcheck(from_any, leaves)


@pytest.mark.parametrize("options", ["mamba3", "mamba3 quaternion", "mamba3 no rotation", "mamba3 mimo 2"])
def test_rotation_and_gate_pass_gradcheck_across_cache_blocks(options, monkeypatch):
    monkeypatch.setattr("anymamba.core.recompute.CACHE_BLOCK_NUMEL", 64)
    block = make_block(options)
    x = torch.randn(1, 4, 16, dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(block, (x,), atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
def test_quaternion_rotations_are_smooth_for_any_generator(value):
    direction = torch.full((2, 3), value, requires_grad=True)
    q = quaternion_from_vector(bounded_vector(direction))
    assert_near(q.norm(dim=-1), torch.ones(2), FLOOR[torch.float32])
    q[:, 1].sum().backward()
    assert torch.isfinite(direction.grad).all()
    if value == 0:
        assert torch.allclose(direction.grad[:, 0], torch.full((2,), 0.5))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_sequence_changes_its_pathway_at_any_cut(algorithm):
    block = make_block("mamba3 mimo 2")
    x = torch.randn(2, 9, 16, dtype=D)
    y, whole = block.prefill(x, path=SsdPath(algorithm, 4))
    for cut in range(1, 9):
        for first, second in (("single", "double"), ("double", "single")):
            y_head, cache = block.prefill(x[:, :cut], path=SsdPath(algorithm, 4, first))
            y_tail, cache = block.prefill(x[:, cut:], cache, path=SsdPath(algorithm, 4, second))
            assert_near(torch.cat([y_head, y_tail], 1), y, FLOOR[D])
            for name, field in tensors_of(whole).items():
                assert_near(getattr(cache, name), field, FLOOR[D], name)


def test_a_learnable_start_is_the_state_and_is_not_added_to_a_cache():
    block = make_block("mamba3 learnable start")
    x = torch.randn(2, 6, 16, dtype=D)
    assert torch.equal(block.init_cache(2).ssm[1], block.init_states)
    zeros = block.init_cache(2)._replace(ssm=torch.zeros(2, 4, 8, 8, dtype=D))
    without = Mamba3(**SMALL, chunk_size=3, dtype=D)
    without.load_state_dict({n: p for n, p in block.state_dict().items() if n != "init_states"})
    assert torch.equal(block.prefill(x, zeros)[0], without(x))
    assert_near(unroll(block, x, None)[0], block(x), FLOOR[D])


def test_initialization_is_the_official_one():
    block = Mamba3(d_model=512, is_mimo=True, mimo_rank=4, dt_min=0.01, dt_max=0.02, dtype=torch.bfloat16)
    dt = torch.nn.functional.softplus(block.dt_bias)
    assert 0.0099 < dt.min() <= dt.max() < 0.0201
    assert (block.B_bias == 1).all()
    assert (block.C_bias == 1).all()
    assert (block.mimo_x == 0.25).all()
    assert (block.mimo_z == 1).all()
    assert (block.mimo_o == 0.25).all()
    assert all(p.dtype == torch.float32 for p in (block.dt_bias, block.B_bias, block.C_bias, block.D))
    assert block.in_proj.weight.dtype == torch.bfloat16
    assert all(p._no_weight_decay for p in (block.dt_bias, block.D))
    assert Mamba3(d_model=768).in_proj.out_features == 3432
    assert Mamba3(d_model=768, is_mimo=True).in_proj.out_features == 4200


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"headdim": 7}, "headdim must divide the 32 channels of the SSM, got headdim = 7"),
        ({"ngroups": 3}, "ngroups must divide the 4 heads, got ngroups = 3"),
        ({"expand": 1.3}, "must be an integer, got 1.3"),
        ({"rope_fraction": 1.5}, "rope_fraction must be between 0 and 1, got 1.5"),
        ({"d_state": 9}, "d_state must be a multiple of 2 for complex rotation, got 9"),
        ({"d_state": 6, "rotation": "quaternion"}, "d_state must be a multiple of 4 for quaternion rotation, got 6"),
        ({"d_state": 2}, r"rope_fraction · d_state must be 0 or at least 2, .* got 0.5 · 2"),
        ({"d_state": 4, "rotation": "quaternion"}, "rope_fraction · d_state must be 0 or at least 4"),
        ({"rotation": "octonion"}, "rotation must be complex, quaternion or fixed, got 'octonion'"),
        ({"a_activation": "relu"}, "a_activation must be heavy_tail or softplus, got 'relu'"),
        ({"mimo_rank": 0}, "mimo_rank must be at least 1, got 0"),
        ({"A_floor": -1}, "A_floor must not be negative, got -1"),
        ({"dt_limit": (1, 0)}, "dt_limit must satisfy"),
        ({"dt_min": 1, "dt_max": 0.1}, "dt_min <= dt_max must hold"),
        ({"chunk_size": 0}, "chunk_size must be None or at least 1, got 0"),
    ],
)
def test_a_config_that_cannot_work_is_rejected(fields, message):
    with pytest.raises(ValueError, match=f"Mamba3Config: .*{message}"):
        Mamba3(**{**SMALL, **fields})


@pytest.mark.usefixtures("unchecked")
def test_bad_input_says_what_was_expected_and_what_came():
    block = Mamba3(Mamba3Config(**SMALL))
    x, cache = torch.randn(2, 5, 16), block.init_cache(3)
    with pytest.raises(ValueError, match=r"Mamba3.prefill: x must have shape \(b, t, d=16\), got \(2, 5, 15\)"):
        block(x[..., :15])
    with pytest.raises(ValueError, match="at least one step, got t = 0"):
        block(x[:, :0])
    with pytest.raises(TypeError, match=r"x must be torch.float32, got torch.float64"):
        block(x.double())
    with pytest.raises(ValueError, match=r"cache.ssm must have shape \(2, 4, 8, 8\), got \(3, 4, 8, 8\)"):
        block.prefill(x, cache)
    with pytest.raises(ValueError, match=r"cache.rotation must have shape \(2, 4, 2\), got \(2, 4, 1\)"):
        block.step(x[:, 0], block.init_cache(2)._replace(rotation=torch.zeros(2, 4, 1)))
    with pytest.raises(TypeError, match=r"cache.rotation must be torch.float32, got torch.float64"):
        block.step(x[:, 0], block.init_cache(2)._replace(rotation=torch.zeros(2, 4, 2, dtype=D)))
    with pytest.raises(ValueError, match="cu_seqlens cannot be combined with mask"):
        block(x[:1], mask=torch.ones(1, 5).bool(), cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="strictly increasing"):
        block(x[:1], cu_seqlens=torch.tensor([0, 3, 3, 5]))
    with pytest.raises(TypeError, match=r"not both; got also \['headdim'\]"):
        Mamba3(Mamba3Config(**SMALL), headdim=4)
