import pytest
import torch

from anymamba.scan import SsdPath, segments
from tests.scan.cases import NAMES, make_inputs, run
from tests.support import FLOOR, assert_all_near


@pytest.mark.parametrize("max_elements", [segments._MAX_ELEMENTS, 1], ids=["one segment", "a chunk per segment"])
@pytest.mark.parametrize("max_chunks", [64, 3])
@pytest.mark.parametrize("bounds", [None, [0, 1, 3, 4, 29]], ids=["batch", "packed"])
@pytest.mark.parametrize(("r", "g"), [(1, 2), (3, 1), (2, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_segments_equal_the_recurrence(max_elements, max_chunks, bounds, r, g, dtype, monkeypatch):
    monkeypatch.setattr(segments, "_MAX_ELEMENTS", max_elements)
    monkeypatch.setattr(segments, "_MAX_CHUNKS", max_chunks)
    inputs = make_inputs(t=29, r=r, g=g, bounds=bounds, dtype=dtype, decay=3.0)
    oracle = run({name: x.double() for name, x in inputs.items()}, SsdPath.recurrent(), bounds)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    arguments = (*(inputs[name] for name in NAMES), cu_seqlens, 4, "serial_recalculated")
    y, final_state = segments.forward(*arguments)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (y, final_state)]
    grads = segments.backward(*cotangents, *arguments)
    named = {f"grad_{name}": grad for name, grad in zip(NAMES, grads, strict=True)}
    assert_all_near({"y": y, "final_state": final_state, **named}, oracle, 2 * FLOOR[dtype])


def test_segments_keep_the_digits_after_a_reset():
    inputs = make_inputs(t=40, dtype=torch.float32)
    inputs["log_decay"][:, 3] = -1e8
    inputs["log_decay"][:, 20, 0] = -torch.inf
    oracle = run({name: x.double() for name, x in inputs.items()}, SsdPath.recurrent())
    y, final_state = segments.forward(*(inputs[name] for name in NAMES), None, 4, "serial_recalculated")
    assert_all_near({"y": y, "final_state": final_state}, {n: oracle[n] for n in ("y", "final_state")}, FLOOR[y.dtype])
