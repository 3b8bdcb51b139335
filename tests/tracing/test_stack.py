"""`torch.compile` and `torch.export` take stacks whole."""

import torch

from anymamba import Stack
from tests.support import FLOOR, assert_near


def test_a_stack_is_compiled_and_exported_for_any_length():
    block = {"layer": "Mamba2", "d_state": 8, "headdim": 8}
    stack = Stack(d_model=8, n_layer=1, ssm_cfg=block, n_virtual=2, streams=2, gate_bias=0.0)
    x, longer = torch.randn(2, 6, 8), torch.randn(2, 11, 8)
    torch._dynamo.reset()
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    assert_near(compiled(x), stack(x), FLOOR[torch.float32])
    rows = Stack(d_model=8, n_layer=1, ssm_cfg=block, class_tokens=["start", "end"], layer_class_tokens=[["middle"]])
    assert_near(torch.compile(rows, fullgraph=True, backend="aot_eager")(x), rows(x), FLOOR[torch.float32])
    exported = torch.export.export(rows, (x,))
    assert_near(exported.module()(x), rows(x), FLOOR[torch.float32])
    exported = torch.export.export(stack, (x,), dynamic_shapes=({1: torch.export.Dim("t", min=2, max=64)},))
    assert_near(exported.module()(longer), stack(longer), FLOOR[torch.float32])
