"""`torch.compile` and `torch.export` take the scan and the blocks whole."""

import itertools
import shutil

import pytest
import torch

from anymamba import Mamba1, Mamba2, Mamba3, SsdPath
from anymamba.scan import scan
from tests.scan.cases import ALGORITHMS, BY_HAND, make_inputs
from tests.support import FLOOR, assert_near


@pytest.fixture(autouse=True)
def fresh_tracer():
    torch._dynamo.reset()


def gradients(function, inputs):
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    y, final_state = function(**leaves)
    (y.sum() + final_state.square().sum()).backward()
    return {"y": y, "final_state": final_state, **{name: x.grad for name, x in leaves.items()}}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_compile_takes_the_whole_scan(algorithm):
    inputs = make_inputs(t=11, r=2, dtype=torch.float32)

    def run(**kw):
        return scan(**kw, path=SsdPath(algorithm, 4))

    expected = gradients(run, inputs)
    actual = gradients(torch.compile(run, fullgraph=True, backend="aot_eager"), inputs)
    for name in expected:
        assert_near(actual[name], expected[name], FLOOR[torch.float32], name)


BLOCKS = {
    "mamba1": lambda: Mamba1(d_model=16, d_state=8),
    "mamba2": lambda: Mamba2(d_model=16, d_state=8, headdim=8, ngroups=2),
    "mamba3": lambda: Mamba3(d_model=16, d_state=8, headdim=8, ngroups=2),
    "mamba3 mimo": lambda: Mamba3(d_model=16, d_state=8, headdim=8, is_mimo=True, mimo_rank=2),
    "mamba3 quaternion": lambda: Mamba3(d_model=16, d_state=8, headdim=8, rotation="quaternion"),
}


class OnPath(torch.nn.Module):
    """A block on one path, as a module that can be exported."""

    def __init__(self, block, path):
        super().__init__()
        self.block = block
        self.path = path

    def forward(self, x):
        return self.block.prefill(x, path=self.path)


@pytest.mark.parametrize(
    ("family", "algorithm"),
    [*(("mamba2", a) for a in ALGORITHMS), *((f, "serial_recalculated") for f in BLOCKS if f != "mamba2")],
)
def test_export_takes_a_block_with_any_sequence_length(family, algorithm):
    block = BLOCKS[family]().eval()
    module = OnPath(block, SsdPath(algorithm, 8))
    t = torch.export.Dim("t", min=2, max=4096)
    program = torch.export.export(module, (torch.randn(2, 19, 16),), dynamic_shapes={"x": {1: t}})
    for length in (3, 8, 19, 50):
        x = torch.randn(2, length, 16)
        with torch.no_grad():
            y, cache = program.module()(x)
            y_eager, cache_eager = module(x)
        assert_near(y, y_eager, FLOOR[torch.float32])
        assert type(cache) is type(cache_eager)
        for actual, expected in zip(cache, cache_eager, strict=True):
            if isinstance(actual, torch.Tensor):
                assert_near(actual, expected, FLOOR[torch.float32])


@pytest.mark.parametrize(
    ("family", "algorithm"),
    [("mamba2", "minimal"), ("mamba2", "serial"), *itertools.product(BLOCKS, BY_HAND)],
)
def test_compile_takes_a_block_with_any_sequence_length(family, algorithm):
    block = BLOCKS[family]()
    compiled = torch.compile(OnPath(block, SsdPath(algorithm, 8)), fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 19, 34):
        x = torch.randn(2, length, 16)
        y, _ = compiled(x)
        y.sum().backward()
        grads = {name: p.grad.clone() for name, p in block.named_parameters()}
        block.zero_grad()
        y_eager, _ = block.prefill(x)
        y_eager.sum().backward()
        assert_near(y, y_eager, FLOOR[torch.float32])
        for name, p in block.named_parameters():
            assert_near(grads[name], p.grad, FLOOR[torch.float32], name)
        block.zero_grad()


@pytest.mark.parametrize("family", BLOCKS)
def test_compile_takes_step_packed_and_padded_input(family):
    block = BLOCKS[family]()
    x = torch.randn(1, 12, 16)
    cu_seqlens = torch.tensor([0, 5, 12])

    def packed(x):
        return block.prefill(x, cu_seqlens=cu_seqlens)

    def padded(x, mask):
        return block.prefill(x, mask=mask)

    y, cache = torch.compile(packed, fullgraph=True, backend="aot_eager")(x)
    assert_near(y, packed(x)[0], FLOOR[torch.float32])
    mask = torch.arange(12).unsqueeze(0) > 3
    assert_near(
        torch.compile(padded, fullgraph=True, backend="aot_eager")(x, mask)[0], padded(x, mask)[0], FLOOR[torch.float32]
    )
    step = torch.compile(block.step, fullgraph=True, backend="aot_eager")
    cache = cache.detach()
    y_step, _ = step(x[:, 0].expand(2, -1), cache)
    assert_near(y_step, block.step(x[:, 0].expand(2, -1), cache)[0], FLOOR[torch.float32])


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's default backend needs a C++ compiler")
def test_the_default_backend_compiles_a_block():
    block = Mamba2(d_model=16, d_state=8, headdim=8)
    x = torch.randn(2, 20, 16)
    y = torch.compile(block, fullgraph=True)(x)
    assert_near(y, block(x), FLOOR[torch.float32])
