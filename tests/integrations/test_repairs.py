"""What transformers computes wrongly on a CPU, computed right: each against the model's own whole-sequence forward."""

import math

import pytest
import torch
import torch.nn.functional as F

from anymamba.integrations.transformers import accelerate
from tests.integrations.models import MAMBA1_LIKE, cache_of, ids, pair, plain, run, run_split
from tests.support import assert_near

TOLERANCE = 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", MAMBA1_LIKE)
def test_several_tokens_from_a_cache_start_from_its_state(name):
    original, fast = pair(name)
    x = ids(2, 14)
    assert_near(run_split(fast, x, (6, 5, 3)), original(x).logits, TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba2", "bamba", "granite", "falcon_h1"])
def test_limits_of_step_sizes_hold_for_a_token_too(name):
    original, fast = pair(name, time_step_limit=(0.05, 0.3))
    x = ids(2, 14)
    assert_near(run_split(fast, x, (11, 1, 1, 1)), original(x).logits, TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("name", ["nemotron", "zamba2"])
def test_the_smallest_step_size_holds_for_a_token_too(name):
    original, fast = pair(name, time_step_min=0.5)
    x = ids(2, 14)
    assert_near(run_split(fast, x, (11, 1, 1, 1)), original(x).logits, TOLERANCE)


@torch.no_grad()
def test_a_token_of_a_normed_falcon_h1_has_its_shape():
    original, fast = pair("falcon_h1", mamba_rms_norm=True)
    x = ids(2, 9)
    _, cache = run(fast, x[:, :8])
    logits, _ = run(fast, x[:, 8:], cache, 8)
    assert logits.shape == (2, 1, 61)
    assert_near(logits, original(x).logits[:, -1:], TOLERANCE)


def recurrent_definition(mixer, x):
    """Compute Mamba-2's mixer token by token, in the dtype of its input."""
    i, g, n, h = mixer.intermediate_size, mixer.n_groups, mixer.ssm_state_size, mixer.num_heads
    z, xbc, dt = mixer.in_proj(x).split([i, mixer.conv_dim, h], -1)
    taps = F.pad(xbc, (0, 0, mixer.conv_kernel_size - 1, 0)).unfold(1, mixer.conv_kernel_size, 1)
    xbc = F.silu((taps * mixer.conv1d.weight[:, 0]).sum(-1) + mixer.conv1d.bias)
    u, b, c = xbc.split([i, g * n, g * n], -1)
    dt, a, ys = F.softplus(dt + mixer.dt_bias), -mixer.A_log.exp(), []
    state = x.new_zeros(x.shape[0], h, mixer.head_dim, n)
    for t in range(x.shape[1]):
        b_t, c_t = (s[:, t].view(-1, g, n).repeat_interleave(h // g, 1) for s in (b, c))
        u_t, size = u[:, t].view(-1, h, mixer.head_dim), dt[:, t, :, None, None]
        state = torch.exp(size * a[:, None, None]) * state + size * u_t[..., None] * b_t[:, :, None]
        ys.append((state @ c_t[..., None]).squeeze(-1) + mixer.D[:, None] * u_t)
    y = torch.stack(ys, 1).flatten(2) * F.silu(z)
    groups = y.unflatten(-1, (g, -1))
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + mixer.norm.variance_epsilon)).flatten(-2)
    return mixer.out_proj(y * mixer.norm.weight)


@torch.no_grad()
def test_float64_is_float64_throughout():
    original = plain("mamba2", torch.float64)
    mixer = accelerate(original, norm="official").backbone.layers[0].mixer
    x = torch.randn(2, 19, 32, dtype=torch.float64)
    assert_near(mixer(x), recurrent_definition(mixer, x), 1e-13)


def count_nodes(output):
    """Count the nodes of the graph that a backward pass goes through."""
    seen, stack = set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [following for following, _ in node.next_functions]
    return len(seen)


@pytest.mark.parametrize("name", MAMBA1_LIKE)
def test_training_takes_as_many_operations_for_any_length(name):
    _, fast = pair(name)
    counts = [count_nodes(fast.train()(ids(1, t)).logits) for t in (8, 40)]
    # Experts of transformers are looped over, as many as are hit.
    assert counts[1] <= counts[0] + (60 if name == "jamba" else 0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "zamba2", "nemotron", "granite"])
def test_right_padding_leaves_the_mixers_caches_as_rows_alone_do(name):
    _, fast = pair(name)
    row, padding = ids(1, 6), ids(1, 3, seed=8)
    mask = torch.tensor([[1] * 6 + [0] * 3])
    _, padded = run(fast, torch.cat([row, padding], 1), attention_mask=mask)
    _, alone = run(fast, row)
    layer_pairs = [(a, b) for a, b in zip(padded.layers, alone.layers, strict=True) if hasattr(a, "recurrent_states")]
    assert layer_pairs
    for a, b in layer_pairs:
        if a.recurrent_states[0] is not None:
            assert_near(a.recurrent_states[0], b.recurrent_states[0], TOLERANCE)
            assert_near(a.conv_states[0], b.conv_states[0], TOLERANCE)


@torch.no_grad()
def test_a_limit_that_is_infinite_comes_from_json_too():
    original, fast = pair("mamba2", time_step_limit=[0.0, math.inf])
    x = ids(1, 6)
    assert_near(fast(x).logits, original(x).logits, TOLERANCE)
    assert cache_of(fast, fast(x, use_cache=True)) is not None
