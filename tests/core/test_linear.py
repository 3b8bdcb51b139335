"""Products by either of torch's libraries: the same numbers and gradients, from modules as they are."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import anymamba
from anymamba import Mamba2, MambaLM
from anymamba.core import linear as linear_module
from anymamba.core.linear import apply_linear, linear
from anymamba.core.registry import kernels_off
from anymamba.generation import prefill
from anymamba.kernels.cpu.bindings import missing
from tests.models.cases import FAMILIES, small_lm
from tests.support import FLOOR, MODEL_FLOOR, assert_near, in_another_process

needs_kernels = pytest.mark.skipif(bool(missing(torch.float32)), reason="no compiled kernels here")
SHAPES = [(1, 1, 1), (17, 5, 3), (64, 64, 300), (33, 256, 129), (16, 1, 40), (200, 31, 1)]


@pytest.fixture
def computed(monkeypatch):
    """Choose oneDNN for products of any size; return a list of the shapes of those that it computes."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        pytest.skip("this torch has no oneDNN")
    shapes, product = [], linear_module._product

    def count_shapes(x, weight, bias):
        shapes.append((tuple(x.shape), tuple(weight.shape)))
        return product(x, weight, bias)

    monkeypatch.setattr(linear_module, "matmul_library", lambda: "onednn")
    monkeypatch.setattr(linear_module, "_MAX_ROWS", {"onednn": 0})
    monkeypatch.setattr(linear_module, "_MIN_DIM", 1)
    monkeypatch.setattr(linear_module, "_MIN_PRODUCTS", 1)
    monkeypatch.setattr(linear_module, "_product", count_shapes)
    return shapes


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("m", "i", "o"), SHAPES)
def test_values_and_gradients_are_those_in_float64(computed, m, i, o, biased):
    tensors = [torch.randn(2, m, i), torch.randn(o, i), *([torch.randn(o)] if biased else [])]
    dy = torch.rand(2, m, o)  # whose sums do not cancel

    def outcome(function, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]

    for actual, expected in zip(outcome(linear, torch.float32), outcome(F.linear, torch.float64), strict=True):
        assert_near(actual, expected, FLOOR[torch.float32])
    assert len(computed) == 3  # forward, and the gradients of x and the weight


@pytest.mark.parametrize(
    "x",
    [torch.ones(40, 24).t(), torch.rand(24, 90)[:, :40], torch.rand(24, 3, 40)[:, 1], torch.rand(1, 1).expand(24, 40)],
    ids=["transposed", "columns", "rows", "repeated"],
)
def test_strides_do_not_matter(computed, monkeypatch, x):
    """oneDNN gets rows or columns without gaps, because it is a thousand times slower with them."""
    seen, operator = [], torch.ops.mkldnn._linear_pointwise.default

    def watch_inputs(*inputs):
        seen.extend(tensor for tensor in inputs[:2])
        return operator(*inputs)

    monkeypatch.setattr(torch.ops.mkldnn._linear_pointwise, "default", watch_inputs)
    weight = torch.rand(2, 30, 40)[:, ::2][0]
    assert_near(linear(x, weight), x.double() @ weight.double().t(), FLOOR[torch.float32])
    assert len(computed) == 1
    assert all(tensor.is_contiguous() or tensor.t().is_contiguous() for tensor in seen)
    assert len(seen) == 2


def test_gradients_have_gradients(computed):
    x, weight = torch.randn(4, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)

    def second(function, x, weight):
        (dx,) = torch.autograd.grad(function(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, weight])

    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    for actual, expected in zip(second(linear, x, weight), second(F.linear, *wide), strict=True):
        assert_near(actual, expected, FLOOR[torch.float32])
    assert computed


def test_a_frozen_weight_receives_no_gradient(computed):
    weight = torch.randn(3, 5)
    x = torch.randn(4, 5, requires_grad=True)
    linear(x, weight).sum().backward()
    assert weight.grad is None
    assert len(computed) == 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own
def test_what_follows_operations_sees_torchs_own_product(computed):
    x, weight = torch.randn(32, 16), torch.randn(8, 16)
    with anymamba.portable():
        linear(x, weight)
    with forward_ad.dual_level():
        linear(forward_ad.make_dual(x, x), weight)
    torch.func.vmap(lambda x: linear(x, weight))(x.unsqueeze(1))
    graph = torch.export.export(Wrapped(nn.Linear(16, 8)), (x,)).graph
    assert "linear" in str(graph)
    assert not computed


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return apply_linear(self.inner, x)


@pytest.mark.parametrize(
    "other",
    [
        lambda: (torch.randn(4, 5).double(), torch.randn(3, 5).double()),
        lambda: (torch.randn(4, 5).bfloat16(), torch.randn(3, 5).bfloat16()),
        lambda: (torch.randn(4, 5, device="meta"), torch.randn(3, 5, device="meta")),
        lambda: (torch.randn(0, 5), torch.randn(3, 5)),
        lambda: (torch._neg_view(torch.randn(4, 5)), torch.randn(3, 5)),
    ],
    ids=["float64", "bfloat16", "meta", "no rows", "lazily negated"],
)
def test_everything_else_is_left_to_torch(computed, other):
    x, weight = other()
    y, expected = linear(x, weight), F.linear(x, weight)
    assert y.shape == expected.shape
    assert y.device.type == "meta" or torch.equal(y, expected)
    assert not computed


def test_autocast_and_other_precisions_are_left_to_torch(computed):
    x, weight = torch.randn(32, 16), torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    torch.set_float32_matmul_precision("medium")
    try:
        linear(x, weight)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not computed


def test_a_program_that_allows_tf32_keeps_the_fast_product(computed):
    x, weight = torch.randn(32, 16), torch.randn(8, 16)
    expected = linear(x, weight)
    torch.set_float32_matmul_precision("high")
    try:
        y = linear(x, weight)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(computed) == 2
    assert_near(y, expected.double(), 1e-3)  # of TF32, where there is such a thing


def test_shapes_that_do_not_fit_are_rejected_as_torch_rejects_them(computed):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(torch.randn(32, 15), torch.randn(8, 16))


def test_modules_with_hooks_and_other_modules_are_called(computed):
    x, calls = torch.randn(32, 16), []
    plain = nn.Linear(16, 8)
    apply_linear(plain, x)
    assert len(computed) == 1
    handle = plain.register_forward_hook(lambda *_: calls.append("hook"))
    apply_linear(plain, x)
    handle.remove()
    plain.forward = functools.partial(lambda inner, x: calls.append("own") or inner(x), plain.forward)
    apply_linear(plain, x)
    del plain.forward
    apply_linear(nn.Sequential(plain), x)
    assert calls == ["hook", "own"]
    assert len(computed) == 1


def test_a_block_and_a_language_model_run_on_it(computed):
    block, x = Mamba2(d_model=32, d_state=16, headdim=16), torch.randn(2, 20, 32)
    assert_near(block(x), block.double()(x.double()), FLOOR[torch.float32])
    assert len(computed) == 2
    computed.clear()
    model, ids = MambaLM(d_model=32, n_layer=1, vocab_size=64), torch.randint(64, (2, 20))
    loss = model(ids, labels=ids, logits="none").loss
    loss.backward()
    assert len(computed) >= 9  # two projections and the head, forward and both gradients
    assert_near(loss.detach(), model.double()(ids, labels=ids).loss.detach(), FLOOR[torch.float32])


@pytest.fixture
def few_rows(monkeypatch):
    """Leave sequences to torch, and let weights of any size be read by our kernels where rows are few."""
    monkeypatch.setattr(linear_module, "matmul_library", lambda: "torch")
    monkeypatch.setattr(linear_module, "_MIN_WEIGHT_NUMEL", 1)
    monkeypatch.setattr(linear_module, "_MAX_ROWS", {"torch": 256})
    return 256


@needs_kernels
@pytest.mark.parametrize(("i", "o"), [(1, 1), (7, 3), (64, 9), (100, 40), (768, 133)])
@pytest.mark.parametrize("m", [1, 2, 3, 31, 64, 65, 256])
def test_a_row_of_few_is_the_same_alone_and_among_others(few_rows, m, i, o):
    x, weight, bias = torch.randn(m, i), torch.randn(o, i), torch.randn(o)
    y = linear(x, weight, bias)
    assert m <= few_rows
    assert_near(y, F.linear(x.double(), weight.double(), bias.double()), FLOOR[torch.float32])
    assert torch.equal(y, torch.cat([linear(row, weight, bias) for row in x.split(1)]))
    assert torch.equal(linear(x.flip(0), weight, bias).flip(0), y)
    assert torch.equal(linear(x.view(1, m, i), nn.Parameter(weight, requires_grad=False), bias), y.view(1, m, o))
    assert torch.equal(linear(x.t().contiguous().t(), weight, bias), y)


@needs_kernels
def test_few_rows_with_gradients_and_many_rows_are_left_to_torch(few_rows):
    x, weight = torch.randn(few_rows + 1, 20), torch.randn(10, 20)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    few = x[:2].clone().requires_grad_()
    linear(few, weight).sum().backward()
    assert_near(few.grad, weight.sum(0).expand(2, -1), FLOOR[torch.float32])
    with kernels_off():
        assert torch.equal(linear(x[:2], weight), F.linear(x[:2], weight))
    assert linear(x[:0], weight).shape == (0, 10)


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_prompt_gives_what_the_model_gives(few_rows, family):
    model = small_lm(family)
    ids_1t = torch.randint(0, 61, (1, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.double()(ids_1t, logits="last").logits[:, 0]
    logits_1v = prefill(model.float(), ids_1t).logits
    assert_near(logits_1v, expected, MODEL_FLOOR)


BIASES = {
    "strided": lambda: torch.randn(16)[::2],
    "repeated": lambda: torch.ones(1).expand(8),
    "a row": lambda: torch.randn(1, 8),
    "one number": lambda: torch.randn(1),
    "0-d": lambda: torch.tensor(2.0),
}


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_a_bias_of_any_layout_is_added_as_torch_adds_it(computed, bias):
    x, weight, bias = torch.randn(32, 16), torch.randn(8, 16), bias()
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert_near(linear(x, weight, bias), expected, FLOOR[torch.float32])


def check_that_results_may_be_changed():
    """Check that results are not views: they can be changed in place, in training and when made without gradients."""
    x, weight = torch.randn(2, 16, 16), torch.randn(8, 16, requires_grad=True)
    y = linear(x, weight)
    y += 1
    y.sum().backward()
    with torch.no_grad():
        y = linear(x, weight)
    y *= torch.ones(8, requires_grad=True)
    assert y.requires_grad


def test_results_of_onednn_may_be_changed_in_place(computed):
    check_that_results_may_be_changed()
    assert computed


@needs_kernels
def test_results_of_few_rows_may_be_changed_in_place(few_rows):
    check_that_results_may_be_changed()


def test_only_what_gradients_need_is_kept(computed):
    x, weight = torch.randn(32, 16), torch.randn(8, 16)
    y = linear(x.clone().requires_grad_(), weight)
    assert [None if t is None else t.shape for t in y.grad_fn.saved_tensors] == [None, weight.shape]
    y = linear(x, weight.clone().requires_grad_())
    assert [None if t is None else t.shape for t in y.grad_fn.saved_tensors] == [x.shape, None]


def test_a_precision_that_was_chosen_in_torchs_newer_settings_is_left_to_torch(computed):
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        linear(torch.randn(32, 16), torch.randn(8, 16))
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert not computed


def test_a_sparse_weight_and_modes_see_torchs_own_product(computed):
    x, weight = torch.randn(32, 16), torch.randn(8, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a format in beta
        linear(x, weight.to_sparse_csr())
    seen = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching():
        linear(x, weight)
    assert F.linear in seen
    assert not computed


@pytest.mark.parametrize("name", ["torch", "onednn"])
def test_the_variable_chooses_the_library(name, computed):
    code = "from anymamba.core.linear import matmul_library; print(matmul_library())"
    assert in_another_process(code, ANYMAMBA_MATMUL=name).strip() == name


def test_an_unknown_library_is_named(monkeypatch):
    monkeypatch.setattr(linear_module, "_REQUESTED", "blis")
    with pytest.raises(ValueError, match="ANYMAMBA_MATMUL must be one of torch, onednn, got 'blis'"):
        linear_module.matmul_library.__wrapped__()


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "environment", "expected"),
    [
        ("x86_64", "flags\t\t: fpu avx512f avx512_bf16 avx512_vnni", {}, True),
        ("x86_64", "flags\t\t: fpu amx_tile amx_bf16", {}, True),
        ("x86_64", "flags\t\t: fpu avx512f avx512_vnni", {}, False),
        ("x86_64", "flags\t\t: avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, False),
        ("x86_64", "flags\t\t: avx512_bf16", {"DNNL_MAX_CPU_ISA": "avx2"}, False),
        ("x86_64", "flags\t\t: avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, True),
        ("x86_64", "model name\t: with avx512_bf16", {}, False),
        ("aarch64", "Features\t: fp asimd bf16 i8mm", {}, True),
        ("aarch64", "Features\t: fp asimd", {}, False),
        ("arm64", "", {}, False),
    ],
)
def test_bfloat16_is_multiplied_where_the_processor_has_units_for_it(
    monkeypatch, machine, cpuinfo, environment, expected
):
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(linear_module, "_cpuinfo", lambda: ["processor\t: 0", *cpuinfo.splitlines()])
    monkeypatch.setattr(linear_module.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_acl_available", lambda: True)
    assert linear_module._has_bfloat16_units.__wrapped__() == expected


def test_bfloat16_is_widened_while_onednn_is_switched_off(monkeypatch):
    monkeypatch.setattr(linear_module, "_has_bfloat16_units", lambda: True)
    assert linear_module.multiplies_bfloat16()
    torch._C._set_mkldnn_enabled(False)
    try:
        assert not linear_module.multiplies_bfloat16()
    finally:
        torch._C._set_mkldnn_enabled(True)
