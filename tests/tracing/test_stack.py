"""`torch.compile` and `torch.export` take stacks, and models around them, whole."""

import pytest
import torch

from anymamba import BidirectionalStack, LatentModel, MaskedLM, SequenceClassifier, Stack
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


BLOCK = {"layer": "Mamba2", "d_state": 8, "headdim": 8}
STACK = {"d_model": 8, "n_layer": 2, "ssm_cfg": BLOCK}
MODELS = {
    "both directions": lambda: BidirectionalStack(**STACK, merge="linear"),
    "class tokens in both directions": lambda: BidirectionalStack(**STACK, class_tokens=["middle", "end"]),
    "latent": lambda: LatentModel(input_size=8, output_size=2, stack=STACK),
    "classifier, mean": lambda: SequenceClassifier(vocab_size=9, output_size=3, bidirectional=True, stack=STACK),
    "classifier, class token": lambda: SequenceClassifier(vocab_size=9, pooling="class_token", stack=STACK),
    "masked": lambda: MaskedLM(vocab_size=9, bidirectional=True, stack=STACK),
}


def values(output):
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize("kind", MODELS)
def test_models_around_stacks_are_compiled_and_exported(kind):
    """Whole and padded; a mask is data, and its values must not become part of the graph."""
    model = MODELS[kind]().eval()
    x, longer = torch.randn(2, 6, 8), torch.randn(2, 11, 8)
    if hasattr(model, "embedding"):
        x, longer = torch.randint(9, (2, 6)), torch.randint(9, (2, 11))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_near(values(compiled(x)), values(model(x)), FLOOR[torch.float32])
    if "class tokens" in kind:  # how many there are in a row depends on its length
        return
    for lengths in ([6, 3], [2, 6]):
        mask = torch.tensor(lengths)
        assert_near(values(compiled(x, mask=mask)), values(model(x, mask=mask)), FLOOR[torch.float32])
    exported = torch.export.export(model, (x,), dynamic_shapes=({1: torch.export.Dim("t", min=2, max=64)},))
    assert_near(values(exported.module()(longer)), values(model(longer)), FLOOR[torch.float32])
