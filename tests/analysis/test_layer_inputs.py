import pytest
import torch

from anymamba.analysis import dual_matrix, layers, recurrence, token_scores
from anymamba.models.loss import cross_entropy_sum
from tests.models.cases import FAMILIES, small_lm
from tests.support import FLOOR, assert_near


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_carry_the_inputs_from_which_the_model_follows(family):
    model = small_lm(family, torch.float64)
    ids = torch.randint(61, (2, 9))
    layer_inputs = layers(model, ids)
    residual = model.backbone.embed(ids)
    for layer, (block, x) in zip(model.backbone.layers, layer_inputs, strict=True):
        assert block is layer.mixer
        terms, matrix = recurrence(block, x), dual_matrix(block, x)
        assert matrix.shape[:2] == (2, terms.v.shape[3])
        residual = residual + block(x)
    logits = model.lm_head(model.backbone.norm_f(residual))
    assert_near(logits, model(ids).logits, FLOOR[torch.float64])


def test_all_hooks_are_removed():
    model = small_lm()
    layers(model, torch.randint(61, (1, 3)))
    with pytest.raises(ValueError, match="token ids"):
        layers(model, torch.full((1, 3), 1000))
    assert not any(layer.mixer._forward_pre_hooks for layer in model.backbone.layers)


def test_token_scores_are_those_of_the_loss_and_of_the_whole_distribution():
    model = small_lm(dtype=torch.float64)
    ids = torch.randint(61, (2, 8))
    scores, logits = token_scores(model, ids, likeliest=61), model(ids).logits[:, :-1, :61]
    nats = cross_entropy_sum(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert_near(-scores.logprob.sum(), nats, FLOOR[torch.float64])
    assert_near(scores.best.exp().sum(-1), torch.ones(2, 7, dtype=torch.float64), FLOOR[torch.float64])
    assert_near(-(scores.best.exp() * scores.best).sum(-1), scores.entropy, FLOOR[torch.float64])
    position = (scores.best_ids == ids[:, 1:, None]).int().argmax(-1)
    assert torch.equal(position, scores.rank)


def test_a_text_of_one_token_has_no_scores():
    model = small_lm()
    scores = token_scores(model, torch.tensor([[5]]))
    assert scores.logprob.shape == (1, 0)
    assert scores.best.shape == (1, 0, 5)
