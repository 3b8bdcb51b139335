"""One token in one call: the same numbers as the modules give."""

import copy
import gc
import pickle
import re
import weakref

import pytest
import torch
from torch import nn

from anymamba import Attention, Mamba1, Mamba2, Mamba3, check_finite
from anymamba.blocks.layers import CausalConv
from anymamba.core.registry import kernels_off
from anymamba.kernels.compiled_step import CompiledStep, StepSource
from anymamba.kernels.cpu import bindings
from anymamba.kernels.cpu.step_compiler import MAX_ROWS, CpuStep
from anymamba.kernels.step_description import OUTPUT
from tests.blocks.families import OPTIONS, make_block, random_cache, without_padding
from tests.support import FLOOR, assert_near, in_another_process

pytestmark = pytest.mark.skipif(bindings.LIBRARY.handle is None, reason=bindings.LIBRARY.reason)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NOT_COVERED = ("mamba3 fixed rotation", "attention convolution and MLP")
# Large enough for threads, with awkward sizes.
LARGE = {
    "mamba1": (Mamba1, {"d_model": 102, "d_state": 21, "dt_rank": 5}),
    "mamba2": (Mamba2, {"d_model": 102, "d_state": 21, "headdim": 17, "ngroups": 3}),
    "mamba3": (Mamba3, {"d_model": 102, "d_state": 22, "headdim": 17, "ngroups": 3}),
    "mamba3 quaternion": (Mamba3, {"d_model": 102, "d_state": 24, "headdim": 17, "rotation": "quaternion"}),
    "attention": (Attention, {"d_model": 102, "num_heads": 6, "num_heads_kv": 2, "head_dim": 17, "rotary_emb_dim": 10}),
    "mamba3 mimo": (Mamba3, {"d_model": 102, "d_state": 22, "headdim": 17, "is_mimo": True, "mimo_rank": 3}),
}


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def compile_phases(describe, dtype, width, module=None):
    """Compile a step, which must be covered."""
    step = CompiledStep(module or nn.Identity(), StepSource(describe, width, dtype, dtype))
    assert step.executable is not None, step.reason
    return step


def step_of(block):
    """Compile the step of a block as it is now; its reason says why there is none."""
    dtype = block.in_proj.weight.dtype
    describe = lambda builder: block.describe_step(builder, 0, to=OUTPUT)  # noqa: E731
    return CompiledStep(block, StepSource(describe, block.d_model, dtype, dtype))


def compiled_steps(block, tokens, cache=None):
    """Return the outputs of a few compiled steps, and the last cache."""
    step, cache, outputs = step_of(block), cache or block.init_cache(tokens.shape[1]), []
    for x in tokens:
        y, tensors = step.run(x, list(cache))
        cache = type(cache)(*tensors)
        outputs.append(y)
    return torch.stack(outputs), cache


def module_steps(block, tokens, cache=None):
    """Return the same from the portable implementations of its operators."""
    outputs = []
    with kernels_off():
        for x in tokens:
            y, cache = block.step(x, cache)
            outputs.append(y)
    return torch.stack(outputs), cache


def compare(actual, expected, dtype):
    """Compare outputs and caches; angles are compared as points on the circle."""
    assert_near(actual[0], expected[0], FLOOR[dtype], "y")
    caches = without_padding(actual[1]), without_padding(expected[1])
    for name, x, reference in zip(actual[1]._fields, *caches, strict=True):
        if name == "rotation" and x.ndim == 3:
            difference = torch.polar(torch.ones_like(x), x - reference)
            assert_near(
                torch.view_as_real(difference), torch.view_as_real(torch.ones_like(difference)), FLOOR[dtype], name
            )
        else:
            assert_near(x, reference, FLOOR[dtype], name)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [name for name in OPTIONS if name not in NOT_COVERED])
def test_a_compiled_steps_as_the_modules_do(options, dtype):
    block = make_block(options, dtype)
    tokens, cache = torch.randn(5, 3, 16, dtype=dtype), random_cache(block, 3).detach()
    compare(compiled_steps(block, tokens, cache), module_steps(block, tokens, cache), dtype)
    compare(compiled_steps(block, tokens), module_steps(block, tokens), dtype)


def make_large(name, dtype):
    family, fields = LARGE[name]
    torch.manual_seed(3)
    return family(**fields, dtype=dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_neither_threads_nor_the_batch_move_a_bit(name, dtype, threads):
    block = make_large(name, dtype)
    tokens = torch.randn(2, 7, 102, dtype=dtype)
    threads(2)
    y, cache = compiled_steps(block, tokens)
    threads(1)
    for rows in (slice(0, 1), slice(3, 4), slice(1, 4), slice(2, 7)):
        y_alone, cache_alone = compiled_steps(block, tokens[:, rows])
        assert torch.equal(y_alone, y[:, rows])
        for alone, together in zip(cache_alone, cache, strict=True):
            assert torch.equal(alone, together[rows])


@torch.no_grad()
def test_a_compiled_step_runs_up_to_its_rows_and_leaves_the_rest_to_others():
    block = make_block("mamba3 mimo 2", torch.float64)
    step = step_of(block)
    tokens = torch.randn(1, MAX_ROWS, 16, dtype=torch.float64)
    compare(compiled_steps(block, tokens), module_steps(block, tokens), torch.float64)
    for rows in (0, MAX_ROWS + 1):
        assert step.executable.run(torch.zeros(rows, 16, dtype=torch.float64), list(block.init_cache(rows))) is None
    x, cache = tokens[0, :2], block.init_cache(2)
    assert step.run(x.float(), list(cache)) is None
    assert step.run(x[:, :8], list(cache)) is None
    assert step.run(x, list(block.init_cache(3))) is None
    assert step.run(x, list(cache.to(torch.float32))) is None


@torch.no_grad()
def test_rows_of_a_cache_in_any_layout():
    block = make_block("mamba3 mimo 2", torch.float64)
    step = step_of(block)
    x, cache = torch.randn(4, 16, dtype=torch.float64), random_cache(block, 4).detach()
    y, _ = step.run(x, list(cache))
    strided = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in cache]
    assert not strided[0].is_contiguous()
    assert torch.equal(step.run(x, strided)[0], y)
    assert torch.equal(step.run(x[::2], list(cache.rows(slice(None, None, 2))))[0], y[::2])
    assert torch.equal(step.run(x.t().contiguous().t(), list(cache))[0], y)
    negated = [torch._neg_view(-t) for t in cache]
    assert torch.equal(step.run(x, negated)[0], y)


class Doubled(nn.Linear):
    """A layer that has something to add, as an adapter has."""

    def forward(self, x):
        return 2 * super().forward(x)


class Quiet(Mamba2):
    """A block with its own idea of a step size."""

    def _dt(self, dt, lengths):
        return super()._dt(dt, lengths) / 2


def exchange_module(block):
    block.in_proj.__class__ = Doubled


def hook(block):
    block.in_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


def patch_forward(block):
    block.out_proj.forward = lambda x: x


def transpose(block):
    block.in_proj.weight.data = block.in_proj.weight.data.t().contiguous().t()


def negate_lazily(block):
    block.D = nn.Parameter(torch._neg_view(block.D.data))


def remove(block):
    block.D = None


def free(block):
    block.D.untyped_storage().resize_(0)


def cast(block):
    block.D.data = block.D.data.to(torch.int8)


CHANGES = [exchange_module, hook, patch_forward, transpose, negate_lazily, remove, free]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("family", [Mamba2, Mamba3])
def test_what_only_the_modules_know_how_to_run_is_rejected_with_a_reason(family, change):
    block = family(16, d_state=8, headdim=8)
    assert not step_of(block).reason
    change(block)
    assert re.search("in_proj|out_proj|D|weight", step_of(block).reason)


def test_a_subclass_and_a_family_without_kernels_are_rejected():
    assert "Quiet, not a Mamba2" in step_of(Quiet(16, d_state=8, headdim=8)).reason
    step = step_of(make_block("mamba3 fixed rotation"))
    assert "fixed rotation" in step.reason
    assert step.run(torch.zeros(1, 16), []) is None


def replace_parameter(block):
    block.D = nn.Parameter(block.D.detach() + 1)


def replace_module(block):
    block.out_proj = nn.Linear(block.d_inner, block.d_model, bias=False)


def move_parameter(block):
    block.in_proj.weight.data = block.in_proj.weight.data.flip(0).clone()


def round_and_widen(block):
    """Change the dtype and back, so that the parameters may be at the same addresses as before."""
    block.to(torch.float16).to(torch.float32)


def change_epsilon(block):
    block.norm.eps = 0.5


def undo_hook(block):
    block.in_proj._forward_hooks.clear()


STEP_CHANGES = [hook, undo_hook, replace_parameter, replace_module, move_parameter, round_and_widen]
STEP_CHANGES += [change_epsilon, patch_forward, exchange_module]


@torch.no_grad()
@pytest.mark.usefixtures("unchecked")  # one of the changes is of the output's width
def test_a_step_notices_whatever_becomes_of_its_modules_and_a_block_steps_as_it_is_now():
    torch.manual_seed(0)
    block, x = Mamba2(16, d_state=8, headdim=8), torch.randn(3, 16)
    _, cache = block.step(x)
    for change in STEP_CHANGES:
        step = step_of(block)
        assert step.is_current()
        block.in_proj.weight.mul_(1.1)
        assert step.is_current()
        change(block)
        assert not step.is_current(), change.__name__
        with kernels_off():
            expected, _ = block.step(x, cache)
        assert_near(block.step(x, cache)[0], expected, FLOOR[torch.float32], change.__name__)
    block = Mamba2(16, d_state=8, headdim=8)
    step = step_of(block)
    free(block)
    assert not step.is_current()
    with pytest.raises(ValueError, match="the parameter D has no memory"):
        block.step(x, cache)


@torch.no_grad()
@pytest.mark.parametrize("family", ["mamba1", "mamba2", "mamba3"])
def test_a_compiled_step_does_not_keep_its_block_alive(family):
    block = make_block(family, torch.float32)
    _, cache = block.step(torch.randn(3, 16))
    block.step(torch.randn(3, 16), cache)
    reference = weakref.ref(block)
    del block
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("family", ["mamba1", "mamba2", "mamba3"])
def test_a_block_without_gradients_takes_its_compiled_step(family, monkeypatch):
    block, x, ran = make_block(family, torch.float32), torch.randn(3, 16), []
    monkeypatch.setattr(CpuStep, "run", lambda *arguments, run=CpuStep.run: ran.append(1) or run(*arguments))
    block.step(x)
    assert not ran  # the parameters want gradients
    with torch.no_grad():
        _, cache = block.step(x)
        block.step(x, cache)
        assert len(ran) == 2
        copy.deepcopy(block).step(x, cache)
        pickle.loads(pickle.dumps(block)).step(x, cache)
        assert len(ran) == 4
        with check_finite(), pytest.raises(FloatingPointError, match=r"step: input x is not finite"):
            block.step(x / 0, cache)
        with torch.autocast("cpu", torch.bfloat16):
            block.step(x)
        with kernels_off():
            block.step(x)
    assert len(ran) == 4


class Norm(nn.Module):
    """A weight for each channel, as a parameter and as a buffer."""

    def __init__(self, width, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=dtype))
        self.register_buffer("scales", torch.randn(1, 1, width, dtype=dtype))


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("gated", "order"), [(False, True), (True, True), (True, False)])
def test_a_norm_takes_its_groups_its_order_and_its_weights_from_the_description(gated, order, weighted, dtype):
    width, rows, group_size, eps = 42, 3, 14, 1e-3
    module, x = Norm(width, dtype), torch.randn(rows, 2 * width).to(dtype)

    def describe(builder):
        norm, z = (module if weighted else None), (width if gated else -1)
        options = {"eps": eps, "group_size": group_size, "norm_before_gate": order}
        builder.write(builder.norm(0, norm, width, z=z, to=0, **options), width)

    y = compile_phases(describe, dtype, 2 * width).run(x, [])[0]
    u, gate = x.double()[:, :width], torch.nn.functional.silu(x.double()[:, width:])
    u = u * gate if gated and not order else u
    groups = u.unflatten(-1, (-1, group_size))
    expected = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    expected = expected * module.weight.double() if weighted else expected
    assert_near(y, expected * gate if gated and order else expected, FLOOR[dtype])


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_slot_is_scaled_by_a_number_and_by_a_vector(dtype):
    width, module = 37, Norm(37, dtype)
    x = torch.randn(3, width).to(dtype)

    def describe(builder):
        half = builder.scale(0, width, factor=0.5)
        scaled = builder.scale(half, width, weight=builder.buffer(module, "scales", 1, 1, width))
        builder.write(builder.scale(scaled, width, factor=3, weight=builder.parameter(module, "weight", width)), width)

    y = compile_phases(describe, dtype, width).run(x, [])[0]
    assert_near(y, 1.5 * x.double() * module.scales[0].double() * module.weight.double(), FLOOR[dtype])


def test_groups_that_do_not_divide_the_channels_and_buffers_that_are_none_are_rejected():
    module = Norm(8, torch.float32)
    for describe, reason in (
        (lambda builder: builder.norm(0, module, 8, eps=1e-5, group_size=3), "groups of 3"),
        (lambda builder: builder.buffer(module, "weight", 8), "weight must be a tensor"),
        (lambda builder: builder.buffer(module, "scales", 8), "scales must be contiguous, of shape"),
    ):
        step = CompiledStep(nn.Identity(), StepSource(describe, 8, torch.float32, torch.float32))
        assert step.executable is None
        assert reason in step.reason


class Holder(nn.Module):
    """A matrix by the name that a builder is given."""

    def __init__(self, width, out, dtype, bias):
        super().__init__()
        self.matrix = nn.Linear(width, out, bias=bias, dtype=dtype)


def multiply(holder, x):
    out, width = holder.matrix.weight.shape

    def describe(builder):
        builder.linear(0, holder, "matrix", width, out, to=OUTPUT)

    return compile_phases(describe, x.dtype, width).run(x, [])[0]


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 1, 1), (1, 300, 131), (2, 37, 50), (5, 129, 64), (64, 16, 7)])
def test_few_rows_times_a_matrix(rows, width, out, dtype):
    holder, x = Holder(width, out, dtype, bias=True), torch.randn(rows, width).to(dtype)
    holder.matrix.weight[0, 0] = 3 * torch.finfo(torch.float16).smallest_normal / 8  # a denormal of float16
    expected = x.double() @ holder.matrix.weight.double().t() + holder.matrix.bias.double()
    assert_near(multiply(holder, x), expected, {torch.float64: 1e-14, torch.float32: 2e-6}.get(dtype, FLOOR[dtype]))


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(("first", "channels"), [(0, 700), (0, 333), (200, 500), (699, 1)])
def test_a_convolution_gives_the_same_bits_with_its_projection_and_after_it(first, channels, rows, threads):
    """Columns are convolved by whichever task projects them, unless something comes between."""
    holder, x = Holder(300, 700, torch.float32, bias=True), torch.randn(rows, 300)
    holder.conv = CausalConv(channels, 4)
    window = torch.randn(rows, channels, 4)

    def run(between, count):
        def describe(builder):
            projected = builder.linear(0, holder, "matrix", 300, 700)
            if between:
                projected = builder.scale(projected, 700)
            builder.write(builder.conv(projected + first, holder.conv, channels, 4), channels)

        threads(count)
        y, cache = compile_phases(describe, torch.float32, 300).run(x, [window])
        return y, cache[0]

    expected = run(between=True, count=1)
    for count in (1, 2, 3, 9):
        for actual, separate in zip(run(between=False, count=count), expected, strict=True):
            assert torch.equal(actual, separate)
    assert torch.equal(expected[1][:, :, :3], window[:, :, 1:])


@torch.no_grad()
def test_a_convolution_of_the_input_itself(threads):
    threads(2)
    conv, x, window = CausalConv(40, 4), torch.randn(2, 40), torch.randn(2, 40, 4)

    def describe(builder):
        builder.write(builder.conv(0, conv, 40, 4), 40)

    y, cache = compile_phases(describe, torch.float32, 40).run(x, [window])
    taps = torch.cat([window[:, :, 1:], x.unsqueeze(-1)], -1).double()
    sums = (taps * conv.weight.double().squeeze(1)).sum(-1) + conv.bias.double()
    assert torch.equal(cache[0], taps.float())
    assert_near(y, torch.nn.functional.silu(sums), FLOOR[torch.float32])


@torch.no_grad()
def test_short_phases_give_the_same_bits_whether_one_thread_takes_them_or_all_share_them(threads):
    holder, module, x = Holder(300, 300, torch.float32, bias=False), Norm(300, torch.float32), torch.randn(5, 300)

    def describe(builder):
        normed = builder.norm(0, module, 300, eps=1e-5)
        y = builder.linear(builder.gate(normed, 0, 300), holder, "matrix", 300, 300)
        builder.write(builder.norm(builder.scale(y, 300, factor=2), None, 300, eps=1e-5), 300)

    step = compile_phases(describe, torch.float32, 300)
    together = step.run(x, [])[0]
    for count in (1, 2, 3, 9):
        threads(count)
        for rows in (1, 2, 3):
            assert torch.equal(step.run(x[:rows], [])[0], together[:rows])


@torch.no_grad()
def test_numbers_of_half_precision_are_read_exactly():
    values = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        weight = values.view(dtype)
        weight = weight[weight.isfinite()]
        if dtype == torch.bfloat16:  # whose denormals are those of float32, which are flushed
            weight = weight[(weight == 0) | (weight.abs() >= torch.finfo(torch.float32).smallest_normal)]
        weight = weight[: weight.numel() // 8 * 8].reshape(-1, 8)
        holder = Holder(8, weight.shape[0], dtype, bias=False)
        holder.matrix.weight.copy_(weight)
        for rows in (1, 5):  # both ways to read
            for channel in range(8):
                one = torch.eye(8, dtype=dtype)[channel].expand(rows, 8).contiguous()
                assert torch.equal(multiply(holder, one), weight[:, channel].expand(rows, -1))


FORCED = """
import torch
from anymamba.kernels.cpu import bindings
from tests.kernels.test_compiled_step import DTYPES, LARGE, make_large, module_steps, compiled_steps
from tests.support import FLOOR, assert_near
with torch.no_grad():
    for name in LARGE:
        for dtype in DTYPES:
            block, tokens = make_large(name, dtype), torch.randn(2, 3, 102, dtype=dtype)
            assert_near(compiled_steps(block, tokens)[0], module_steps(block, tokens)[0], FLOOR[dtype])
print(bindings.LIBRARY.isa)
"""
FORKED = """
import os, torch
from tests.kernels.test_compiled_step import make_large, compiled_steps
torch.set_num_threads(2)
block, tokens = make_large("mamba2", torch.float32), torch.randn(2, 3, 102)
with torch.no_grad():
    expected = compiled_steps(block, tokens)[0]
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(compiled_steps(block, tokens)[0], expected) else 1)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_every_instruction_set_computes_the_same(isa):
    isa_in_use = in_another_process(FORCED, ANYMAMBA_ISA=isa)
    if isa_in_use != isa:
        pytest.skip(f"this processor has no {isa}")


def test_a_compiled_step_runs_in_a_forked_process():
    assert in_another_process(FORKED) == "0"


@torch.no_grad()
@pytest.mark.parametrize("width", [8, 32])
def test_an_input_of_another_width_is_rejected(width, unchecked):
    for options in ("mamba1", "mamba2", "mamba3"):
        with pytest.raises(ValueError, match=rf"x must have shape \(b, d=16\), got \(2, {width}\)"):
            make_block(options, torch.float32).step(torch.ones(2, width))


@torch.no_grad()
@pytest.mark.parametrize("options", ["mamba1", "mamba2", "mamba3"])
def test_the_default_device_is_not_where_kernels_write(options):
    block, x = make_block(options, torch.float32), torch.randn(2, 5, 16)
    y, cache = block.prefill(x)
    y_next, _ = block.step(x[:, 0], cache)
    with torch.device("meta"):
        again, cache = block.prefill(x)
        next_again, _ = block.step(x[:, 0], cache)
    assert torch.equal(y, again)
    assert torch.equal(y_next, next_again)
