"""The official functions of Mamba-3 against their formulas, token by token in float64."""

import importlib
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from anymamba.compat import install, uninstall
from tests.support import FLOOR, assert_all_near, assert_near

B, T, H, P, G, N = 2, 7, 4, 3, 2, 8
BOUNDS = [0, 1, 5, 7]


@pytest.fixture(autouse=True)
def stand_in():
    install()
    yield
    uninstall()


def official(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"mamba_ssm.ops.{module}"), name)


def rotate(x, angle, is_pairwise):
    """Rotate pairs of channels of x (b, r, h, n) by angles (b, h, s): neighbors, or channels half of n apart."""
    x, pairs, half = x.clone(), angle.shape[-1], x.shape[-1] // 2
    for i in range(pairs):
        first, second = (2 * i, 2 * i + 1) if is_pairwise else (i, half + i)
        cos, sin = torch.cos(angle[:, None, :, i]), torch.sin(angle[:, None, :, i])
        u, w = x[..., first].clone(), x[..., second].clone()
        x[..., first], x[..., second] = u * cos - w * sin, u * sin + w * cos
    return x


def unroll(inputs, states, is_pairwise):
    """Return y (b, t, r, h, p) before the gate and the states after the last token, by the formulas."""
    angle, ssm, last_k, last_v = states
    ys = []
    q_bias, k_bias = inputs["Q_bias"].transpose(0, 1), inputs["K_bias"].transpose(0, 1)
    weight = inputs["MIMO_V"].transpose(0, 1)
    for t in range(inputs["V"].shape[1]):
        dt, trap = inputs["DT"][..., t], torch.sigmoid(inputs["Trap"][..., t])
        angle = angle + math.pi * torch.tanh(inputs["Angles"][:, t]) * dt.unsqueeze(-1)
        k, q = (
            rotate(inputs[name][:, t].repeat_interleave(H // G, 2) + bias, angle, is_pairwise)
            for name, bias in (("K", k_bias), ("Q", q_bias))
        )
        v = inputs["V"][:, t].unsqueeze(1) * weight
        now = torch.einsum("brhp,brhn->bhpn", v, k)
        before = torch.einsum("brhp,brhn->bhpn", last_v.unsqueeze(1) * weight, last_k)
        alpha, dt, trap = torch.exp(inputs["ADT"][..., t])[..., None, None], dt[..., None, None], trap[..., None, None]
        ssm = alpha * (ssm + (1 - trap) * dt * before) + trap * dt * now
        y = torch.einsum("bhpn,brhn->brhp", ssm, q)
        ys.append(y if inputs["D"] is None else y + inputs["D"].unsqueeze(-1) * v)
        last_k, last_v = k, inputs["V"][:, t]
    return torch.stack(ys, 1), (angle, ssm, last_k, last_v)


def draw(rank, pairs, b=B):
    """Return random inputs in the layout of the MIMO function, float64."""
    shapes = {
        "Q": (b, T, rank, G, N),
        "K": (b, T, rank, G, N),
        "V": (b, T, H, P),
        "ADT": (b, H, T),
        "DT": (b, H, T),
        "Trap": (b, H, T),
        "Q_bias": (H, rank, N),
        "K_bias": (H, rank, N),
        "MIMO_V": (H, rank, P),
        "MIMO_Z": (H, rank, P),
        "MIMO_Out": (H, rank, P),
        "Angles": (b, T, H, pairs),
        "D": (H,),
        "Z": (b, T, H, P),
    }
    inputs = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return {**inputs, "ADT": -inputs["ADT"].abs(), "DT": F.softplus(inputs["DT"])}


def draw_states(rows, rank, pairs, is_empty=False):
    shapes = [(rows, H, pairs), (rows, H, P, N), (rows, rank, H, N), (rows, H, P)]
    return tuple((torch.zeros if is_empty else torch.randn)(shape, dtype=torch.float64) for shape in shapes)


def part_of(inputs, start, stop):
    time_of = {"Q": 1, "K": 1, "V": 1, "Angles": 1, "Z": 1, "ADT": 2, "DT": 2, "Trap": 2}
    return {
        name: x if x is None or name not in time_of else x.narrow(time_of[name], start, stop - start)
        for name, x in inputs.items()
    }


def siso(inputs, **options):
    """Call the official SISO function with inputs in the layout of the MIMO one."""
    arguments = {name: x for name, x in inputs.items() if not name.startswith("MIMO")}
    arguments |= {name: inputs[name].squeeze(2) for name in ("Q", "K")}
    arguments |= {name: inputs[name].squeeze(1) for name in ("Q_bias", "K_bias")}
    return official("triton.mamba3.mamba3_siso_combined.mamba3_siso_combined")(**arguments, **options)


def mimo(inputs, **options):
    divisor = N // inputs["Angles"].shape[-1]
    function = official("tilelang.mamba3.mamba3_mimo.mamba3_mimo")
    return function(**inputs, chunk_size=16, rotary_dim_divisor=divisor, dtype=torch.float32, **options)


def require_grad(inputs):
    return {name: None if x is None else x.clone().requires_grad_() for name, x in inputs.items()}


def gradients(results, heads, *leaves):
    named = {(i, name): x for i, group in enumerate(leaves) for name, x in group.items() if x is not None}
    total = sum((y * head).sum() for y, head in zip(results, heads, strict=True))
    grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {name: grad for name, grad in zip(named, grads, strict=True) if grad is not None}


def wrap(angle):
    return torch.stack([torch.cos(angle), torch.sin(angle)])


@pytest.mark.parametrize("pairs", [2, 4])
@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("is_plain", [False, True])
def test_siso_is_the_recurrence(pairs, continues, is_plain):
    inputs = draw(1, pairs) | {"MIMO_V": torch.ones(H, 1, P, dtype=torch.float64)}
    if is_plain:
        inputs |= {"D": None, "Z": None}
    states = draw_states(B, 1, pairs, is_empty=not continues)
    ours, definition = require_grad(inputs), require_grad(inputs)
    ours_states, definition_states = (require_grad(dict(enumerate(states))) for _ in range(2))
    angle, ssm, k, v = ours_states.values()
    options = {"Input_States": (angle, ssm, k.squeeze(1), v)} if continues else {}
    y, *after = siso(ours, return_final_states=True, **options)
    expected, expected_after = unroll(definition, definition_states.values(), is_pairwise=True)
    expected = expected.squeeze(2) if is_plain else expected.squeeze(2) * F.silu(definition["Z"])
    after[2] = after[2].unsqueeze(1)
    assert ((after[0] >= 0) & (after[0] < 2 * math.pi)).all()
    results = [y, wrap(after[0]), *after[1:]]
    expected_results = [expected, wrap(expected_after[0]), *expected_after[1:]]
    for i, (result, other) in enumerate(zip(results, expected_results, strict=True)):
        assert_near(result, other, FLOOR[torch.float64], str(i))
    heads = [torch.randn_like(result) for result in results]
    leaves = (ours, ours_states) if continues else (ours,)
    others = (definition, definition_states) if continues else (definition,)
    expected_grads = gradients(expected_results, heads, *others)
    expected_grads.pop((0, "MIMO_V"))
    assert_all_near(gradients(results, heads, *leaves), expected_grads, FLOOR[torch.float64])
    single = {name: None if x is None else x.float() for name, x in inputs.items()}
    if continues:
        options["Input_States"] = tuple(state.detach().float() for state in options["Input_States"])
    assert_near(siso(single, **options), expected, FLOOR[torch.float32])


@pytest.mark.parametrize("divisor", [2, 4])
@pytest.mark.parametrize("form", ["gated", "normalized", "by_rank", "gated_by_rank", "summed"])
def test_mimo_is_the_recurrence(divisor, form):
    inputs, rank = draw(3, N // divisor), 3
    if form in ("by_rank", "summed"):
        inputs |= {"Z": None, "MIMO_Z": None}
    if form.endswith("by_rank"):
        inputs["MIMO_Out"] = None
    ours, definition = require_grad(inputs), require_grad(inputs)
    options = {}
    if form == "normalized":
        weight = torch.randn(H, P, dtype=torch.float64)
        options = {"fuse_pregate_headwise_rms_norm": True, "outproj_norm_weight": weight, "outproj_norm_eps": 1e-3}
    y, *after = mimo(ours, return_state=True, **options)
    expected, expected_after = unroll(definition, draw_states(B, rank, N // divisor, is_empty=True), is_pairwise=False)
    if form == "normalized":
        expected = expected / (expected.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    if definition["Z"] is not None:
        expected = expected * F.silu(definition["Z"].unsqueeze(2) * definition["MIMO_Z"].transpose(0, 1))
    if definition["MIMO_Out"] is not None:
        expected = (expected * definition["MIMO_Out"].transpose(0, 1)).sum(2)
    results = [y, wrap(after[0]), *after[1:]]
    expected_results = [expected, wrap(expected_after[0]), *expected_after[1:]]
    for i, (result, other) in enumerate(zip(results, expected_results, strict=True)):
        assert_near(result, other, FLOOR[torch.float64], str(i))
    heads = [torch.randn_like(result) for result in results]
    expected_grads = gradients(expected_results, heads, definition)
    assert_all_near(gradients(results, heads, ours), expected_grads, FLOOR[torch.float64])
    if form == "normalized":
        assert_near(mimo(inputs, **options | {"outproj_norm_weight": weight.flatten()}), y, 0)
        plain = mimo(inputs, **options | {"outproj_norm_weight": None})
        assert_near(plain, mimo(inputs, **options | {"outproj_norm_weight": torch.ones_like(weight)}), 0)


@pytest.mark.parametrize("function", [siso, mimo])
def test_packed_sequences_are_sequences_alone(function):
    rank = 1 if function is siso else 2
    inputs = draw(rank, N // 2, b=1)
    cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32)
    word = "return_final_states" if function is siso else "return_state"
    y, *after = function(inputs, cu_seqlens=cu_seqlens, **{word: True})
    parts = [function(part_of(inputs, start, stop), **{word: True}) for start, stop in itertools.pairwise(BOUNDS)]
    assert_near(y, torch.cat([part[0] for part in parts], 1), FLOOR[torch.float64])
    for i, state in enumerate(after, 1):
        assert_near(state, torch.cat([part[i] for part in parts]), FLOOR[torch.float64])


@pytest.mark.parametrize("is_pairwise", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("conjugate", [True, False])
def test_the_rotation_of_a_token_is_its_formula(is_pairwise, has_bias, conjugate):
    rotation = official("triton.mamba3.mamba3_mimo_rotary_step.apply_rotary_qk_inference_fwd")
    q, k = torch.randn(2, B, 3, H, N, dtype=torch.float64)
    angle, rate, dt = torch.randn(B, H, 2).double(), torch.randn(B, H, 2).double(), torch.rand(B, H).double()
    bias_q, bias_k = torch.randn(2, 3, H, N, dtype=torch.float64) if has_bias else (None, None)
    expected_angle = angle + math.pi * torch.tanh(rate) * dt.unsqueeze(-1)
    turned = -expected_angle if conjugate else expected_angle
    expected = [rotate(x if bias is None else x + bias, turned, is_pairwise) for x, bias in ((q, bias_q), (k, bias_k))]
    options = {"bias_q": bias_q, "bias_k": bias_k, "conjugate": conjugate, "rotate_pairwise": is_pairwise}
    results = rotation(q, k, angle, rate, dt, **options)
    for result, other in zip(results, (*expected, expected_angle), strict=True):
        assert_near(result, other, FLOOR[torch.float64])
    changed = (q.bfloat16(), k.clone(), angle.clone())
    results = rotation(*changed, rate, dt, inplace=True, **options)
    assert all(new is old for new, old in zip(results, changed, strict=True))
    assert_near(changed[0], expected[0], FLOOR[torch.bfloat16])
    assert_near(changed[1], expected[1], FLOOR[torch.float64])


@pytest.mark.parametrize("form", ["gated", "by_rank", "in_place"])
def test_a_step_is_a_token_of_the_recurrence(form):
    step = official("cute.mamba3.mamba3_step_fn.mamba3_step_fn")
    inputs, states = part_of(draw(2, 2), 0, 1), draw_states(B, 2, 2)
    y, after = unroll(inputs, states, is_pairwise=False)
    y, (_, ssm, k, _) = y.squeeze(1), after
    q = rotate(inputs["Q"][:, 0].repeat_interleave(2, 2) + inputs["Q_bias"].transpose(0, 1), after[0], False)
    x, dt = inputs["V"][:, 0], inputs["DT"][..., 0]
    rates, trap = inputs["ADT"][..., 0] / dt, torch.sigmoid(inputs["Trap"][..., 0])
    weights = {name: inputs[f"MIMO_{name}"].transpose(0, 1) for name in ("V", "Z", "Out")}
    out, new = torch.empty_like(y if form == "by_rank" else x), torch.empty_like(ssm)
    state = states[1].clone()
    arguments = (state, states[2], states[3], rates, k, q, inputs["D"], x, dt, trap, weights["V"])
    gate = {"z": inputs["Z"][:, 0], "zproj": weights["Z"]}
    if form == "by_rank":
        assert step(*arguments, state_out=new, out=out) is None
        expected = y
    else:
        expected = (y * F.silu(inputs["Z"][:, 0].unsqueeze(1) * weights["Z"]) * weights["Out"]).sum(1)
        state_out = None if form == "in_place" else new
        step(*arguments, outproj=weights["Out"], state_out=state_out, out=out, **gate)
    assert_near(out, expected, FLOOR[torch.float64])
    assert_near(state if form == "in_place" else new, ssm, FLOOR[torch.float64])
    if form != "in_place":
        assert torch.equal(state, states[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_half_and_computes_wide(dtype):
    inputs = draw(1, 4)
    half = {name: x if name in ("ADT", "DT") else x.to(dtype) for name, x in inputs.items()}
    y, angle, ssm, k, v = siso(
        half | {"ADT": inputs["ADT"].float(), "DT": inputs["DT"].float()}, return_final_states=True
    )
    assert [x.dtype for x in (y, angle, ssm, k, v)] == [dtype, torch.float32, torch.float32, dtype, dtype]
    exact = siso({name: x.double() for name, x in half.items()})
    assert_near(y, exact, 2 * FLOOR[dtype])


def test_a_mistake_raises_one_clear_error(unchecked):
    inputs = draw(2, 4)
    with pytest.raises(ValueError, match=r"rotary_dim_divisor must be 8 / 4, .* got 4"):
        official("tilelang.mamba3.mamba3_mimo.mamba3_mimo")(
            **inputs, chunk_size=16, rotary_dim_divisor=4, dtype=torch.float32
        )
    with pytest.raises(ValueError, match="fuse_pregate_headwise_rms_norm needs Z and MIMO_Out"):
        mimo(inputs | {"MIMO_Out": None}, fuse_pregate_headwise_rms_norm=True)
    with pytest.raises(ValueError, match="Z needs MIMO_Z"):
        mimo(inputs | {"MIMO_Z": None})
    step = official("cute.mamba3.mamba3_step_fn.mamba3_step_fn")
    x, key, weight = torch.randn(B, H, P), torch.randn(B, 2, H, N), torch.randn(2, H, P)
    number = torch.rand(B, H)
    arguments = (torch.zeros(B, H, P, N), key, x, -number, key, key, torch.ones(H), x, number, number, weight)
    with pytest.raises(ValueError, match=r"out must be a tensor of shape \(2, 2, 4, 3\), got \(2, 4, 3\)"):
        step(*arguments, out=torch.empty(B, H, P))
    with pytest.raises(ValueError, match="z needs zproj"):
        step(*arguments, outproj=weight, out=torch.empty(B, H, P), z=x)
