import math

import pytest
import torch

from anymamba.analysis import layers, recurrence
from examples.state_tracking.rotation_penalty import PARTS, collect_penalties, rotation_penalty
from examples.state_tracking.tracking import TrackingBatch, TrackingTask
from tests.examples.test_state_tracking import config

CIRCLE = 2 * math.pi


def rotations(*fractions):
    """Return the rotations of one token and one head, given as fractions of a circle, in float64."""
    return torch.tensor(fractions, dtype=torch.float64).reshape(1, 1, 1, -1) * CIRCLE


def make_lasting():
    return torch.zeros(1, 1, 1, dtype=torch.float64)


def test_simple_fractions_of_a_circle_cost_nothing_and_those_between_them_do():
    simple = rotations(0, 1 / 2, -1 / 2, 1 / 3, 2 / 3, 1 / 4, -1 / 5, 2 / 5, 5 / 6, 1 / 12)
    assert rotation_penalty(make_lasting(), simple).item() == pytest.approx(0, abs=1e-12)
    assert rotation_penalty(make_lasting(), simple + CIRCLE / PARTS / 2).item() == pytest.approx(2)
    assert rotation_penalty(make_lasting(), simple + CIRCLE / PARTS / 4).item() == pytest.approx(1)


@pytest.mark.parametrize("fraction", [1 / 2, 0.0, -1 / 5, 1 / 4])
@pytest.mark.parametrize("off", [0.0014, -0.0014, 0.004, -0.004])
def test_the_gradient_pulls_a_rotation_to_the_nearest_fraction(fraction, off):
    rotation = rotations(fraction + off).requires_grad_()
    optimizer = torch.optim.SGD([rotation], lr=1 / PARTS**2)
    for _ in range(40):
        optimizer.zero_grad()
        rotation_penalty(make_lasting(), rotation).backward()
        optimizer.step()
    assert rotation.item() / CIRCLE == pytest.approx(fraction, abs=1e-9)


def test_states_that_last_are_made_to_last_and_those_that_fade_stay_free():
    log_decay = torch.tensor([[[-1e-3, -1.0]]], dtype=torch.float64, requires_grad=True)
    rotation = rotations(0.01).expand(1, 1, 2, 1).clone().requires_grad_()
    rotation_penalty(log_decay, rotation).backward()
    kept, fading = rotation.grad.flatten().abs().tolist()
    assert kept > 1
    assert fading < 1e-20
    kept, fading = log_decay.grad.flatten().tolist()
    assert kept < -1  # descending makes the log-decay larger: it fades less
    assert -1e-20 < fading <= 0
    rotation_penalty(still := log_decay.detach().clone().requires_grad_(), None).backward()
    assert still.grad.tolist() == log_decay.grad.tolist()  # no state fades for the sake of its rotations
    assert rotation_penalty(make_lasting(), None).item() == 0
    assert rotation_penalty(make_lasting(), rotations()).item() == 0  # no pair that rotates


def test_a_head_that_forgets_at_some_tokens_is_free_at_all():
    log_decay = torch.tensor([0.0, -1.0], dtype=torch.float64).reshape(1, 2, 1)
    rotation = rotations(0.01, 0.02).reshape(1, 2, 1, 1).requires_grad_()
    rotation_penalty(log_decay, rotation).backward()
    assert rotation.grad.abs().max() < 1e-20


@pytest.mark.parametrize("variant", ["mamba3", "mamba3-fixed-rotation", "mamba3-no-rotation", "mamba2"])
def test_the_penalty_is_that_of_every_layer_and_reaches_the_loss_and_the_weights(variant):
    lasts = {"dt_min": 1e-4, "dt_max": 1e-4}
    task = TrackingTask(config(variant=variant, n_layer=2, block=lasts))
    torch.manual_seed(0)
    model = task.make_model(torch.float64)
    drawn = task.language.sample(task._chance(0, 0), 1, 9, 9)
    plain, penalized = TrackingBatch.of(drawn, "every"), TrackingBatch.of(drawn, "every", penalty_weight=0.5)
    with collect_penalties(model) as penalties:
        model.backbone(plain.inputs, cu_seqlens=plain.bounds)
    model.backbone(plain.inputs, cu_seqlens=plain.bounds)  # outside of the context nothing is collected
    terms = [recurrence(*layer) for layer in layers(model, plain.inputs)]
    expected = [rotation_penalty(term.log_decay, term.rotation).item() for term in terms]
    assert [value.item() for value in penalties] == pytest.approx(expected, rel=1e-12)
    assert min(expected) > 0.01
    loss_without, _ = task.loss(model, plain, None, torch.float64)
    loss, _ = task.loss(model, penalized, None, torch.float64)
    assert loss.item() == pytest.approx(loss_without.item() + 0.5 * 9 * sum(expected) / 2, rel=1e-12)
    (loss - loss_without).backward()
    for layer in model.backbone.layers:
        assert layer.mixer.dt_bias.grad.abs().min() > 0


def test_the_weight_rises_between_two_shares_of_the_steps():
    task = TrackingTask(config(rotation_penalty=0.4, penalty_from=1 / 6, penalty_to=0.5))
    assert [task.penalty_weight(step) for step in range(6)] == pytest.approx([0, 0, 0.2, 0.4, 0.4, 0.4])
    assert [task.batches(step)[0].penalty_weight.item() for step in (0, 2, 5)] == pytest.approx([0, 0.2, 0.4])
    assert TrackingTask(config()).penalty_weight(5) == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rotation_penalty": -0.1}, r"rotation_penalty must be a weight of at least 0, got -0\.1"),
        ({"rotation_penalty": math.inf}, "rotation_penalty must be a weight of at least 0, got inf"),
        (
            {"penalty_from": 0.7, "penalty_to": 0.6},
            r"0 <= penalty_from <= penalty_to <= 1 must hold, got 0\.7 and 0\.6",
        ),
        ({"penalty_to": 1.5}, r"0 <= penalty_from <= penalty_to <= 1 must hold, got 0\.5 and 1\.5"),
    ],
)
def test_weights_and_shares_that_cannot_be_are_rejected(wrong, message):
    with pytest.raises(ValueError, match=message):
        config(**wrong)
