"""Against vectors recorded from the official functions, through the official names."""

import importlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anymamba.compat import install, uninstall
from tests.support import assert_near

GOLDEN = Path(__file__).parents[1] / "golden" / "functions"
INDEX = json.loads((GOLDEN / "index.json").read_text())


@pytest.fixture(autouse=True)
def stand_in():
    install()
    yield
    uninstall()


def official(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def recorded(case, **kwargs):
    """Return the function, its arguments, and the file's tensors."""
    tensors = load_file(GOLDEN / f"{case}.safetensors")
    options = {**INDEX[case]["options"], **kwargs}
    arguments = {name[3:]: x for name, x in tensors.items() if name.startswith("in.")}
    if options.pop("expanded_with_stride_zero", False):
        for name in ("dt", "A", "dt_bias"):
            keep = (slice(None),) * (2 if name == "dt" else 1)
            arguments[name] = arguments[name][(*keep, *([slice(1)] * (arguments[name].ndim - len(keep))))].expand_as(
                arguments[name]
            )
    return official(INDEX[case]["function"]), {**arguments, **options}, tensors


def call(function, arguments):
    if function.__name__ == "rmsnorm_fn":
        arguments = {"bias": None, **arguments}
    results = function(**arguments)
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("case", INDEX)
def test_results_states_and_gradients_are_the_official_ones(case):
    function, arguments, golden = recorded(case)
    grads = [name[9:] for name in golden if name.startswith("out.grad.")]
    for name in grads:
        arguments[name] = arguments[name].clone().requires_grad_()
    results = call(function, arguments)
    for i, result in enumerate(results):
        assert_near(result, golden[f"out.{i}"], 5e-6, f"{case}.{i}")
    for name in ("state", "conv_state"):
        if f"out.{name}_after" in golden:
            assert_near(arguments[name], golden[f"out.{name}_after"], 5e-6, name)
    if grads:
        sum((result * golden[f"out.head.{i}"]).sum() for i, result in enumerate(results)).backward()
    for name in grads:
        assert_near(arguments[name].grad, golden[f"out.grad.{name}"], 1e-5, name)


def test_every_recorded_function_is_tested():
    assert len(INDEX) == 22


@pytest.mark.parametrize("case", ["chunk_scan_plain", "chunk_scan_all"])
def test_packed_rows_are_sequences_alone(case):
    function, arguments, _ = recorded(case)
    initial = torch.randn(2, 4, 6, 5)
    seq_idx = torch.tensor([[0] * 7 + [1] * 12 + [4] * 5, [3] * 20 + [5] * 4], dtype=torch.int32)
    packed = {"initial_states": initial, "return_final_states": True}
    y, final = function(**arguments, **packed, seq_idx=seq_idx)
    ends = []
    for row, bounds in enumerate(([0, 7, 19, 24], [0, 20, 24])):
        for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
            parts = {
                k: v[row : row + 1, start:stop]
                if isinstance(v, torch.Tensor) and v.ndim > 2 and v.shape[1] == 24
                else v
                for k, v in arguments.items()
            }
            first = initial[row : row + 1] if i == 0 else None
            alone, state = function(**parts, initial_states=first, return_final_states=True)
            assert_near(y[row : row + 1, start:stop], alone, 5e-6)
        ends.append(state)
    assert_near(final, torch.cat(ends), 5e-6)


def test_states_of_packed_sequences_are_those_of_sequences_alone():
    function, arguments, _ = recorded("chunk_scan_plain")
    one = {k: v[:1] if isinstance(v, torch.Tensor) and v.ndim > 1 else v for k, v in arguments.items()}
    bounds = torch.tensor([0, 7, 19, 24], dtype=torch.int32)
    seq_idx = torch.tensor([[0] * 7 + [1] * 12 + [2] * 5], dtype=torch.int32)
    options = {"cu_seqlens": bounds, "return_final_states": True, "return_varlen_states": True}
    y, final, states = function(**one, seq_idx=seq_idx, **options)
    _, _, alike = function(**one, **options)  # boundaries for the states alone
    assert_near(states, alike, 5e-6)
    assert_near(final, states[-1:], 5e-6)
    part = {k: v[:, 7:19] if isinstance(v, torch.Tensor) and v.ndim > 1 else v for k, v in one.items()}
    y_part, state = function(**part, return_final_states=True)
    assert_near(y[:, 7:19], y_part, 5e-6)
    assert_near(states[1:2], state, 5e-6)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_packed_convolutions_are_sequences_alone(activation):
    conv = official("causal_conv1d.causal_conv1d_fn")
    x, weight, bias = torch.randn(2, 5, 11), torch.randn(5, 4), torch.randn(5)
    seq_idx = torch.tensor([[0] * 2 + [1] * 8 + [-1], [7] * 11], dtype=torch.int32)
    y = conv(x, weight, bias, seq_idx=seq_idx, activation=activation)
    for row, start, stop in ((0, 0, 2), (0, 2, 10), (1, 0, 11)):
        alone = conv(x[row : row + 1, :, start:stop], weight, bias, activation=activation)
        assert_near(y[row : row + 1, :, start:stop], alone, 5e-6)
    assert not y[0, :, 10].any()


def test_a_convolution_in_parts_is_the_whole():
    conv, update = official("causal_conv1d.causal_conv1d_fn"), official("causal_conv1d.causal_conv1d_update")
    varlen = official("causal_conv1d.causal_conv1d_varlen.causal_conv1d_varlen_states")
    x, weight, bias = torch.randn(2, 5, 11), torch.randn(5, 4), torch.randn(5)
    whole, last = conv(x, weight, bias, activation="silu", return_final_states=True)
    assert torch.equal(conv(x, weight, bias, "silu"), whole)  # in the order of arguments of the first version
    out = torch.empty(2, 5, 3)
    first, state = conv(x[..., :2], weight, bias, return_final_states=True, final_states_out=out, activation="silu")
    assert state is out
    rest = conv(x[..., 2:], weight, bias, initial_states=state, activation="swish")
    assert_near(torch.cat([first, rest], 2), whole, 5e-6)
    state, ring, rows = torch.zeros(2, 5, 3), torch.zeros(2, 5, 6), torch.zeros(4, 5, 3)
    for t in range(11):
        positions = torch.full((2,), t, dtype=torch.int32)
        for y in (
            update(x[..., t], state, weight, bias, "silu"),
            update(x[..., t], ring, weight, bias, "silu", cache_seqlens=positions),
            update(x[..., t], rows, weight, bias, True, conv_state_indices=torch.tensor([3, 1])),
        ):
            assert_near(y, whole[..., t], 5e-6)
    assert_near(state, last, 5e-6)
    assert_near(rows[[3, 1]], last, 5e-6)
    assert not rows[[0, 2]].any()
    packed = x[0].t()
    states = varlen(packed, torch.tensor([0, 2, 11]), 3)
    assert_near(states[1], packed[8:].t(), 0)
    assert_near(states[0], torch.cat([torch.zeros(1, 5), packed[:2]]).t(), 0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("softplus", [False, True])
def test_updates_unrolled_are_the_scan(tied, softplus):
    scan = official("mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined")
    update = official("mamba_ssm.ops.triton.selective_state_update.selective_state_update")
    x, z, dt = torch.randn(2, 9, 4, 6), torch.randn(2, 9, 4, 6), torch.rand(2, 9, 4)
    a, b, c, d = -torch.rand(4), torch.randn(2, 9, 2, 5), torch.randn(2, 9, 2, 5), torch.randn(4)
    bias = torch.rand(4)
    whole, final = scan(x, dt, a, b, c, 8, d, z, dt_bias=bias, dt_softplus=softplus, return_final_states=True)
    states, rows = torch.zeros(5, 4, 6, 5), torch.tensor([4, 2])
    dts = dt.unsqueeze(-1).expand(-1, -1, -1, 6)
    rates, skip, offset = a[:, None, None].expand(4, 6, 5), d[:, None].expand(4, 6), bias[:, None].expand(4, 6)
    if not tied:
        dts, rates, offset = dts.clone(), rates.clone(), offset.clone()
    for t in range(9):
        y = update(states, x[:, t], dts[:, t], rates, b[:, t], c[:, t], skip, z[:, t], offset, softplus, rows)
        assert_near(y, whole[:, t], 5e-6)
    assert_near(states[rows], final, 5e-6)
    assert not states[[0, 1, 3]].any()


def test_a_step_of_zero_keeps_the_state_and_has_a_gradient():
    scan = official("mamba_ssm.selective_scan_fn")
    u, delta = torch.randn(1, 2, 3).double(), torch.zeros(1, 2, 3).double().requires_grad_()
    a, b, c = -torch.rand(2, 4).double(), torch.randn(1, 4, 3).double(), torch.randn(1, 4, 3).double()
    y, last = scan(u, delta, a, b, c, return_last_state=True)
    assert not last.abs().max() > 1e-20
    y.sum().backward()
    expected = u[..., 0] * (b[0, :, 0] * c[0, :, 0]).sum()  # the first step's own, where all others keep the state
    later = sum(u[..., 0] * (b[0, :, 0] * c[0, :, t]).sum() for t in (1, 2))
    assert_near(delta.grad[..., 0], expected + later, 1e-10)


@pytest.mark.parametrize("is_rms", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_norms_with_a_bias_are_torchs(is_rms, fused):
    x, z, weight, bias = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.randn(8)
    silu = torch.nn.functional.silu
    plain = torch.nn.functional.rms_norm if is_rms else torch.nn.functional.layer_norm
    if fused:
        norm = official("mamba_ssm.ops.triton.layer_norm.layer_norm_fn")
        options = {"eps": 1e-5, "is_rms_norm": is_rms, "prenorm": True}
        out, out1, total = norm(x, weight, bias, residual=z, x1=z, weight1=bias, **options)
        assert_near(total, x + 2 * z, 5e-6)
        assert_near(out, plain(x + 2 * z, (8,), eps=1e-5) * weight + bias, 5e-6)
        assert_near(out1, plain(x + 2 * z, (8,), eps=1e-5) * bias, 5e-6)
        return
    norm = official("mamba_ssm.ops.triton.layernorm_gated.layernorm_fn")
    normed = plain(x.unflatten(1, (2, 4)), (4,), eps=1e-6).flatten(1)
    assert_near(norm(x, weight, bias, z, group_size=4, is_rms_norm=is_rms), (normed * weight + bias) * silu(z), 5e-6)
    gated = plain((x * silu(z)).unflatten(1, (2, 4)), (4,), eps=1e-6).flatten(1) * weight + bias
    first = norm(x, weight, bias, z, group_size=4, is_rms_norm=is_rms, norm_before_gate=False)
    assert_near(first, gated, 5e-6)


def test_half_precision_stays_half_and_computes_wide():
    scan = official("mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined")
    x, dt, b = torch.randn(2, 9, 4, 6).bfloat16(), torch.rand(2, 9, 4).bfloat16(), torch.randn(2, 9, 1, 5).bfloat16()
    y, final = scan(x, dt, -torch.rand(4), b, b, 8, return_final_states=True, state_dtype=torch.float64)
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float64)
    update = official("mamba_ssm.ops.triton.selective_state_update.selective_state_update")
    state, a = torch.zeros(2, 5, 6).bfloat16(), -torch.rand(5, 6)
    y = update(
        state, *(torch.randn(2, 5).bfloat16() for _ in range(2)), a, *torch.randn(2, 2, 6).bfloat16(), dt_softplus=True
    )
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.bfloat16)
    assert state.any()


def test_unsupported_arguments_raise_one_clear_error(unchecked):
    scan = official("mamba_ssm.selective_scan_fn")
    x, a, b = torch.randn(1, 2, 3), -torch.rand(2, 4), torch.randn(1, 4, 3)
    with pytest.raises(NotImplementedError, match=r"mamba_ssm.selective_scan_fn with a complex A"):
        scan(x, x, a.to(torch.complex64), b, b)
    with pytest.raises(ValueError, match="must not be negative, got down to -"):
        scan(x, -x.abs(), a, b, b)
    conv = official("causal_conv1d.causal_conv1d_fn")
    with pytest.raises(ValueError, match='activation must be None, "silu" or "swish", got \'gelu\''):
        conv(x, torch.randn(2, 4), activation="gelu")
    with pytest.raises(ValueError, match="seq_idx cannot be combined with initial_states"):
        conv(x, torch.randn(2, 4), seq_idx=torch.zeros(1, 3, dtype=torch.int32), return_final_states=True)
    with pytest.raises(ValueError, match=r"seq_idx must have shape \(b=1, t=3\) on cpu, got \(1, 4\)"):
        conv(x, torch.randn(2, 4), seq_idx=torch.zeros(1, 4, dtype=torch.int32))
    norm = official("mamba_ssm.ops.triton.layer_norm.layer_norm_fn")
    with pytest.raises(NotImplementedError, match=r"mamba_ssm.*layer_norm_fn with return_dropout_mask"):
        norm(x, torch.ones(3), None, return_dropout_mask=True)
