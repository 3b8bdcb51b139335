"""Functions that have no recorded vectors, against their formulas in float64."""

import importlib
import importlib.util
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anymamba.compat import install, uninstall
from tests.support import FLOOR, assert_all_near, assert_near

B, D, L, N, R, W = 2, 6, 9, 4, 3, 4


@pytest.fixture(autouse=True)
def stand_in():
    install()
    yield
    uninstall()


def official(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"mamba_ssm.{module}"), name)


def draw_block(has_bias=True):
    """Return the arguments of a block after its first projection, float64."""
    shapes = {
        "xz": (B, 2 * D, L),
        "conv1d_weight": (D, 1, W),
        "conv1d_bias": (D,),
        "x_proj_weight": (R + 2 * N, D),
        "delta_proj_weight": (D, R),
        "A": (D, N),
        "D": (D,),
        "delta_bias": (D,),
    }
    if has_bias:
        shapes |= {"B_proj_bias": (N,), "C_proj_bias": (N,)}
    arguments = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return arguments | {"A": -arguments["A"].exp()}


def scan(x, delta, rates, b, c, skip, z):
    """Return the gated outputs of Mamba-1's recurrence, (b, d, l)."""
    state, ys = x.new_zeros(B, D, N), []
    for t in range(L):
        dt = delta[..., t].unsqueeze(-1)
        state = torch.exp(dt * rates) * state + dt * b[:, None, :, t] * x[..., t].unsqueeze(-1)
        ys.append((state * c[:, None, :, t]).sum(-1) + skip * x[..., t])
    return torch.stack(ys, -1) * F.silu(z)


def run_block(arguments, rates_back=None):
    """Return the sum of the gated outputs of a scan and, with rates for it, of one from the last token to the first."""
    x, z = arguments["xz"].chunk(2, dim=1)
    padded = F.pad(x, (W - 1, 0))
    taps = arguments["conv1d_weight"].squeeze(1)
    conv = sum(padded[..., i : i + L] * taps[:, i, None] for i in range(W)) + arguments["conv1d_bias"].unsqueeze(-1)
    x = F.silu(conv)
    selected = torch.einsum("od,bdl->bol", arguments["x_proj_weight"], x)
    dt, b, c = selected.split([R, N, N], dim=1)
    if "B_proj_bias" in arguments:
        b, c = b + arguments["B_proj_bias"].unsqueeze(-1), c + arguments["C_proj_bias"].unsqueeze(-1)
    dt = torch.einsum("dr,brl->bdl", arguments["delta_proj_weight"], dt) + arguments["delta_bias"].unsqueeze(-1)
    inputs, skip = (F.softplus(dt), b, c), arguments["D"]
    y = scan(x, inputs[0], arguments["A"], *inputs[1:], skip, z)
    if rates_back is None:
        return y
    x, z, dt, b, c = (part.flip(-1) for part in (x, z, *inputs))
    return y + scan(x, dt, rates_back, b, c, skip, z).flip(-1)


def grads_of(y, head, leaves):
    return dict(zip(leaves, torch.autograd.grad((y * head).sum(), list(leaves.values())), strict=True))


@pytest.mark.parametrize("has_bias", [True, False])
def test_vims_inner_function_is_a_block_without_its_last_projection(has_bias):
    leaves = {name: x.requires_grad_() for name, x in draw_block(has_bias).items()}
    y, expected = official("ops.selective_scan_interface.mamba_inner_fn_no_out_proj")(**leaves), run_block(leaves)
    assert_near(y, expected, FLOOR[torch.float64])
    head = torch.randn_like(expected)
    assert_all_near(grads_of(y, head, leaves), grads_of(expected, head, leaves), FLOOR[torch.float64])
    constants = {"B": torch.randn(D, N).double(), "C": torch.randn(B, N, L).double()}
    inner = official("ops.selective_scan_interface.mamba_inner_fn_no_out_proj")(**leaves, **constants)
    out = {"out_proj_weight": torch.eye(D).double(), "out_proj_bias": None}
    whole = official("ops.selective_scan_interface.mamba_inner_fn")(**leaves, **out, **constants)
    assert_near(inner.transpose(1, 2), whole, FLOOR[torch.float64])


@pytest.mark.parametrize("has_bias", [True, False])
def test_vims_bidirectional_function_adds_a_scan_from_the_end(has_bias):
    arguments = draw_block() | {"A_b": -torch.rand(D, N).double(), "out_proj_weight": torch.randn(5, D).double()}
    if has_bias:
        arguments["out_proj_bias"] = torch.randn(5, dtype=torch.float64)
    leaves = {name: x.requires_grad_() for name, x in arguments.items()}
    y = official("ops.selective_scan_interface.bimamba_inner_fn")(**{"out_proj_bias": None, **leaves})
    both = run_block(leaves, leaves["A_b"])
    expected = F.linear(both.transpose(1, 2), leaves["out_proj_weight"], leaves.get("out_proj_bias"))
    assert_near(y, expected, FLOOR[torch.float64])
    head = torch.randn_like(expected)
    assert_all_near(grads_of(y, head, leaves), grads_of(expected, head, leaves), FLOOR[torch.float64])


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("continues", [False, True])
def test_the_short_form_of_mamba2_is_the_recurrence(groups, continues):
    x, rates = torch.randn(B, L, 3, 5).double(), -torch.rand(B, L, 3).double()
    b, c = torch.randn(2, B, L, groups, N, dtype=torch.float64)
    initial = torch.randn(B, 1, 3, 5, N).double() if continues else None
    leaves = {"X": x, "A": rates, "B": b, "C": c} | ({"initial_states": initial} if continues else {})
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    y, final = official("modules.ssd_minimal.ssd_minimal_discrete")(**leaves, block_len=4)
    state, ys = x.new_zeros(B, 3, 5, N) if initial is None else initial.squeeze(1), []
    for t in range(L):
        keys, queries = (part[:, t].expand(B, 3, N) for part in (b, c))
        state = torch.exp(rates[:, t])[..., None, None] * state + x[:, t].unsqueeze(-1) * keys.unsqueeze(2)
        ys.append((state * queries.unsqueeze(2)).sum(-1))
    expected = torch.stack(ys, 1)
    assert_near(y, expected, FLOOR[torch.float64])
    assert_near(final, state, FLOOR[torch.float64])
    heads = torch.randn_like(expected), torch.randn_like(final)
    grads = grads_of(torch.cat([(y * heads[0]).flatten(), (final * heads[1]).flatten()]), 1, leaves)
    total = torch.cat([(expected * heads[0]).flatten(), (state * heads[1]).flatten()])
    assert_all_near(grads, grads_of(total, 1, leaves), FLOOR[torch.float64])
    half = official("modules.ssd_minimal.ssd_minimal_discrete")(*(leaf.bfloat16() for leaf in (x, rates, b, c)), 4)
    assert [part.dtype for part in half] == [torch.bfloat16] * 2


def test_segment_sums_are_sums_over_segments():
    x = torch.randn(2, 5, dtype=torch.float64)
    sums = official("modules.ssd_minimal.segsum")(x)
    for i in range(5):
        for j in range(5):
            expected = x[:, j + 1 : i + 1].sum(-1) if j <= i else torch.full((2,), -math.inf).double()
            assert torch.allclose(sums[:, i, j], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("group_size", [None, 4])
def test_the_reference_of_the_gated_norm_is_its_formula(norm_first, group_size):
    x, z = torch.randn(2, 3, 8, dtype=torch.float64)
    weight, bias = torch.randn(2, 8, dtype=torch.float64)
    leaves = {"x": x, "z": z, "weight": weight, "bias": bias}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    y = official("ops.triton.layernorm_gated.rms_norm_ref")(
        **leaves, eps=1e-3, group_size=group_size, norm_before_gate=norm_first
    )
    u = (x if norm_first else x * F.silu(z)).unflatten(-1, (-1, group_size or 8))
    normed = (u / (u.square().mean(-1, keepdim=True) + 1e-3).sqrt()).flatten(-2) * weight + bias
    expected = normed * F.silu(z) if norm_first else normed
    assert_near(y, expected, FLOOR[torch.float64])
    head = torch.randn_like(expected)
    assert_all_near(grads_of(y, head, leaves), grads_of(expected, head, leaves), FLOOR[torch.float64])


def test_official_initial_values_are_set_module_by_module():
    initialize = official("models.mixer_seq_simple._init_weights")
    mixer = official("modules.mamba_simple.Mamba")(64, bias=True)
    steps, projected = mixer.dt_proj.bias.clone(), mixer.in_proj.weight.clone()
    embedding = nn.Embedding(500, 64)
    model = nn.ModuleDict({"embedding": embedding, "mixer": mixer, "fc2": nn.Linear(64, 64)})
    model.apply(partial(initialize, n_layer=8, initializer_range=0.5, n_residuals_per_layer=2))
    assert torch.equal(mixer.dt_proj.bias, steps)  # it is most of the step size, and is never reset
    assert torch.equal(mixer.in_proj.weight, projected)
    assert not mixer.in_proj.bias.any()
    assert not model["fc2"].bias.any()
    assert abs(embedding.weight.std().item() - 0.5) < 0.02
    for weight in (mixer.out_proj.weight, model["fc2"].weight):  # uniform in ± 1 / √inputs, divided by √16
        bound = 1 / math.sqrt(weight.shape[1]) / 4
        assert 0.95 * bound < weight.abs().max().item() <= bound
    before = mixer.out_proj.weight.clone()
    model.apply(partial(initialize, n_layer=8, rescale_prenorm_residual=False))
    assert torch.equal(mixer.out_proj.weight, before)


def test_a_model_takes_options_of_its_initial_values():
    model = official("models.mixer_seq_simple.MixerModel")(
        32, 4, 64, 1000, rms_norm=True, initializer_cfg={"initializer_range": 0.3}
    )
    assert abs(model.embedding.weight.std().item() - 0.3) < 0.02
    bound = 1 / math.sqrt(64) / math.sqrt(2 * 4)
    assert 0.9 * bound < model.layers[0].mixer.out_proj.weight.abs().max().item() <= bound


def test_a_model_of_the_first_versions_has_no_mlp():
    model = official("models.mixer_seq_simple.MixerModel")(d_model=16, n_layer=1, vocab_size=20)
    assert model.layers[0].mlp is None


def test_the_residual_layer_of_the_first_versions_takes_no_mlp():
    former, layer = official("modules.mamba_simple.Block"), official("modules.block.Block")
    mixer, norm = partial(official("modules.mamba_simple.Mamba"), d_state=4), partial(nn.LayerNorm, eps=1e-3)
    old = former(8, mixer, norm, True, True)
    new = layer(8, mixer, nn.Identity, norm, True, True)
    new.load_state_dict(old.state_dict())
    x = torch.randn(2, 5, 8)
    for mine, others in zip(old(x, x), new(x, x), strict=True):
        assert torch.equal(mine, others)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", ["v1", "v2"])
@pytest.mark.parametrize("halves", [False, True])
def test_a_block_in_both_directions_is_vims(kind, halves):
    options = {"bimamba_type": kind, "if_divide_out": halves, "init_layer_scale": 0.5, "bias": True}
    block = official("modules.mamba_simple.Mamba")(3, d_state=N, dt_rank=R, **options, dtype=torch.float64)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    u = torch.randn(B, L, 3, dtype=torch.float64, requires_grad=True)
    y = block(u)
    named = dict(block.named_parameters())

    def arguments_of(suffix, xz):
        names = {"conv1d_weight": f"conv1d{suffix}.weight", "conv1d_bias": f"conv1d{suffix}.bias"}
        names |= {"x_proj_weight": f"x_proj{suffix}.weight", "delta_proj_weight": f"dt_proj{suffix}.weight"}
        names |= {"D": f"D{suffix}", "delta_bias": f"dt_proj{suffix}.bias"}
        rates = -named["A_b_log" if suffix else "A_log"].exp()
        return {argument: named[name] for argument, name in names.items()} | {"xz": xz, "A": rates}

    xz = F.linear(u, named["in_proj.weight"], named["in_proj.bias"]).transpose(1, 2)
    if kind == "v1":
        scanned = run_block(arguments_of("", xz), -named["A_b_log"].exp())
    else:
        scanned = run_block(arguments_of("", xz)) + run_block(arguments_of("_b", xz.flip(-1))).flip(-1)
        scanned = scanned / 2 if halves else scanned
    expected = F.linear(scanned.transpose(1, 2), named["out_proj.weight"], named["out_proj.bias"]) * named["gamma"]
    assert_near(y, expected, FLOOR[torch.float64])
    leaves, head = {**named, "u": u}, torch.randn_like(expected)
    assert_all_near(grads_of(y, head, leaves), grads_of(expected, head, leaves), FLOOR[torch.float64])
    initial = official("modules.mamba_simple.Mamba")(8, d_state=N, bimamba_type=kind)
    assert torch.equal(initial.A_b_log, initial.A_log)
    assert initial.A_b_log._no_weight_decay
    assert initial(torch.randn(B, L, 8)).shape == (B, L, 8)
    with pytest.raises(NotImplementedError, match=r"bimamba_type and inference_params: it reads later tokens"):
        initial(torch.randn(B, L, 8), inference_params=object())
    with pytest.raises(ValueError, match=r"bimamba_type must be one of none, v1, v2, got 'v3'"):
        official("modules.mamba_simple.Mamba")(8, bimamba_type="v3")


def test_filters_of_logits_remove_the_least_likely_tokens_in_place():
    rows = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3]]).log()
    for name, limit, expected in (
        ("top_k", 2, [[1, 0, 1], [0, 1, 1]]),
        ("top_p", 0.75, [[1, 0, 1], [0, 1, 1]]),
        ("top_p", 0.4, [[1, 0, 0], [0, 1, 0]]),
        ("top_p", 0.0, [[1, 1, 1], [1, 1, 1]]),
        ("min_p", 0.0, [[1, 1, 1], [1, 1, 1]]),
    ):
        logits = rows.clone()
        assert official(f"utils.generation.modify_logits_for_{name}_filtering")(logits, limit) is None
        assert torch.isfinite(logits).int().tolist() == expected
        assert torch.equal(logits[torch.isfinite(logits)], rows[torch.isfinite(logits)])
    logits = torch.tensor([[0.2, 0.7]])  # min_p is compared with what is passed
    official("utils.generation.modify_logits_for_min_p_filtering")(logits, 0.5)
    assert logits.tolist() == [[-math.inf, pytest.approx(0.7)]]


def test_an_import_of_everything_brings_what_the_official_module_imports():
    names = {}
    exec("from mamba_ssm.utils.generation import *", names)
    from dataclasses import dataclass

    assert names["dataclass"] is dataclass
    assert names["torch"] is torch
    assert names["F"] is F
    assert names["InferenceParams"] is official("utils.generation.InferenceParams")
    if importlib.util.find_spec("transformers") is not None:
        from transformers.generation import GenerateDecoderOnlyOutput, TextStreamer

        assert names["TextStreamer"] is TextStreamer
        assert names["SampleDecoderOnlyOutput"] is GenerateDecoderOnlyOutput
