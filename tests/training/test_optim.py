import itertools

import pytest
import torch

from anymamba import LatentModel, MambaLM, SequenceClassifier
from anymamba.blocks.layers import ProjectionPart
from anymamba.training.config.sections import OptimizerSection, ScheduleSection
from anymamba.training.optim.muon import Muon, orthogonalize
from anymamba.training.optim.optimizer import (
    Optimizer,
    clip_gradients,
    learning_rate,
    parameter_groups,
    plan,
    plan_table,
)
from tests.models.cases import FAMILIES, small_lm
from tests.support import FLOOR, assert_near

KINDS = pytest.mark.parametrize("kind", ["adamw", "muon"])


def set_gradients(model, seed=0):
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn_like(p)


def differences(model, before):
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Wrapped(torch.nn.Module):
    """A model inside another one."""

    def __init__(self, model):
        super().__init__()
        self.model = model


def decayed_names(model, **options):
    """Return the names of the decayed parameters; both groups together must have every parameter once."""
    decayed, others = parameter_groups(model, 0.3, **options)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert sorted(map(id, [*decayed["params"], *others["params"]])) == sorted(names)
    return {names[id(p)] for p in decayed["params"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_only_projections_are_decayed(family):
    block = {**FAMILIES[family], **({} if family == "Mamba1" else {"learnable_init_states": True})}
    model = small_lm(family, ssm_cfg=block, d_intermediate=128)
    projections = ["in_proj", "out_proj"] + ["x_proj", "dt_proj"] * (family == "Mamba1")
    assert {name.rpartition("layers.")[2][2:] for name in decayed_names(model)} == {
        *(f"mixer.{name}.weight" for name in projections),
        "mlp.fc1.weight",
        "mlp.fc2.weight",
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("wrap", [lambda model: model, Wrapped, torch.nn.Sequential, torch.compile])
def test_embeddings_are_decayed_if_asked(tied, wrap):
    model = wrap(small_lm(tie_embeddings=tied))
    more = decayed_names(model, decay_embeddings=True) - decayed_names(model)
    expected = ["backbone.embedding.weight"] + ["lm_head.weight"] * (not tied)
    assert sorted(name[name.index(end) :] for name in more for end in expected if name.endswith(end)) == expected


def test_the_groups_suit_the_optimizers_of_torch():
    model = small_lm(tie_embeddings=False)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    set_gradients(model)
    optimizer.step()


@KINDS
def test_without_a_gradient_only_the_decayed_shrink(kind):
    model = small_lm()
    before = values(model)
    optimizer = Optimizer(model, OptimizerSection(kind=kind, lr=0.1, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(1.0)
    decayed = decayed_names(model)
    for name, p in model.named_parameters():
        factor = 0.95 if name in decayed else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("d_intermediate", [0, 128])
def test_muon_makes_each_part_of_a_projection_orthogonal_by_itself(family, d_intermediate):
    model = small_lm(family, torch.float64, d_intermediate=d_intermediate)
    before = values(model)
    optimizer = Optimizer(model, OptimizerSection(kind="muon", lr=0.1, weight_decay=0.0))
    set_gradients(model)
    optimizer.step(0.5)
    layer, moved = model.backbone.layers[1], differences(model, before)
    modules = {"mixer": layer.mixer, **({"mlp": layer.mlp} if d_intermediate else {})}
    cut = {f"{m}.{p}": parts for m, module in modules.items() for p, parts in module.projection_parts().items()}
    whole = {"mixer.out_proj": (), **({"mlp.fc2": ()} if d_intermediate else {})}
    for projection, parts in {**cut, **whole}.items():
        change, gradient = moved[f"backbone.layers.1.{projection}.weight"], layer.get_submodule(projection).weight.grad
        parts = parts or (ProjectionPart("all", len(change)),)
        sizes = [part.rows for part in parts]
        for part, rows, source in zip(parts, change.split(sizes), gradient.split(sizes), strict=True):
            if not part.is_matrix:  # AdamW's first step has the gradient's signs
                torch.testing.assert_close(rows, -0.05 * source.sign(), rtol=1e-3, atol=0)
                continue
            level = torch.linalg.svdvals(rows) / (0.05 * 0.2 * max(rows.shape) ** 0.5)
            assert (level > 0.6).sum() >= (torch.linalg.svdvals(source) > 0.01 * source.norm()).sum() > 1
            assert level.max() < 1.2
            assert rows.square().mean().sqrt().item() == pytest.approx(0.2 * 0.05, rel=0.25)


@pytest.mark.parametrize("family", FAMILIES)
def test_muon_moves_a_fused_projection_as_separate_ones(family):
    model = small_lm(family, torch.float64)
    mixer, name = model.backbone.layers[0].mixer, "x_proj" if family == "Mamba1" else "in_proj"
    weight, parts = mixer.get_submodule(name).weight, mixer.projection_parts()[name]
    separate = [x.detach().clone() for x, part in zip(weight.split([p.rows for p in parts]), parts, strict=True)]
    muon = Muon([x for x, part in zip(separate, parts, strict=True) if part.is_matrix], lr=0.03, weight_decay=0.2)
    adam = torch.optim.AdamW(
        [x for x, part in zip(separate, parts, strict=True) if not part.is_matrix], 0.02, (0.9, 0.95), weight_decay=0.2
    )
    fused = Optimizer(model, OptimizerSection(kind="muon", lr=0.02, muon_lr=0.03, weight_decay=0.2))
    for seed in range(3):
        set_gradients(model, seed)
        for x, gradient in zip(separate, weight.grad.split([p.rows for p in parts]), strict=True):
            x.grad = gradient.clone()
        fused.step(1.0)
        muon.step()
        adam.step()
        fused.zero_grad()
    torch.testing.assert_close(weight.detach(), torch.cat(separate), rtol=1e-12, atol=1e-12)


def test_muon_is_for_matrices():
    with pytest.raises(ValueError, match=r"must be a matrix, got the shape \(3,\)"):
        Muon([torch.zeros(3)], lr=0.1)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (64, 64), (40, 90), (90, 40)])
def test_orthogonalized_keeps_singular_vectors_and_levels_singular_values(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    level = u.mT @ orthogonalize(matrix) @ v.mT
    torch.testing.assert_close(level, torch.diag(level.diagonal()), rtol=0, atol=1e-12)
    assert (level.diagonal()[s > 0.01 * s.max()] > 0.5).all()
    assert (level.diagonal() < 1.3).all()
    torch.testing.assert_close(orthogonalize(matrix.float()), orthogonalize(matrix).float(), rtol=0, atol=1e-4)


def test_orthogonalized_zeros_are_zeros():
    assert (orthogonalize(torch.zeros(3, 4)) == 0).all()


@KINDS
def test_a_restored_optimizer_continues_bit_for_bit(kind):
    config, states = OptimizerSection(kind=kind), []
    for interrupted in (False, True):
        model = small_lm("Mamba3")
        optimizer = Optimizer(model, config)
        for step in range(4):
            if interrupted and step == 2:
                saved = {key: x.clone() for key, x in optimizer.tensors().items()}
                optimizer = Optimizer(model, config)
                optimizer.restore(saved)
            set_gradients(model, step)
            optimizer.step(0.3)
            optimizer.zero_grad()
        states.append({**values(model), **optimizer.tensors()})
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


@pytest.mark.parametrize("broken", [torch.ones((), dtype=torch.float16), torch.ones(2), torch.tensor(3)])
def test_a_count_of_steps_of_another_kind_is_rejected(broken):
    model = small_lm("Mamba3")
    optimizer = Optimizer(model, OptimizerSection(kind="adamw"))
    set_gradients(model)
    optimizer.step(0.3)
    saved = {**optimizer.tensors(), "backbone.norm_f.weight.step": broken}
    with pytest.raises(ValueError, match=r"norm_f\.weight\.step must be torch\.float32 of shape \(\), got"):
        Optimizer(model, OptimizerSection(kind="adamw")).restore(saved)


def test_a_state_of_the_other_optimizer_is_rejected_by_name():
    model = small_lm("Mamba3")
    muon = Optimizer(model, OptimizerSection(kind="muon"))
    set_gradients(model)
    muon.step(0.3)
    whole = {name: x for name, x in muon.tensors().items() if "out_proj" in name}
    with pytest.raises(ValueError, match="was updated by Muon when this run began, and is now updated by AdamW"):
        Optimizer(model, OptimizerSection(kind="adamw")).restore(whole)


def test_gradients_are_clipped_by_their_common_norm():
    model = small_lm()
    set_gradients(model)
    before = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (
        clip_gradients(model, 0.0)
        == clip_gradients(model, 1e6)
        == pytest.approx(before.double().norm().item(), rel=FLOOR[torch.float32])
    )
    assert torch.equal(torch.cat([p.grad.flatten() for p in model.parameters()]), before)
    clip_gradients(model, 2.0)
    after = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert_near(after, 2 * before.double() / before.double().norm(), FLOOR[torch.float32])


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


def test_the_plan_shows_which_optimizer_moves_what():
    model = MambaLM(d_model=16, n_layer=2, vocab_size=32, ssm_cfg={"layer": "Mamba1", "d_state": 4})
    rows = {row.name: row for row in plan(model)}
    assert abs(sum(row.fraction for row in rows.values()) - 1) < 1e-9
    layer = "backbone.layers.0.mixer."
    assert rows[f"{layer}in_proj.weight[x]"][1:4] == ((32, 16), "Muon", True)
    assert rows[f"{layer}x_proj.weight[dt]"].owner == "AdamW"
    assert rows[f"{layer}dt_proj.weight"][1:4] == ((32, 1), "AdamW", True)
    assert rows["backbone.embedding.weight"][2:4] == ("AdamW", False)
    table = plan_table(list(rows.values()))
    assert "backbone.layers.*.mixer.in_proj.weight[x] 32 x 16 2 Muon yes" in " ".join(table.split())
    assert all(row.owner == "AdamW" for row in plan(model, OptimizerSection()))


def test_muon_leaves_the_ends_of_models_around_a_stack_to_adamw():
    """Their first and last projection are decayed like all others, but no hidden matrices."""
    stack = {"d_model": 16, "n_layer": 2, "ssm_cfg": {"layer": "Mamba2", "headdim": 8}}
    latent = {row.name: row for row in plan(LatentModel(input_size=3, output_size=2, stack=stack))}
    classifier = SequenceClassifier(
        vocab_size=9, output_size=4, bidirectional=True, pooling="class_token", stack={**stack, "merge": "linear"}
    )
    judged = {row.name: row for row in plan(classifier)}
    for row in (latent["input.weight"], latent["output.weight"], judged["head.weight"]):
        assert row[2:4] == ("AdamW", True)
    for name in ("embedding.weight", "class_token"):
        assert judged[name][2:4] == ("AdamW", False)
    for rows in (latent, judged):
        assert rows["backbone.layers.1.mixer.out_proj.weight"].owner == "Muon"
    assert judged["backbone.merges.0.weight"].owner == "Muon"


def test_parts_are_taken_from_muon_by_name():
    model = MambaLM(d_model=16, n_layer=2, vocab_size=32, ssm_cfg={"layer": "Mamba1", "d_state": 4})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    chosen = OptimizerSection(kind="muon", muon_exclude=("in_proj[z]", "out_proj"), lr=0.01, weight_decay=0.0)
    owners = {row.name: row.owner for row in plan(model, chosen)}
    layer = "backbone.layers.1.mixer."
    assert owners[f"{layer}dt_proj.weight"] == owners[f"{layer}in_proj.weight[x]"] == "Muon"
    assert owners[f"{layer}out_proj.weight"] == owners[f"{layer}in_proj.weight[z]"] == "AdamW"
    optimizer = Optimizer(model, chosen)
    ids = torch.randint(32, (2, 9))
    model(ids, labels=ids).loss.backward()
    optimizer.step(1.0)
    moved = model.backbone.layers[1].mixer.in_proj.weight - before[f"{layer}in_proj.weight"]
    assert_near(moved[32:].abs(), torch.full((32, 16), 0.01), 0.02)  # AdamW's first step has one size
    assert moved[:32].abs().std() > 1e-3
    with pytest.raises(ValueError, match=r"muon_exclude must name projections or their parts, as .*got 'q_proj'"):
        plan(model, OptimizerSection(kind="muon", muon_exclude=("q_proj",)))
