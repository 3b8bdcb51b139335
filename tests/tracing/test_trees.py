"""Trees of tensors go through `torch.compile` and `torch.export` as what they are, with their verbs inside a graph."""

import pytest
import torch

from anymamba import LMCache
from tests.models.cases import FAMILIES, small_lm
from tests.support import FLOOR, assert_all_near, assert_near


@pytest.fixture(autouse=True)
def fresh_tracer():
    torch._dynamo.reset()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_compile_takes_a_step_and_the_verbs_around_it(family):
    model, ids = small_lm(family), torch.randint(61, (3, 7))
    cache = model(ids).cache

    def step(ids, cache):
        branched = LMCache.cat([cache.rows([1, 1]), cache.detach().rows(torch.tensor([0]))])
        logits, new = model.step(ids, branched)
        return logits, new, new.clone().to(torch.bfloat16)

    logits, new, rounded = torch.compile(step, fullgraph=True, backend="aot_eager")(ids[:, 0], cache)
    expected, new_eager, rounded_eager = step(ids[:, 0], cache)
    assert_near(logits, expected, FLOOR[torch.float32])
    assert isinstance(new, LMCache)
    assert_all_near(new.tensors(), new_eager.tensors(), FLOOR[torch.float32])
    assert [x.dtype for x in rounded.leaves()] == [x.dtype for x in rounded_eager.leaves()]


class Continued(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, cache):
        out = self.model(ids, cache)
        return out.logits, out.cache


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_export_takes_a_model_with_its_cache(family):
    model, ids = Continued(small_lm(family).eval()), torch.randint(61, (2, 7))
    _, cache = model(ids, None)
    logits, new = torch.export.export(model, (ids, cache)).module()(ids, cache)
    expected, new_eager = model(ids, cache)
    assert_near(logits, expected, FLOOR[torch.float32])
    assert type(new) is LMCache
    assert_all_near(new.tensors(), new_eager.tensors(), FLOOR[torch.float32])
