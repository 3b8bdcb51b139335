"""Weights in fewer bits: what is stored, and products with it."""

import pytest
import torch

from anymamba.core.weight_formats import FORMAT_SPECS, FormatSpec, storage_layout
from anymamba.kernels.cpu import bindings, linear_kernels
from anymamba.kernels.cpu.step_compiler import MAX_ROWS
from anymamba.quantization import (
    QuantizedEmbedding,
    QuantizedLinear,
    dequantize_tensor,
    ops,
    quantize_tensor,
    quantized_linear,
)
from tests.support import FLOOR, assert_near

FORMATS = tuple(FORMAT_SPECS)
GROUPS = {name: spec.group_size for name, spec in FORMAT_SPECS.items() if spec.group_size}
# Largest rounding error of a weight, relative to the largest of its group: half a step, for int4 of a clipped group
# at most one step of it.
STEP = {"bfloat16": 2**-8, "float16": 2**-11, "int8": 1.01 / 254, "int4": 0.21}
# Outputs and inputs: one, fewer than a vector, tails in every place, several groups, more than a panel's rows.
SIZES = [(1, 1), (5, 7), (3, 16), (17, 33), (64, 64), (29, 129), (100, 200), (13, 1000)]


def assert_product(y, x, stored, format, least=0.0):
    """Assert y = x weightᵀ up to float32's error and, for integer weights, activations rounded to 16 bits."""
    wide, x = dequantize_tensor(stored, torch.float64), x.detach().double()
    exact = x @ wide.T
    allowed = torch.full_like(exact, 4 * FLOOR[torch.float32] * max(exact.abs().max().item() if len(x) else 0, least))
    for x_group, group in zip(*(w.split(GROUPS.get(format, x.shape[1]), 1) for w in (x, wide)), strict=True):
        if format in GROUPS:
            allowed += 1.001 * 2**-16 * x_group.abs().amax(1, keepdim=True) * group.abs().sum(1)
    assert ((y.detach().double() - exact).abs() <= allowed).all()


def weight(out, width, seed=0):
    """Draw rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out, width, generator=generator) * torch.logspace(-6, 2, out).unsqueeze(1)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("out", "width"), SIZES)
def test_a_weight_is_stored_to_within_a_step_of_its_group(format, out, width):
    plain = weight(out, width)
    stored = quantize_tensor(plain, format)
    stored_parts = {"weight": stored.codes, "scales": stored.scales}
    assert {k: (tuple(x.shape), x.dtype) for k, x in stored_parts.items() if x is not None} == storage_layout(
        format, out, width
    )
    error = (dequantize_tensor(stored, torch.float64) - plain).abs()
    size = GROUPS.get(format, width)
    for part, exact in zip(error.split(size, 1), plain.abs().split(size, 1), strict=True):
        least = 2**-24 if format == "float16" else 0  # below its normal numbers
        assert (part <= STEP[format] * exact.max(1, keepdim=True).values + least).all()


def test_four_bits_leave_less_error_than_scales_that_cover_everything():
    plain = torch.randn(50, 320, generator=torch.Generator().manual_seed(1))
    groups = plain.unflatten(1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 7
    covered = ((groups / scale).round() * scale - groups).square().mean()
    assert (dequantize_tensor(quantize_tensor(plain, "int4")) - plain).square().mean() < 0.9 * covered


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_stay_zeros_and_widening_is_exact(format):
    zeros = torch.zeros(3, 70)
    assert torch.equal(dequantize_tensor(quantize_tensor(zeros, format)), zeros)
    stored = quantize_tensor(weight(6, 70), format)
    assert torch.equal(dequantize_tensor(stored).double(), dequantize_tensor(stored, torch.float64))


@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("out", "width"), SIZES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, MAX_ROWS, MAX_ROWS + 1])
def test_products_and_gradients_are_those_of_the_widened_weight(format, out, width, rows):
    torch.manual_seed(0)
    stored = quantize_tensor(weight(out, width), format)
    x, bias = torch.randn(rows, width, requires_grad=True), torch.randn(out, requires_grad=True)
    y = quantized_linear(x, stored, bias)
    head = torch.randn(rows, out)
    grads = torch.autograd.grad(y, (x, bias), head)
    wide = dequantize_tensor(stored, torch.float64)
    assert_product(y - bias, x, stored, format, least=1.0)
    assert_near(grads[0], head.double() @ wide, FLOOR[torch.float32] * 4)
    assert_near(grads[1], head.double().sum(0), FLOOR[torch.float32])


@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_activations_of_other_dtypes(dtype):
    torch.manual_seed(0)
    stored = quantize_tensor(torch.randn(9, 100), "int8")
    x = torch.randn(2, 3, 100).to(dtype)
    y = quantized_linear(x, stored)
    assert y.dtype == dtype
    assert y.shape == (2, 3, 9)
    assert_near(y, x.double() @ dequantize_tensor(stored, torch.float64).T, FLOOR[dtype])


@pytest.mark.parametrize("format", GROUPS)
@pytest.mark.parametrize(("out", "width"), [*SIZES, (9, 96), (6, 544), (7, 1056)])
def test_activations_that_are_integers_of_sixteen_bits_lose_nothing(format, out, width):
    """What is rounded are the activations, and nothing else but the last sums over groups."""
    generator = torch.Generator().manual_seed(width)
    stored = quantize_tensor(torch.randn(out, width, generator=generator), format)
    x = torch.randint(-32767, 32768, (3, width), generator=generator).float()
    x[:, :: GROUPS[format]] = 32767
    assert_near(
        quantized_linear(x, stored), x.double() @ dequantize_tensor(stored, torch.float64).T, FLOOR[torch.float32]
    )


@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_shows_in_its_row_alone(format):
    stored, x = quantize_tensor(weight(9, 100), format), torch.randn(4, 100)
    x[1, 5], x[2, 99], x[3] = torch.nan, -torch.inf, 0
    y = quantized_linear(x, stored)
    assert y.isfinite().all(1).tolist() == [True, False, False, True]
    assert torch.equal(y[3], torch.zeros(9))


@pytest.mark.skipif(bindings.LIBRARY.handle is None, reason=bindings.LIBRARY.reason)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("out", "width"), [(17, 33), (9, 96), (13, 1056)])
def test_every_number_of_rows_gives_the_same_bits(format, out, width):
    torch.manual_seed(0)
    stored, x = quantize_tensor(torch.randn(out, width), format), torch.randn(MAX_ROWS, width)
    together = quantized_linear(x, stored)
    assert_product(together, x, stored, format)
    for rows in range(1, MAX_ROWS):
        assert torch.equal(quantized_linear(x[:rows], stored), together[:rows])


@pytest.mark.skipif(bindings.LIBRARY.handle is None, reason=bindings.LIBRARY.reason)
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_does_not_depend_on_other_rows_nor_on_the_threads(format):
    torch.manual_seed(0)
    stored, x = quantize_tensor(torch.randn(301, 333), format), torch.randn(MAX_ROWS, 333)
    together = quantized_linear(x, stored)
    before = torch.get_num_threads()
    try:
        for threads, some in ((1, [0]), (2, [3, 4, 5]), (3, list(range(7, 40)))):
            torch.set_num_threads(threads)
            assert torch.equal(quantized_linear(x[some], stored), together[some])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [15, 16, MAX_ROWS, MAX_ROWS + 1, 300])
@pytest.mark.parametrize(("out", "width"), SIZES)
def test_bfloat16_inputs_agree_whichever_product_the_processor_has(monkeypatch, rows, out, width):
    torch.manual_seed(0)
    stored, x = quantize_tensor(torch.randn(out, width), "bfloat16"), torch.randn(rows, width).bfloat16()
    bias = torch.randn(out)
    exact = x.double() @ stored.codes.double().T + bias.double()
    for has_units in (True, False):
        monkeypatch.setattr(linear_kernels, "multiplies_bfloat16", lambda has=has_units: has)
        y = quantized_linear(x, stored, bias)
        assert y.dtype == torch.bfloat16
        assert_near(y, exact, FLOOR[torch.bfloat16])


@pytest.mark.parametrize("format", FORMATS)
def test_an_embedding_returns_widened_rows(format):
    table = QuantizedEmbedding(format, 11, 40)
    table.store(quantize_tensor(weight(11, 40), format))
    ids = torch.tensor([[0, 3, 10], [2, 2, 1]])
    assert torch.equal(table(ids), dequantize_tensor(table.stored)[ids])
    for bad in (-1, 11):
        with pytest.raises(IndexError):
            table(torch.tensor([bad]))


@pytest.mark.parametrize("format", FORMATS)
def test_casts_change_what_is_computed_in_and_leave_the_weight(format):
    linear = QuantizedLinear(format, 40, 9, bias=True)
    linear.store(quantize_tensor(weight(9, 40), format))
    before = {name: x.clone() for name, x in linear.state_dict().items() if name != "bias"}
    linear.to(torch.bfloat16)
    assert linear.dtype == torch.bfloat16
    assert linear.bias.dtype == torch.bfloat16
    for name, x in before.items():
        assert linear.state_dict()[name].dtype == x.dtype
        assert torch.equal(linear.state_dict()[name], x)
    assert linear.double()(torch.randn(2, 40).double()).dtype == torch.float64


@pytest.mark.usefixtures("unchecked")
def test_bad_weights_and_inputs_are_named():
    for format, value in (("int8", torch.nan), ("int4", torch.inf), ("bfloat16", -torch.inf), ("float16", 1e6)):
        with pytest.raises(ValueError, match="cannot hold weights that are not finite"):
            quantize_tensor(torch.full((2, 40), value), format)
    with pytest.raises(ValueError, match="weights must be one of bfloat16, float16, int8, int4, got 'int2'"):
        quantize_tensor(torch.zeros(2, 2), "int2")
    stored = quantize_tensor(torch.randn(4, 40), "int8")
    with pytest.raises(ValueError, match="x must have 40 channels"):
        quantized_linear(torch.randn(2, 41), stored)
    for bad in (stored._replace(width=41), stored._replace(scales=None), stored._replace(codes=stored.codes[:, :3])):
        with pytest.raises(ValueError, match="must be"):
            quantized_linear(torch.randn(2, bad.width), bad)


@pytest.mark.parametrize("rows", [3, 200])
def test_autocast_does_not_round_the_sums(rows):
    x, weight = torch.randn(rows, 64), torch.randn(32, 64)
    stored = quantize_tensor(weight, "int8")
    with torch.autocast("cpu", torch.bfloat16):
        y = quantized_linear(x, stored)
    assert torch.equal(y, quantized_linear(x, stored))


@pytest.mark.usefixtures("unchecked")
def test_formats_with_the_same_dtype_are_told_apart_by_name(monkeypatch):
    """Bytes from 0 to 255 minus 128, in groups of 32: the dtype of int4's codes, which no kernel may take for int4."""

    def encode(weight_oi, format):
        groups_ogs = torch.nn.functional.pad(weight_oi.float(), (0, -weight_oi.shape[1] % 32)).unflatten(1, (-1, 32))
        scale_og1 = (groups_ogs.abs().amax(-1, keepdim=True) / 126).bfloat16().float()
        codes = ((groups_ogs / scale_og1).round().clamp(-128, 127) + 128).to(torch.uint8).flatten(1)
        return codes[:, : weight_oi.shape[1]], scale_og1.squeeze(-1).bfloat16()

    def decode(codes, scales_og, format, dtype):
        groups_ogs = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 32)).unflatten(1, (-1, 32)).to(dtype) - 128
        return (groups_ogs * scales_og.to(dtype).unsqueeze(-1)).flatten(1)

    monkeypatch.setitem(FORMAT_SPECS, "biased8", FormatSpec(torch.uint8, group_size=32))
    monkeypatch.setitem(ops._CODECS, "biased8", ops._Codec(encode, decode))
    plain, x = weight(9, 96), torch.randn(3, 96)
    linear = QuantizedLinear("biased8", 96, 9)
    linear.store(quantize_tensor(plain, "biased8"))
    assert linear.weight.dtype == QuantizedLinear("int4", 96, 9).weight.dtype == torch.uint8
    assert_near(dequantize_tensor(linear.stored), plain, 0.02)
    assert_near(linear(x), x.double() @ dequantize_tensor(linear.stored, torch.float64).T, FLOOR[torch.float32])
    with pytest.raises(ValueError, match="the weight must be in int4 of width 96, got biased8 of width 96"):
        QuantizedLinear("int4", 96, 9).store(linear.stored)
