import pytest
import torch
import torch.nn.functional as F

from anymamba.blocks.layers import GatedRMSNorm, RMSNorm
from tests.support import FLOOR, assert_near

pytestmark = pytest.mark.usefixtures("each_implementation")


def reference(x, z, norm):
    """Compute the definition, in plain autograd."""
    u = x if norm.norm_before_gate else x * F.silu(z)
    groups = u.unflatten(-1, (-1, norm.group_size))
    y = (groups / (groups.square().mean(-1, keepdim=True) + norm.eps).sqrt()).flatten(-2) * norm.weight
    return y * F.silu(z) if norm.norm_before_gate else y


@pytest.mark.parametrize("elements", [8, 2**17], ids=["several cache blocks", "one cache block"])
@pytest.mark.parametrize("group_size", [None, 4, 1])
@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_it_equals_the_definition_in_values_and_gradients(norm_before_gate, group_size, elements, monkeypatch):
    monkeypatch.setattr("anymamba.core.recompute.CACHE_BLOCK_NUMEL", elements)
    norm = GatedRMSNorm(8, group_size=group_size, norm_before_gate=norm_before_gate, dtype=torch.float64)
    norm.weight.data.normal_()
    x, z = (torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    leaves, head = (x, z, norm.weight), torch.randn(2, 5, 8, dtype=torch.float64)
    y, expected = norm(x, z), reference(x, z, norm)
    assert_near(y, expected, FLOOR[torch.float64])
    grads = torch.autograd.grad((y * head).sum(), leaves)
    for actual, expected_grad in zip(grads, torch.autograd.grad((expected * head).sum(), leaves), strict=True):
        assert_near(actual, expected_grad, FLOOR[torch.float64])


def test_groups_are_normed_by_themselves():
    norm = GatedRMSNorm(4, group_size=2)
    x, z = torch.tensor([[1.0, 1.0, 100.0, 100.0]]), torch.full((1, 4), 50.0)
    assert_near(norm(x, z), torch.ones(1, 4), 1e-4)


@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_zeros_and_large_values_have_finite_gradients(norm_before_gate):
    norm = GatedRMSNorm(4, norm_before_gate=norm_before_gate)
    for value in (0.0, 1e-20, 1e15):
        x, z = torch.full((1, 4), value, requires_grad=True), torch.full((1, 4), -90.0, requires_grad=True)
        norm(x, z).sum().backward()
        assert torch.isfinite(x.grad).all()
        assert torch.isfinite(z.grad).all()


def test_half_precision_is_computed_in_float32():
    norm = GatedRMSNorm(64, dtype=torch.bfloat16)
    x, z = (torch.randn(3, 64).bfloat16() for _ in range(2))
    y = norm(x, z)
    assert y.dtype == torch.bfloat16
    expected = reference(x.double(), z.double(), GatedRMSNorm(64, dtype=torch.float64))
    assert_near(y, expected, FLOOR[torch.bfloat16] / 4)


def test_an_empty_batch_is_an_empty_result():
    assert GatedRMSNorm(8, group_size=4)(torch.zeros(0, 3, 8), torch.zeros(0, 3, 8)).shape == (0, 3, 8)


def test_shapes_that_do_not_fit_are_rejected(unchecked):
    with pytest.raises(ValueError, match="group_size must divide the 10 channels, got 3"):
        GatedRMSNorm(10, group_size=3)
    with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \(i=16\), got \(8,\)"):
        RMSNorm(8)(torch.ones(2, 16))
    with pytest.raises(ValueError, match=r"the shape of x, \(4, 8\), got \(2, 8\)"):
        GatedRMSNorm(8)(torch.ones(4, 8), torch.ones(2, 8))
