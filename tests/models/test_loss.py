import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anymamba.models import loss
from anymamba.models.loss import chunked_cross_entropy
from tests.models.cases import small_lm
from tests.support import FLOOR, assert_near


@pytest.fixture(params=[1, 50, 10**6], ids=lambda size: f"{size} logits at once")
def sizes(request, monkeypatch):
    """Limit how many logits are computed at once: those of one row, of a few rows, or all."""
    monkeypatch.setattr(loss, "_MAX_LOGITS", request.param)


def case(m=7, d=5, v=11, dtype=torch.float64, ignored=(2, 6)):
    head = nn.Linear(d, v, bias=False, dtype=dtype)
    hidden = torch.randn(m, d, dtype=dtype, requires_grad=True)
    targets = torch.randint(v, (m,))
    targets[[i for i in ignored if i < m]] = -100
    return head, hidden, targets


def plain(head, hidden, targets):
    logits = head(hidden)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="sum")


def with_gradients(function, head, hidden, targets, weight=0.7):
    total = function(head, hidden, targets)
    return total, *torch.autograd.grad(weight * total, [hidden, head.weight])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 7, 30])
def test_cost_and_gradients_are_those_of_all_logits_at_once(sizes, m, dtype):
    head, hidden, targets = case(m, dtype=dtype)
    expected = with_gradients(plain, head, hidden, targets)
    actual = with_gradients(chunked_cross_entropy, head, hidden, targets)
    assert actual[0].dtype == torch.promote_types(dtype, torch.float32)
    for name, a, b in zip(("nats", "hidden", "weight"), actual, expected, strict=True):
        assert_near(a, b, FLOOR[dtype], name)


def test_gradients_are_exact(sizes):
    head, hidden, targets = case()

    def cost(hidden, weight):
        head._parameters["weight"] = weight
        return chunked_cross_entropy(head, hidden, targets)

    assert torch.autograd.gradcheck(cost, (hidden, head.weight.detach().clone().requires_grad_()))


@pytest.mark.parametrize("target", ["hidden", "weight", "neither"])
def test_only_the_gradients_that_are_wanted_are_computed(target, sizes):
    head, hidden, targets = case()
    expected = with_gradients(plain, head, hidden, targets)
    hidden.requires_grad_(target == "hidden")
    head.requires_grad_(target == "weight")
    total = chunked_cross_entropy(head, hidden, targets)
    assert_near(total, expected[0], 1e-12)
    if target == "neither":
        assert not total.requires_grad
        return
    (0.7 * total).backward()
    assert_near(hidden.grad if target == "hidden" else head.weight.grad, expected[1 + (target == "weight")], 1e-12)


def test_nothing_but_ignored_targets_costs_nothing():
    head, hidden, targets = case()
    total, dhidden, dweight = with_gradients(chunked_cross_entropy, head, hidden, torch.full_like(targets, -100))
    assert total == 0
    assert (dhidden == 0).all()
    assert (dweight == 0).all()


def test_autocast_computes_in_its_dtype_and_adds_up_in_the_weights(sizes):
    head, hidden, targets = case(m=30, d=16, v=40, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = with_gradients(plain, head, hidden, targets)
        actual = with_gradients(chunked_cross_entropy, head, hidden, targets)
    assert [x.dtype for x in actual] == [torch.float32] * 3
    for a, b in zip(actual, expected, strict=True):
        assert_near(a, b, FLOOR[torch.bfloat16])


def test_a_head_with_a_hook_or_of_another_kind_is_called(sizes):
    head, hidden, targets = case()
    seen = []
    handle = head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    expected = chunked_cross_entropy(head, hidden, targets)
    assert seen == [(7, 11)]
    handle.remove()
    assert_near(chunked_cross_entropy(head, hidden, targets), expected, 1e-12)
    assert len(seen) == 1
    assert_near(chunked_cross_entropy(nn.Sequential(head), hidden, targets), expected, 1e-12)
    biased = nn.Linear(5, 11, dtype=torch.float64)
    assert_near(chunked_cross_entropy(biased, hidden, targets), plain(biased, hidden, targets), 1e-12)


def test_a_target_outside_the_vocabulary_is_an_error(sizes):
    head, hidden, targets = case()
    targets[0] = 11
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked_cross_entropy(head, hidden, targets)


def test_a_second_derivative_raises():
    head, hidden, targets = case()
    (gradient,) = torch.autograd.grad(chunked_cross_entropy(head, hidden, targets), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("tied", [True, False])
def test_the_models_loss_is_the_same_without_all_logits(tied, sizes):
    x = torch.randint(61, (2, 9))
    labels = x.masked_fill(torch.rand(x.shape) < 0.2, -100)
    mask = torch.tensor([9, 6])
    grads = []
    for logits in ("all", "last", "none"):
        model = small_lm(dtype=torch.float64, tie_embeddings=tied)
        out = model(x, labels=labels, mask=mask, logits=logits)
        assert (None if out.logits is None else out.logits.shape[1]) == {"all": 9, "last": 1, "none": None}[logits]
        out.loss.backward()
        grads.append({"loss": out.loss, **{name: p.grad for name, p in model.named_parameters()}})
    for name in grads[0]:
        assert_near(grads[1][name], grads[0][name], 1e-10, name)
