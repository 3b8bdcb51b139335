"""torch.compile of accelerated transformers models: whole graphs, and the numbers of eager."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from tests.integrations.models import ids, pair, run
from tests.support import assert_near

transformers.utils.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mamba2", "mamba", "falcon_mamba", "bamba", "falcon_h1"])
def test_a_forward_is_one_graph(name):
    _, fast = pair(name)
    x = ids(2, 9)
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    assert_near(compiled(x, use_cache=False).logits, fast(x, use_cache=False).logits, 1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mamba2", "mamba"])
def test_compiled_gradients(name):
    _, fast = pair(name)
    x, grads = ids(2, 9), []
    for model in (fast, torch.compile(fast, backend="aot_eager", fullgraph=True)):
        fast.zero_grad()
        model(x, labels=x, use_cache=False).loss.backward()
        grads.append({name: p.grad.clone() for name, p in fast.named_parameters()})
    for name, grad in grads[1].items():
        assert_near(grad, grads[0][name], 1e-5, name, least=1e-4)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_token_advances_the_cache():
    _, fast = pair("mamba2")
    x = ids(2, 9)
    expected, compiled = fast(x).logits, torch.compile(fast, backend="aot_eager")
    _, cache = run(fast, x[:, :7])
    for at in (7, 8):
        logits = compiled(x[:, at : at + 1], cache_params=cache, use_cache=True).logits
        assert_near(logits, expected[:, at : at + 1], 1e-5)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_packed_sequences_are_rejected_in_one_line(name):
    _, fast = pair(name)
    x = ids(1, 9)
    seq_idx = (torch.arange(9) >= 4).long()[None]
    with pytest.raises(Exception, match="packed sequences are not traced"):
        torch.compile(fast, backend="aot_eager")(x, use_cache=False, seq_idx=seq_idx)
    assert fast(x, seq_idx=seq_idx).logits.isfinite().all()
