"""Every block and language model runs on a device other than the CPU, without making the host wait for it.

Run in a process of its own by `test_simulated_device.py`. Packed sequences are exempt, because portable code reads
their boundaries on the host, and so is attention, whose cache has its lengths there.
"""

import dataclasses
import itertools
from contextlib import nullcontext

import pytest
import torch
from benchmarks.device import OnDevice
from benchmarks.gpu import CASES, draw_inputs
from benchmarks.harness import time_case
from benchmarks.mamba2 import TINY

from anymamba import SsdPath
from anymamba.scan import scan, selective_scan
from tests.blocks.families import FEW_WITH_SCAN, WITH_SCAN, make_block, random_cache, tensors_of, unroll
from tests.devices.simulated_device import DEVICE, forbid_synchronization
from tests.models.cases import FAMILIES, small_lm
from tests.models.test_new_family import Leaky
from tests.scan.cases import make_inputs
from tests.support import FLOOR, assert_all_near, assert_near

FLOAT64 = FLOOR[torch.float64]


def on_device(x):
    return x.detach().to(DEVICE).requires_grad_(x.requires_grad)


@pytest.mark.parametrize(
    "synchronize",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.cpu(),
        lambda x: torch.zeros(3).to(x.device),
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: x + torch.ones(4),
    ],
)
def test_the_device_rejects_what_makes_the_host_wait(synchronize):
    x = torch.ones(4).to(DEVICE)
    with forbid_synchronization(), pytest.raises(RuntimeError):
        synchronize(x)


def run_with_gradients(block, x, cache, call):
    """Return outputs, cache and all gradients, computed without synchronization, as tensors of the CPU."""
    x = x.detach().requires_grad_()
    with forbid_synchronization():
        y, new = call(block, x, cache)
    outputs = {"y": y, **tensors_of(new)}
    if "rotation" in outputs and outputs["rotation"].ndim == 3:  # an angle is kept modulo a full circle
        angle = outputs.pop("rotation")
        outputs |= {"cos": angle.cos(), "sin": angle.sin()}
    leaves = {"x": x, **dict(block.named_parameters())}
    leaves |= {f"cache.{name}": leaf for name, leaf in tensors_of(cache).items()}
    generator = torch.Generator().manual_seed(5)
    cotangents = [torch.randn(o.shape, generator=generator, dtype=o.dtype).to(o.device) for o in outputs.values()]
    with forbid_synchronization():
        grads = torch.autograd.grad([*outputs.values()], [*leaves.values()], cotangents, allow_unused=True)
    named = outputs | {f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    return {name: getattr(tensor, "on_cpu", tensor).detach() for name, tensor in named.items()}


@pytest.mark.parametrize(
    ("options", "run"),
    [*((name, "prefill") for name in WITH_SCAN), *itertools.product(FEW_WITH_SCAN, ["step", "padded"])],
)
def test_a_block_computes_the_same_without_making_the_host_wait(options, run):
    block = make_block(options)
    x, cache = torch.randn(2, 11, block.d_model, dtype=torch.float64), random_cache(block, 2)
    lengths = {device.type: torch.tensor([11, 4]).to(device) for device in (x.device, DEVICE)}

    def call(block, x, cache):
        if run == "step":
            return unroll(block, x[:, :4], cache)
        return block.prefill(x, cache, mask=lengths[x.device.type] if run == "padded" else None)

    expected = run_with_gradients(block, x, cache, call)
    device_cache = cache._replace(**{name: on_device(leaf) for name, leaf in tensors_of(cache).items()})
    actual = run_with_gradients(block.to(DEVICE), on_device(x), device_cache, call)
    assert_all_near(actual, expected, FLOAT64)


def test_a_new_family_needs_no_more_than_its_inputs_device():
    block, x = Leaky(8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    lengths = torch.tensor([5, 3])
    expected = block.prefill(x, mask=lengths)[0]
    actual = block.to(DEVICE).prefill(x.to(DEVICE), mask=lengths.to(DEVICE))[0]
    assert_near(actual.on_cpu, expected, FLOAT64)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_launches_of_a_scan_do_not_grow_with_the_chunks(direction):
    def count_launches(t):
        inputs = {name: x.to(DEVICE).requires_grad_() for name, x in make_inputs(t=t, r=2).items()}
        with forbid_synchronization() as launches:
            y, state = scan(**inputs, path=SsdPath.serial_recalculated(4))
            if direction == "backward":
                torch.autograd.grad([y.sum() + state.sum()], [*inputs.values()])
        return launches.total()

    assert count_launches(200) == count_launches(12)


def test_the_launches_of_a_selective_scan_grow_with_the_root_of_its_length():
    def count_launches(t):
        x = torch.randn(1, t, 3).to(DEVICE).requires_grad_()
        b = torch.randn(1, t, 2).to(DEVICE)
        with forbid_synchronization() as launches:
            y, _ = selective_scan(x, x, -b[0, 0].abs().expand(3, 2), b, b)
            torch.autograd.grad(y.sum(), x)
        return launches.total()

    assert count_launches(1600) < 5 * count_launches(100)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("logits", ["all", "none"])
def test_a_language_model_computes_the_same_without_making_the_host_wait(family, logits):
    model = small_lm(family, torch.float64)
    ids, next_ids = torch.randint(61, (2, 9)), torch.randint(61, (2, 3))
    labels = ids.roll(-1, 1).masked_fill(torch.arange(9) % 4 == 3, -100)

    def call(model, context, ids, labels, next_ids, mask):
        model.zero_grad()
        with context():
            output = model(ids, labels=labels, logits=logits)
            output.loss.backward()
        grads = {name: x.grad.clone() for name, x in model.named_parameters()}
        with context(), torch.no_grad():
            prefilled = model(ids, mask=mask)
            cache, steps = prefilled.cache, [prefilled.logits]
            for token in next_ids.unbind(1):
                logits_bv, cache = model.step(token, cache)
                steps.append(logits_bv)
        return grads | {"loss": output.loss.detach()} | {f"logits {i}": x for i, x in enumerate(steps)}

    mask = torch.arange(9) < torch.tensor([[9], [5]])
    expected = call(model, nullcontext, ids, labels, next_ids, mask)
    on_device = (x.to(DEVICE) for x in (ids, labels, next_ids, mask))
    model.to(DEVICE).tie_weights()  # torch shares a moved parameter of a plain tensor only
    actual = call(model, forbid_synchronization, *on_device)
    assert_all_near({name: x.on_cpu for name, x in actual.items()}, expected, FLOAT64)


@pytest.mark.parametrize("which", range(3))
def test_a_benchmark_is_set_up_on_the_device_with_the_numbers_of_the_cpu(which):
    with OnDevice(DEVICE):
        actual = draw_inputs(TINY)[which]
    for name, expected in draw_inputs(TINY)[which].items():
        assert actual[name].device == DEVICE
        assert torch.equal(actual[name].on_cpu, expected)


def test_a_case_of_the_benchmarks_runs_on_the_device():
    case = next(case for case in CASES if case.name == "gpu/ssd/forward+backward")
    tiny = [dataclasses.replace(x, setup=x.tiny) for x in case.contenders if not x.optional]
    result = time_case(dataclasses.replace(case, contenders=tuple(tiny)), 1, lambda _: None, device=DEVICE)
    assert [timing.contender for timing in result.timings] == ["anymamba", "anymamba (portable)"]
