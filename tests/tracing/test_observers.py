"""Who follows the operations of a block sees all of them, or is told that it cannot."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from anymamba import Mamba1, Mamba2, Mamba3
from tests.support import FLOOR, assert_near

BLOCKS = {
    "mamba1": lambda: Mamba1(d_model=16, d_state=8),
    "mamba2": lambda: Mamba2(d_model=16, d_state=8, headdim=8),
    "mamba3": lambda: Mamba3(d_model=16, d_state=8, headdim=8),
    "mamba3 mimo": lambda: Mamba3(d_model=16, d_state=8, headdim=8, is_mimo=True, mimo_rank=2),
}


@pytest.fixture(params=BLOCKS)
def block(request):
    with torch.no_grad():
        yield BLOCKS[request.param]()


@pytest.mark.filterwarnings("ignore")  # of a tracer that sees checks of shapes, and calls itself deprecated
def test_a_trace_computes_what_the_block_does(block):
    traced = torch.jit.trace(block, torch.randn(1, 12, 16), check_trace=False)
    x = torch.randn(1, 12, 16)
    assert_near(traced(x), block(x), FLOOR[torch.float32])


@pytest.mark.parametrize("method", ["prefill", "step"])
def test_a_graph_computes_what_the_block_does(block, method):
    x, other = torch.randn(2, 1, 5, 16)
    cache = block.init_cache(1)

    def run(x):
        if method == "step":
            return block.step(x[:, 0], cache)[0]
        return block.prefill(x, cache)[0]

    assert_near(make_fx(run)(x)(other), run(other), FLOOR[torch.float32])


@pytest.mark.filterwarnings("ignore")  # torch's own rules are written in what it calls deprecated
@pytest.mark.parametrize("method", ["prefill", "step"])
def test_forward_mode_is_rejected_or_right(block, method):
    """A tangent is never lost in silence."""
    x, direction = torch.randn(2, 1, 5, 16)

    def run(x):
        return block(x) if method == "prefill" else block.step(x[:, 0], block.init_cache(1))[0]

    with forward_ad.dual_level():
        try:
            tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(x, direction))).tangent
        except NotImplementedError as error:
            assert "has no forward-mode derivative" in str(error)  # noqa: PT017
            return
    assert_near(tangent, (run(x + 1e-2 * direction) - run(x - 1e-2 * direction)) / 2e-2, 0.02)
