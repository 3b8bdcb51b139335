"""One token in one call: the same numbers as the modules give, whatever becomes of the modules."""

import copy
import gc
import io
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from anymamba import Mamba1, Mamba2, Mamba3, MambaLM
from anymamba.blocks.rotation import ComplexRotation
from anymamba.kernels import library
from anymamba.kernels.cpu.program import MAX_ROWS, OUTPUT, Decoder
from tests.blocks.families import OPTIONS, make_block, random_cache
from tests.models.cases import FAMILIES, small_lm
from tests.support import FLOOR, assert_near, in_another_process

pytestmark = pytest.mark.skipif(library.LIBRARY.handle is None, reason=library.LIBRARY.reason)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NOWHERE = "switched off by the test"
# Large enough for threads, with awkward sizes.
LARGE = {
    "mamba1": (Mamba1, {"d_model": 102, "d_state": 21, "dt_rank": 5}),
    "mamba2": (Mamba2, {"d_model": 102, "d_state": 21, "headdim": 17, "ngroups": 3}),
    "mamba3": (Mamba3, {"d_model": 102, "d_state": 22, "headdim": 17, "ngroups": 3}),
    "mamba3 mimo": (Mamba3, {"d_model": 102, "d_state": 22, "headdim": 17, "is_mimo": True, "mimo_rank": 3}),
}


@pytest.fixture
def portable(monkeypatch):
    """Call a function with the kernels switched off."""

    def run(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(library, "missing", lambda device, dtype: NOWHERE)
            return function(*arguments)

    return run


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def steps(module, tokens, cache=None):
    """Outputs of a few steps, and the last cache."""
    outputs = []
    for x in tokens:
        y, cache = module.step(x, cache)
        outputs.append(y)
    return torch.stack(outputs), cache


def compare(actual, expected, dtype):
    """Outputs and caches of `steps`; an angle counts by its place on the circle."""
    assert_near(actual[0], expected[0], FLOOR[dtype], "y")
    assert type(actual[1]) is type(expected[1])
    for name, x, reference in zip(actual[1]._fields, actual[1], expected[1], strict=True):
        if not isinstance(x, torch.Tensor):
            assert x == reference
        elif name == "rotation" and x.ndim == 3:
            turn = torch.polar(torch.ones_like(x), x - reference)
            assert_near(torch.view_as_real(turn), torch.view_as_real(torch.ones_like(turn)), FLOOR[dtype], name)
        else:
            assert_near(x, reference, FLOOR[dtype], name)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_block_steps_as_its_modules_do(options, dtype, portable):
    block = make_block(options, dtype)
    tokens, cache = torch.randn(5, 3, 16, dtype=dtype), random_cache(block, 3).detach()
    compare(steps(block, tokens, cache), portable(steps, block, tokens, cache), dtype)
    compare(steps(block, tokens), portable(steps, block, tokens), dtype)
    assert block._whole._program.covers is (type(getattr(block, "rotation", None)) in (type(None), ComplexRotation))


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fields", [{}, {"d_intermediate": 40, "tie_embeddings": False}], ids=["plain", "mlp"])
def test_a_model_steps_as_its_modules_do(fields, family, dtype, portable):
    model = small_lm(family, dtype, **fields)
    tokens = torch.randint(61, (5, 3))
    y, cache = steps(model, tokens)
    assert model._decoder._program.covers
    y_portable, cache_portable = portable(steps, model, tokens)
    # Twenty times larger than usual outputs of the blocks make every rounding of the activations count.
    floor = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 0.1, torch.float16: 2e-2}[dtype]
    assert_near(y, y_portable, floor)
    for layer, reference in zip(cache.layers, cache_portable.layers, strict=True):
        assert_near(layer.ssm, reference.ssm, floor)


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
    y, cache = steps(block, tokens)
    assert block._whole._program.covers
    threads(1)
    for rows in (slice(0, 1), slice(3, 4), slice(1, 4), slice(2, 7)):
        y_alone, cache_alone = steps(block, tokens[:, rows])
        assert torch.equal(y_alone, y[:, rows])
        for alone, together in zip(cache_alone, cache, strict=True):
            assert torch.equal(alone, together[rows])


@torch.no_grad()
def test_a_model_gives_the_same_bits_from_any_thread_and_batch(threads):
    model, ids = small_lm(d_model=96, vocab_size=700), torch.randint(700, (6,))
    threads(2)
    logits, _ = model.step(ids)

    def run(_):
        with torch.no_grad():  # which is a thread's own
            return model.step(ids)[0]

    with ThreadPoolExecutor(4) as pool:
        for other in pool.map(run, range(8)):
            assert torch.equal(other, logits)
    threads(1)
    for row in range(6):
        alone, _ = model.step(ids[row : row + 1])
        assert torch.equal(alone[0], logits[row])


@torch.no_grad()
@pytest.mark.parametrize("batch", [MAX_ROWS, MAX_ROWS + 1, 0])
def test_any_batch(batch, portable):
    block = make_block("mamba3 mimo 2", torch.float64)
    tokens = torch.randn(2, batch, 16, dtype=torch.float64)
    compare(steps(block, tokens), portable(steps, block, tokens), torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_is_a_value_unless_it_is_given_away(family):
    model, ids = small_lm(family), torch.randint(61, (2,))
    _, cache = model.step(ids)
    before = cache.clone()
    logits, _ = model.step(ids, cache)
    for name, x in cache.tensors().items():
        assert torch.equal(x, before.tensors()[name]), name
    logits_in_place, moved_on = model.step(ids, cache, in_place=True)
    assert torch.equal(logits_in_place, logits)
    for name, x in moved_on.tensors().items():
        assert x.data_ptr() == cache.tensors()[name].data_ptr(), name
    again, _ = model.step(ids, moved_on)
    expected, _ = model.step(ids, model.step(ids, before)[1])
    assert torch.equal(again, expected)


@torch.no_grad()
def test_rows_of_a_cache_in_any_layout():
    block = make_block("mamba3 mimo 2", torch.float64)
    x, cache = torch.randn(4, 16, dtype=torch.float64), random_cache(block, 4).detach()
    y, _ = block.step(x, cache)
    strided = cache.with_tensors(t.transpose(0, -1).contiguous().transpose(0, -1) for t in cache)
    assert not strided.ssm.is_contiguous()
    assert torch.equal(block.step(x, strided)[0], y)
    assert torch.equal(block.step(x[::2], cache.rows(slice(None, None, 2)))[0], y[::2])
    assert torch.equal(block.step(x.t().contiguous().t(), cache)[0], y)


def test_a_step_that_needs_a_gradient_has_one():
    for options in ("mamba2", "mamba3 mimo 2"):
        block = make_block(options)
        y, _ = block.step(torch.randn(2, 16, dtype=torch.float64))
        y.sum().backward()
        assert all(p.grad is not None for name, p in block.named_parameters() if name != "B_bias" or p.ndim == 3)
        block.requires_grad_(False)
        x = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
        assert block.step(x)[0].requires_grad
        assert not block.step(x.detach())[0].requires_grad


class Doubled(nn.Linear):
    """A layer that has something to add, as an adapter has."""

    def forward(self, x):
        return 2 * super().forward(x)


def replace_parameter(model):
    old = model.backbone.layers[0].mixer.D
    model.backbone.layers[0].mixer.D = nn.Parameter(old + 1)


def give_other_data(model):
    weight = model.backbone.layers[1].mixer.in_proj.weight
    weight.data = weight.data.flip(0).clone()


def change_in_place(model):
    model.backbone.layers[1].mixer.in_proj.weight.mul_(1.5)


def transpose_in_place(model):
    weight = model.lm_head.weight = model.backbone.embedding.weight = nn.Parameter(torch.randn(32, 32))
    model.step(torch.zeros(3, dtype=torch.long))
    weight.data = weight.data.t()


def exchange_module(model):
    linear = model.backbone.layers[0].mixer.out_proj
    doubled = Doubled(linear.in_features, linear.out_features, bias=False)
    doubled.weight = linear.weight
    model.backbone.layers[0].mixer.out_proj = doubled


def hook(model):
    model.backbone.layers[0].mixer.in_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


def hook_before(model):
    model.backbone.norm_f.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))


def patch_forward(model):
    linear = model.backbone.layers[1].mixer.out_proj
    linear.forward = lambda x: 3 * nn.functional.linear(x, linear.weight)


def change_class(model):
    model.backbone.layers[1].mixer.in_proj.__class__ = Doubled


def parametrise(model):
    class Half(nn.Module):
        def forward(self, x):
            return x / 2

    torch.nn.utils.parametrize.register_parametrization(model.backbone.layers[0].mixer.in_proj, "weight", Half())


def change_epsilon(model):
    model.backbone.layers[0].norm.eps = 0.5


def drop_layer(model):
    del model.backbone.layers[1]


def swap_layers(model):
    model.backbone.layers[0], model.backbone.layers[1] = model.backbone.layers[1], model.backbone.layers[0]


def add_bias(model):
    model.backbone.layers[0].mixer.in_proj.bias = nn.Parameter(
        torch.randn(model.backbone.layers[0].mixer.in_proj.out_features)
    )


CHANGES = [
    replace_parameter,
    give_other_data,
    change_in_place,
    transpose_in_place,
    exchange_module,
    hook,
    hook_before,
    patch_forward,
    change_class,
    parametrise,
    change_epsilon,
    drop_layer,
    swap_layers,
    add_bias,
]


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_becomes_of_the_modules_counts(change, family, portable):
    model, ids = small_lm(family, **({"vocab_size": 32} if change is transpose_in_place else {})), torch.arange(3)
    before, _ = model.step(ids)
    change(model)
    after, _ = model.step(ids)
    assert_near(after, portable(model.step, ids)[0], 2e-5)
    if change is not transpose_in_place:
        assert not torch.allclose(after, before)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_changes_its_dtype(family, portable):
    model, ids = small_lm(family), torch.arange(3)
    model.step(ids)
    for dtype in (torch.bfloat16, torch.float64, torch.float16, torch.float32):
        model.to(dtype)
        logits, cache = model.step(ids)
        assert logits.dtype == dtype
        assert model._decoder._program.covers
        assert_near(logits, portable(model.step, ids)[0], {torch.bfloat16: 0.1, torch.float16: 2e-2}.get(dtype, 2e-5))
        model.step(ids, cache)


@torch.no_grad()
@pytest.mark.parametrize("options", ["mamba2 half SSM", "mamba3 mimo 3"])
def test_other_projections_leave_the_rest_compiled(options, portable):
    block = make_block(options)
    block.in_proj.__class__ = Doubled
    tokens = torch.randn(3, 2, 16, dtype=torch.float64)
    compare(steps(block, tokens), portable(steps, block, tokens), torch.float64)
    assert block._core._program.covers
    assert not block._whole._program.covers


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_is_obeyed(family, portable):
    model, ids = small_lm(family), torch.arange(3)
    with torch.autocast("cpu", torch.bfloat16):
        logits, cache = model.step(ids)
        expected, _ = portable(model.step, ids)
        model.step(ids, cache)
    assert logits.dtype == torch.bfloat16
    assert_near(logits, expected, 0.1)


class Quiet(Mamba2):
    """A block with its own idea of a step size."""

    def _dt(self, dt):
        return super()._dt(dt) / 2


@torch.no_grad()
def test_a_subclass_runs_its_own_code(portable):
    block, tokens = Quiet(d_model=16, d_state=8, headdim=8), torch.randn(3, 2, 16)
    compare(steps(block, tokens), portable(steps, block, tokens), torch.float32)
    assert not block._whole._program.covers


@torch.no_grad()
def test_a_model_of_layer_norms_and_a_narrow_residual_run_their_own_code(portable):
    for fields, dtype in (({"rms_norm": False}, torch.float32), ({"residual_in_fp32": False}, torch.bfloat16)):
        model, ids = small_lm(dtype=dtype, **fields), torch.arange(3)
        assert_near(model.step(ids)[0], portable(model.step, ids)[0], {torch.bfloat16: 0.1}.get(dtype, 2e-5))


@torch.no_grad()
def test_copies_and_pickles_start_without_a_program():
    model, ids = small_lm(), torch.arange(3)
    expected, _ = model.step(ids)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (twin, loaded):
        assert other._decoder._program is None
        assert torch.equal(other.step(ids)[0], expected)
    twin.backbone.layers[0].mixer.D.add_(1)
    assert not torch.equal(twin.step(ids)[0], expected)
    assert torch.equal(model.step(ids)[0], expected)


class Holder(nn.Module):
    """A matrix by the name that a program is given."""

    def __init__(self, width, out, dtype, bias):
        super().__init__()
        self.matrix = nn.Linear(width, out, bias=bias, dtype=dtype)


def multiply(holder, x):
    out, width = holder.matrix.weight.shape
    done = Decoder().run(x.dtype, lambda program: program.linear(0, holder, "matrix", width, out, to=OUTPUT), x, [])
    return done[0]


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 1, 1), (1, 300, 131), (2, 37, 50), (5, 129, 64), (64, 16, 7)])
def test_few_rows_times_a_matrix(rows, width, out, dtype):
    holder, x = Holder(width, out, dtype, bias=True), torch.randn(rows, width).to(dtype)
    holder.matrix.weight[0, 0] = 3 * torch.finfo(torch.float16).smallest_normal / 8  # a denormal of float16
    expected = x.double() @ holder.matrix.weight.double().t() + holder.matrix.bias.double()
    assert_near(multiply(holder, x), expected, {torch.float64: 1e-14, torch.float32: 2e-6}.get(dtype, FLOOR[dtype]))


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
from anymamba.kernels import library
from tests.kernels.test_decode import DTYPES, LARGE, make_large, steps
from tests.support import FLOOR, assert_near
with torch.no_grad():
    for name in LARGE:
        for dtype in DTYPES:
            block, tokens = make_large(name, dtype), torch.randn(2, 3, 102, dtype=dtype)
            y, _ = steps(block, tokens)
            assert block._whole._program.covers
            real, library.missing = library.missing, lambda device, dtype: "off"
            assert_near(y, steps(block, tokens)[0], FLOOR[dtype])
            library.missing = real
print(library.LIBRARY.isa)
"""
FORKED = """
import os, torch
from tests.kernels.test_decode import make_large, steps
torch.set_num_threads(2)
block, tokens = make_large("mamba2", torch.float32), torch.randn(2, 3, 102)
with torch.no_grad():
    expected = steps(block, tokens)[0]
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(steps(block, tokens)[0], expected) else 1)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_every_instruction_set_computes_the_same(isa):
    found = in_another_process(FORCED, ANYMAMBA_ISA=isa)
    if found != isa:
        pytest.skip(f"this processor has no {isa}")


def test_a_forked_process_steps():
    assert in_another_process(FORKED) == "0"


@torch.no_grad()
def test_a_model_that_is_gone_is_freed():
    model = MambaLM(d_model=16, n_layer=1, vocab_size=9, ssm_cfg={"layer": "Mamba2", "d_state": 8, "headdim": 8})
    model.step(torch.zeros(1, dtype=torch.long))
    gone = weakref.ref(model.backbone.layers[0].mixer.in_proj.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None  # at once: two models may not fit into memory
    finally:
        gc.enable()


@torch.no_grad()
@pytest.mark.parametrize("width", [8, 32])
def test_an_input_of_another_width_is_refused(width, unchecked):
    for options in ("mamba1", "mamba2", "mamba3"):
        with pytest.raises(ValueError, match=rf"x must have shape \(b, d=16\), got \(2, {width}\)"):
            make_block(options, torch.float32).step(torch.ones(2, width))


@torch.no_grad()
@pytest.mark.parametrize("family", ["Mamba2", "Mamba3"])
def test_a_learnable_initial_state_is_not_written_over(family):
    model = small_lm(ssm_cfg={**FAMILIES[family], "learnable_init_states": True})
    before = copy.deepcopy(model.state_dict())
    model.step(torch.tensor([1]), in_place=True)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@torch.no_grad()
def test_hooks_on_every_module_are_called():
    model, seen = small_lm(), []
    model.step(torch.tensor([1]))
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        model.step(torch.tensor([1]))
    finally:
        handle.remove()
    assert nn.Linear in seen


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
