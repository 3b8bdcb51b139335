"""A graph names computations: it runs with kernels and without, and inside `portable()` it needs nothing of ours."""

from contextlib import nullcontext

import pytest
import torch

from anymamba import Mamba1, Mamba2, Mamba3, MambaLM, SsdPath, portable
from anymamba.core.registry import kernels_off
from tests.support import FLOOR, assert_near, in_another_process

BLOCKS = {
    "mamba1": lambda: Mamba1(16, d_state=8),
    "mamba2": lambda: Mamba2(16, d_state=8, headdim=8, ngroups=2),
    "mamba3": lambda: Mamba3(16, d_state=8, headdim=8, ngroups=2),
    "mamba3 mimo": lambda: Mamba3(16, d_state=8, headdim=8, is_mimo=True, mimo_rank=2),
}
LM = {"d_model": 16, "n_layer": 2, "vocab_size": 30}
TIME = {"t": torch.export.Dim("t", min=2, max=4096)}


class OnPath(torch.nn.Module):
    """A block on one path."""

    def __init__(self, block, path):
        super().__init__()
        self.block = block
        self.path = path

    def forward(self, x):
        return self.block(x, path=self.path)


class Logits(torch.nn.Module):
    """A language model as one function of its tokens."""

    def __init__(self, model, path):
        super().__init__()
        self.model = model
        self.path = path

    def forward(self, ids):
        return self.model(ids, path=self.path).logits


@pytest.fixture(autouse=True)
def fresh_tracer():
    torch._dynamo.reset()


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("made_with_kernels", [True, False])
def test_a_graph_runs_with_kernels_and_without_wherever_it_was_made(family, made_with_kernels):
    torch.manual_seed(0)
    block = BLOCKS[family]().eval()

    def export():
        return torch.export.export(block, (torch.randn(2, 19, 16),), dynamic_shapes={"x": {1: TIME["t"]}})

    if made_with_kernels:
        program = export()
    else:
        with kernels_off():
            program = export()
    targets = {str(node.target) for node in program.graph.nodes if "anymamba" in str(node.target)}
    assert targets
    assert not any("fused" in target for target in targets)
    for length in (2, 33):
        x = torch.randn(2, length, 16)
        with torch.no_grad():
            expected = block(x)
            assert_near(program.module()(x), expected, FLOOR[torch.float32])
            with kernels_off():
                assert_near(program.module()(x), expected, FLOOR[torch.float32])


def test_a_saved_graph_runs_in_a_process_without_kernels(tmp_path):
    torch.manual_seed(0)
    block, x = BLOCKS["mamba3"]().eval(), torch.randn(2, 19, 16)
    torch.export.save(torch.export.export(block, (x,)), tmp_path / "block.pt2")
    torch.save({"x": x, "y": block(x).detach()}, tmp_path / "values.pt")
    code = f"""
import warnings
import torch, anymamba
from anymamba.kernels.cpu.bindings import LIBRARY
warnings.filterwarnings("ignore", "The given buffer is not writable")  # torch 2.10 reading its own file
saved = torch.load({str(tmp_path / "values.pt")!r})
y = torch.export.load({str(tmp_path / "block.pt2")!r}).module()(saved["x"]).detach()
print(LIBRARY.handle, float((y - saved["y"]).abs().max()) < 1e-5)
"""
    assert in_another_process(code, ANYMAMBA_KERNELS="off") == "None True"


def onnx_outputs(module, example, dynamic, inputs, tmp_path):
    """Return what onnxruntime computes from an exported module, for several inputs."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = tmp_path / "model.onnx"
    with portable(), torch.no_grad():
        torch.onnx.export(module, (example,), file, dynamo=True, dynamic_shapes=dynamic, verbose=False)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return [torch.from_numpy(session.run(None, {name: x.numpy()})[0]) for x in inputs]


@pytest.mark.filterwarnings("ignore")  # of the exporter itself
@pytest.mark.parametrize("family", ["mamba2", "mamba3", "mamba3 mimo"])
def test_onnx_computes_a_block_of_any_length(family, tmp_path):
    torch.manual_seed(0)
    block = OnPath(BLOCKS[family]().eval(), SsdPath.minimal(8))
    inputs = [torch.randn(2, length, 16) for length in (3, 8, 19)]
    for x, y in zip(inputs, onnx_outputs(block, inputs[2], ({1: TIME["t"]},), inputs, tmp_path), strict=True):
        assert_near(y, block(x), 4 * FLOOR[torch.float32])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_portable", [True, False])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_the_former_exporter_to_onnx_says_what_to_call_instead(is_portable, is_wrapped, tmp_path):
    block, x = BLOCKS["mamba2"]().eval(), torch.randn(1, 6, 16)
    module = OnPath(block, SsdPath()) if is_wrapped else block
    with (
        portable() if is_portable else nullcontext(),
        pytest.raises(RuntimeError, match=r"^torch.onnx.export\(dynamo=False\) is not supported: pass dynamo=True, .*"),
    ):
        torch.onnx.export(module, (x,), tmp_path / "model.onnx", dynamo=False, verbose=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
def test_a_plain_export_to_onnx_names_the_context_that_it_needs(dynamo, tmp_path):
    pytest.importorskip("onnxscript")
    block, x = OnPath(BLOCKS["mamba2"]().eval(), SsdPath()), torch.randn(1, 6, 16)
    with pytest.raises(Exception, match=r"anymamba\.portable\(\)"):
        torch.onnx.export(block, (x,), tmp_path / "model.onnx", dynamo=dynamo, verbose=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layer", "path"),
    [("Mamba1", SsdPath.recurrent()), ("Mamba2", SsdPath.serial(8)), ("Mamba2", None), ("Mamba3", SsdPath.minimal(8))],
    ids=["mamba1 recurrent", "mamba2 serial", "mamba2", "mamba3"],
)
def test_onnx_computes_a_language_model(layer, path, tmp_path):
    """`minimal`, the default inside `portable()`, keeps a dynamic length; `serial` and `recurrent` fix it."""
    torch.manual_seed(0)
    sizes = {"d_state": 8} if layer == "Mamba1" else {"d_state": 8, "headdim": 8}
    model = Logits(MambaLM(**LM, ssm_cfg={"layer": layer, **sizes}).eval(), path)
    is_fixed = path is not None and path.algorithm != "minimal"
    inputs = [torch.randint(30, (2, length)) for length in ((9,) if is_fixed else (2, 9, 20))]
    dynamic = None if is_fixed else ({1: TIME["t"]},)
    for ids, y in zip(inputs, onnx_outputs(model, inputs[-1], dynamic, inputs, tmp_path), strict=True):
        assert_near(y, model(ids), 4 * FLOOR[torch.float32])
