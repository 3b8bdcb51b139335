"""Every architecture: the numbers of transformers, where these are right, whole and in parts."""

import pytest
import torch

from tests.integrations.models import CONFIGS, MAMBA1_LIKE, MAMBA2_LIKE, ids, pair, plain, run, run_split
from tests.support import FLOOR, relative_error

ARCHITECTURES = list(CONFIGS)
TOLERANCE = 1e-5  # or transformers' own distance from float64, where that is larger


def assert_as_near(actual, original, reference, name=""):
    """Assert that our error from float64 is within the tolerance, or at most that of transformers."""
    assert actual.shape == reference.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(reference.shape)}"
    error, theirs = relative_error(actual, reference), relative_error(original, reference)
    assert error <= max(TOLERANCE, 2 * theirs), f"{name}: {error:.2e}, transformers {theirs:.2e}"


def reference_of(name, **fields):
    """Make the accelerated model in float64, which other tests compare with transformers'."""
    return pair(name, torch.float64, **fields)[1]


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_float64_is_transformers_up_to_its_own_float32_parts(name):
    original, fast = pair(name, torch.float64)
    x = ids(2, 23)
    assert relative_error(fast(x).logits, original(x).logits) < 5e-6


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("t", [1, 23])
def test_logits(name, t, each_implementation):
    (original, fast), x = pair(name), ids(2, t)
    assert_as_near(fast(x).logits, original(x).logits, reference_of(name)(x).logits)


def gradients(model, x):
    """Return the gradients, by parameter, of a loss on which every logit has an influence."""
    logits = model.train()(x).logits
    head = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5)).to(logits.dtype)
    model.zero_grad()
    (logits * head).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients(name):
    (original, fast), x = pair(name), ids(2, 13)
    expected, theirs, ours = gradients(pair(name, torch.float64)[0], x), gradients(original, x), gradients(fast, x)
    assert ours.keys() == theirs.keys() == expected.keys()
    for parameter, reference in expected.items():
        error, other = (relative_error(grads[parameter], reference) for grads in (ours, theirs))
        assert error <= max(5e-5, 4 * other), f"{parameter}: {error:.2e}, transformers {other:.2e}"


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("lengths", [(9, 6, 1, 1, 5), (1, 1, 20)], ids=str)
def test_any_split_continues_from_any_cache(name, lengths, each_implementation):
    (original, fast), x = pair(name), ids(2, 22)
    assert_as_near(run_split(fast, x, lengths), original(x).logits, reference_of(name)(x).logits)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_h1", "jamba"])
def test_a_token_has_gradients_where_they_are_wanted(name):
    """With gradients, a token runs on the operators, and gives the same numbers."""
    _, fast = pair(name)
    x = ids(2, 8)
    with torch.no_grad():
        _, cache = run(fast, x[:, :7])
        expected, _ = run(fast, x[:, 7:], cache, 7)
        _, cache = run(fast, x[:, :7])
    logits, _ = run(fast, x[:, 7:], cache, 7)
    assert relative_error(logits, expected) < TOLERANCE
    logits.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in fast.parameters() if p.grad is not None)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_half_precision_is_within_its_rounding_as_transformers_is(name, dtype):
    original, fast = pair(name, dtype)
    x = ids(2, 15)
    expected = plain(name).to(dtype).to(torch.float32)(x).logits
    theirs = relative_error(original(x).logits, expected)
    for logits in (fast(x).logits, run_split(fast, x, (9, 4, 1, 1))):
        assert relative_error(logits, expected) <= max(2 * theirs, 4 * FLOOR[dtype])


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba2", "mamba", "bamba", "jamba"])
def test_autocast(name):
    original, fast = pair(name)
    x = ids(2, 15)
    expected = original(x).logits
    with torch.autocast("cpu", torch.bfloat16):
        theirs = relative_error(original(x).logits, expected)
        for logits in (fast(x).logits, run_split(fast, x, (9, 4, 1, 1))):
            assert relative_error(logits, expected) <= max(2 * theirs, 4 * FLOOR[torch.bfloat16])


@torch.no_grad()
@pytest.mark.parametrize("before_gate", [False, True])
def test_falcon_h1_with_a_norm_in_either_order(before_gate):
    fields = {"mamba_rms_norm": True, "mamba_norm_before_gate": before_gate}
    (original, fast), x = pair("falcon_h1", **fields), ids(2, 23)
    reference = reference_of("falcon_h1", **fields)(x).logits
    assert_as_near(fast(x).logits, original(x).logits, reference)
    assert_as_near(run_split(fast, x, (9, 12, 1, 1)), original(x).logits, reference)


@torch.no_grad()
@pytest.mark.parametrize("name", MAMBA2_LIKE)
def test_awkward_options_of_mamba2(name):
    bias = {"mamba2": {"use_bias": False, "use_conv_bias": False}, "nemotron": {"use_conv_bias": False}}
    fields = bias.get(name, {} if name == "zamba2" else {"mamba_conv_bias": False, "mamba_proj_bias": False})
    (original, fast), x = pair(name, **fields), ids(3, 21)
    assert_as_near(run_split(fast, x, (19, 1, 1)), original(x).logits, reference_of(name, **fields)(x).logits)


@torch.no_grad()
@pytest.mark.parametrize("name", MAMBA1_LIKE)
def test_awkward_options_of_mamba1(name):
    bare = {"use_bias": False, "use_conv_bias": False, "conv_kernel": 3, "time_step_rank": 5}
    fields = {"mamba_proj_bias": False, "mamba_conv_bias": False, "mamba_d_conv": 3} if name == "jamba" else bare
    (original, fast), x = pair(name, **fields), ids(3, 21)
    assert_as_near(run_split(fast, x, (19, 1, 1)), original(x).logits, reference_of(name, **fields)(x).logits)


@torch.no_grad()
def test_codestral_has_many_groups_and_the_official_norm_is_an_option():
    """Norms over groups and over all channels differ; which one transformers computes depends on its version."""
    from anymamba.integrations.transformers import accelerate

    original, fast = pair("mamba2", n_groups=4)
    x = ids(2, 9)
    assert relative_error(fast(x).logits, original(x).logits) < TOLERANCE
    official = accelerate(fast, norm="official")
    logits = official(x).logits
    for mixer in (layer.mixer for layer in original.backbone.layers):
        weight, eps = mixer.norm.weight, mixer.norm.variance_epsilon

        def gate_and_norm(y, z, weight=weight, eps=eps):
            u = (y * torch.nn.functional.silu(z)).unflatten(-1, (4, -1))
            return (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight

        mixer.norm.forward = gate_and_norm
    assert relative_error(logits, original(x).logits) < TOLERANCE
    assert relative_error(run_split(official, x, (5, 3, 1)), original(x).logits) < TOLERANCE
