import itertools

import pytest
import torch

from anymamba.training.config import OptimiserSection, ScheduleSection
from anymamba.training.optim import learning_rate, make_optimiser, parameter_groups
from tests.models.cases import FAMILIES, small_lm


@pytest.mark.parametrize("family", FAMILIES)
def test_only_projections_are_decayed(family):
    block = {**FAMILIES[family], "learnable_init_states": True}
    model = small_lm(family, ssm_cfg=block, d_intermediate=128)
    decayed, others = parameter_groups(model, OptimiserSection())
    assert {name.rpartition("layers.")[2][2:] for name in decayed} == {
        "mixer.in_proj.weight",
        "mixer.out_proj.weight",
        "mlp.fc1.weight",
        "mlp.fc2.weight",
    }
    assert decayed.keys() | others.keys() == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_decayed_if_asked(tied):
    model = small_lm(tie_embeddings=tied)
    decayed, _ = parameter_groups(model, OptimiserSection(decay_embeddings=True))
    assert "backbone.embedding.weight" in decayed
    assert ("lm_head.weight" in decayed) == (not tied)
    assert not {"backbone.embedding.weight", "lm_head.weight"} & parameter_groups(model, OptimiserSection())[0].keys()


def test_without_a_gradient_only_the_decayed_shrink():
    model = small_lm()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimiser = make_optimiser(model, OptimiserSection(lr=0.1, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimiser.step()
    decayed, _ = parameter_groups(model, OptimiserSection())
    for name, p in model.named_parameters():
        factor = 0.95 if name in decayed else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_schedules_rise_stay_and_fall(kind):
    schedule = ScheduleSection(steps=100, kind=kind, warmup=10, decay=0.2, final=0.1)
    rates = [learning_rate(step, 2.0, schedule) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert max(rates) == 2.0
    assert rates[100] == pytest.approx(2.0 if kind == "constant" else 0.2)
    assert rates[55] == pytest.approx({"cosine": 1.1, "wsd": 2.0, "constant": 2.0}[kind])
    assert rates[90] == pytest.approx({"cosine": 0.2543, "wsd": 1.1, "constant": 2.0}[kind], rel=1e-3)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def test_no_warm_up_and_warm_up_to_the_end():
    assert learning_rate(0, 1.0, ScheduleSection(steps=5, warmup=0)) == 1.0
    assert learning_rate(4, 1.0, ScheduleSection(steps=5, warmup=10)) == pytest.approx(0.5)
