"""Stacks: what holds for a block holds for any composition of blocks."""

import itertools

import pytest
import torch

from anymamba import Stack, StackCache, StackConfig
from anymamba.models.stack.residual_layer import EPS
from anymamba.models.stack.stack_config import PAIR_SCHEDULES, layer_order
from tests.support import assert_all_near, assert_near

WIDTH = 16
BLOCKS = {
    "Mamba1": {"layer": "Mamba1", "d_state": 4},
    "Mamba2": {"layer": "Mamba2", "d_state": 8, "headdim": 8, "ngroups": 2, "learnable_init_states": True},
    "Mamba3": {"layer": "Mamba3", "d_state": 8, "headdim": 8},
}
MIXED = {"n_layer": 3, "layer_cfgs": list(BLOCKS.values())}
KINDS = {
    **{name: {"ssm_cfg": cfg} for name, cfg in BLOCKS.items()},
    "mixed with MLPs": {**MIXED, "d_intermediate": 10},
    "LayerNorm, no last norm": {"ssm_cfg": BLOCKS["Mamba2"], "rms_norm": False, "final_norm": False},
    "virtual": {**MIXED, "n_virtual": 5, "ignore_first_residual": True},
    "stretched": {**MIXED, "n_virtual": 4, "schedule": "stretched", "ignore_last_residual": True, "d_intermediate": 9},
    "of one's own": {**MIXED, "schedule": [2, 0, 0, 1], "checkpointing": True},
    "streams": {**MIXED, "n_virtual": 5, "streams": 3, "gate_bias": -0.5, "gate_bias_step": 0.3},
    "streams, few residuals": {
        **MIXED,
        "n_virtual": 4,
        "streams": 2,
        "gates_per": "pass",
        "ignore_first_residual": True,
        "ignore_last_residual": True,
    },
    "one stream": {**MIXED, "streams": 1},
}


def make(kind="mixed with MLPs", dtype=torch.float64, **fields):
    """Make a stack in which every parameter has an influence."""
    stack = Stack(**{"d_model": WIDTH, "n_layer": 2, **KINDS[kind], **fields}, dtype=dtype)
    with torch.no_grad():
        for name, parameter in stack.named_parameters():
            if "gates" in name or "norm" in name or "init_states" in name:
                parameter += 0.3 * torch.randn_like(parameter)
            elif name.endswith(("dt_bias", "dt_proj.bias")):
                parameter += 2
    return stack


def results(stack, x, run):
    """Return outputs, caches, and gradients of inputs and parameters by name; angles as cosines and sines."""
    x = x.detach().clone().requires_grad_()
    y, cache = run(x)
    tensors = {"y": y}
    for name, leaf in cache.tensors().items():
        parts = (leaf.cos(), leaf.sin()) if name.endswith("rotation") else (leaf.to(y.dtype),)
        tensors |= {f"{name} {i}": part for i, part in enumerate(parts)}
    generator = torch.Generator().manual_seed(3)
    loss = sum((v * torch.randn(v.shape, generator=generator, dtype=v.dtype)).sum() for v in tensors.values())
    leaves = {"x": x, **dict(stack.named_parameters())}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    tensors |= {f"grad of {n}": g for n, g in zip(leaves, grads, strict=True) if g is not None}
    return {name: v.detach() for name, v in tensors.items()}


def unroll(stack, x, cache=None):
    ys = []
    for t in range(x.shape[1]):
        y, cache = stack.step(x[:, t], cache)
        ys.append(y)
    return torch.stack(ys, 1), cache


def in_parts(stack, x, sizes, cache=None):
    ys = []
    for part in x.split(sizes, dim=1):
        y, cache = stack.prefill(part, cache)
        ys.append(y)
    return torch.cat(ys, 1), cache


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_equals_steps_and_any_split(kind):
    stack = make(kind)
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    expected = results(stack, x, stack.prefill)
    assert len(expected) > 10
    assert_all_near(results(stack, x, lambda x: unroll(stack, x)), expected, 1e-10)
    for sizes in ([3, 4], [1, 5, 1]):
        assert_all_near(results(stack, x, lambda x, sizes=sizes: in_parts(stack, x, sizes)), expected, 1e-10)


@pytest.mark.parametrize("kind", ["mixed with MLPs", "virtual", "streams"])
def test_padded_and_packed_rows_equal_rows_alone(kind):
    stack = make(kind)
    rows = [torch.randn(1, t, WIDTH, dtype=torch.float64) for t in (5, 2, 7)]
    alone = [stack.prefill(row) for row in rows]
    packed, caches = stack.prefill(torch.cat(rows, 1), cu_seqlens=torch.tensor([0, 5, 7, 14]))
    assert_near(packed, torch.cat([y for y, _ in alone], 1), 1e-10)
    expected = StackCache.cat([cache for _, cache in alone]).tensors()
    assert_all_near(caches.tensors(), expected, 1e-10)
    batch, mask = torch.full((3, 8, WIDTH), torch.nan, dtype=torch.float64), torch.zeros(3, 8, dtype=torch.bool)
    for i, (row, begin) in enumerate(zip(rows, (0, 4, 1), strict=True)):
        mask[i, begin : begin + row.shape[1]] = True
        batch[i, mask[i]] = row[0]
    y, caches = stack.prefill(batch, mask=mask)
    assert_near(y[mask], torch.cat([y[0] for y, _ in alone]), 1e-10)
    assert not y[~mask].any()
    assert_all_near(caches.tensors(), expected, 1e-10)


def test_a_stack_equals_its_layers_by_hand():
    stack = make("mixed with MLPs", n_virtual=4)
    x = h = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    hidden = []
    for v in range(4):
        layer = stack.layers[v % 3]
        h = h + layer.mixer(layer.norm(h))
        h = h + layer.mlp(layer.norm2(h))
        hidden.append(h)
    assert_near(stack(x), stack.norm_f(h), 1e-12)
    for hidden_state, expected in zip(
        stack.hidden_states(x, [1, -1, 0]), [hidden[1], hidden[3], hidden[0]], strict=True
    ):
        assert_near(hidden_state, expected, 1e-12)


def test_ignored_residuals_by_hand():
    stack = make("mixed with MLPs", ignore_first_residual=True, ignore_last_residual=True, final_norm=False)
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    a, b, c = stack.layers

    def adds(layer, h):
        m = layer.mixer(layer.norm(h))
        return m + layer.mlp(layer.norm2(h + m))

    h = adds(a, x)
    h = h + adds(b, h)
    assert_near(stack(x), adds(c, h), 1e-12)


@pytest.mark.parametrize("schedule", ["cyclic", "stretched", [0, 1, 2]])
def test_as_many_virtual_layers_as_real_ones_change_nothing(schedule):
    plain, virtual = make(), make(n_virtual=3, schedule=schedule)
    virtual.load_state_dict(plain.state_dict())
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    assert torch.equal(plain(x), virtual(x))
    expected, actual = (results(stack, x, stack.prefill) for stack in (plain, virtual))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_schedules_are_the_formulas():
    for real, passes in itertools.product((1, 2, 3, 5), (1, 2, 5, 7, 12)):
        stack = {"d_model": WIDTH, "n_layer": real, "n_virtual": passes}
        assert StackConfig(**stack).layer_order() == [v % real for v in range(passes)]
        expected = [v * real // passes for v in range(passes)]
        assert StackConfig(**stack, schedule="stretched").layer_order() == expected
    for real, passes in ((4, 8), (2, 6), (6, 6), (5, 8)):
        orders = {name: layer_order("", name, real, passes, PAIR_SCHEDULES) for name in PAIR_SCHEDULES}
        half, even, odd = passes // 2, -(-real // 2), real // 2
        pairs = range(half)
        strided = [(2 * (u % even), 2 * (u % odd) + 1) for u in pairs]
        stretched = [(2 * (u * even // half), 2 * (u * odd // half) + 1) for u in pairs]
        assert orders["strided_cyclic"] == [i for pair in strided for i in pair]
        assert orders["strided_stretched"] == [i for pair in stretched for i in pair]
        assert orders["symmetric_cyclic"] == [u % real for u in pairs for _ in "fb"]
        assert orders["symmetric_stretched"] == [u * real // half for u in pairs for _ in "fb"]


def test_multi_gate_residuals_by_hand():
    n, stack = 2, make("mixed with MLPs", n_virtual=4, streams=2, gate_bias=-1.0, gate_bias_step=0.5)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    fresh = Stack(d_model=WIDTH, n_layer=1, streams=3, gate_bias=-1.0, gate_bias_step=0.5).gates[0]
    assert fresh.bias.tolist() == [-1.0, -0.5, 0.0]
    assert not fresh.read_weight.any()
    assert not fresh.write_weight.any()

    def score(s, w):
        return (s @ w) / (WIDTH**0.5 * (s.square().mean(-1) + EPS).sqrt())

    h, streams = x, [x]
    for v in range(4):
        layer, gate = stack.layers[v % 3], stack.gates[v % 3]
        m = layer.mixer(layer.norm(h))
        f = m + layer.mlp(layer.norm2(h + m))
        if len(streams) < n:
            streams.append(f)
        else:
            scores = [score(s, gate.write_weight) for s in streams]
            beta = [torch.sigmoid(x + b)[..., None] for x, b in zip(scores, gate.bias, strict=True)]
            streams = [(1 - b) * s + b * f for s, b in zip(streams, beta, strict=True)]
        alpha = torch.stack([score(s, gate.read_weight) for s in streams]).softmax(0)
        h = sum(a[..., None] * s for a, s in zip(alpha, streams, strict=True))
    assert_near(stack(x), stack.norm_f(h), 1e-12)


def test_one_stream_has_a_closed_form():
    """β is σ(b) before anything is learned: h = Σ (1 - β)^{V - 1 - v} β F_v + (1 - β)^V x."""
    stack = Stack(**{"d_model": WIDTH, "n_layer": 3, **MIXED}, streams=1, final_norm=False, dtype=torch.float64)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    beta = torch.sigmoid(stack.gates[0].bias[0])
    assert_near(stack.gates[0].bias, torch.tensor([-torch.log(torch.tensor(20.0855369 + 1).div(7**0.5) - 1)]), 1e-6)
    h, outputs = x, [x]
    for layer in stack.layers:
        outputs.append(layer.mixer(layer.norm(h)))
        h = (1 - beta) * h + beta * outputs[-1]
    weights = [(1 - beta) ** 3, *(beta * (1 - beta) ** (2 - v) for v in range(3))]
    assert_near(stack(x), sum(w * f for w, f in zip(weights, outputs, strict=True)), 1e-12)


@pytest.mark.parametrize("kind", ["mixed with MLPs", "streams"])
def test_the_whole_horizon_is_the_whole_gradient(kind):
    passes = 5 if kind == "streams" else 3
    stack, cut = make(kind), make(kind, grad_horizon=passes)
    cut.load_state_dict(stack.state_dict())
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    expected, actual = (results(s, x, s.prefill) for s in (stack, cut))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_a_shorter_horizon_is_a_detach_by_hand():
    stack = make("mixed with MLPs", grad_horizon=1)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        h = stack.layers[1](stack.layers[0](x)[0])[0]
    by_hand = stack.norm_f(stack.layers[2](h + (x - x.detach()))[0])
    weights = torch.randn_like(by_hand)
    names = ["x", *(name for name, _ in stack.named_parameters())]
    grads = [
        torch.autograd.grad((y * weights).sum(), [x, *stack.parameters()], allow_unused=True)
        for y in (by_hand, stack(x), unroll(stack, x)[0])
    ]
    for name, expected, *others in zip(names, *grads, strict=True):
        assert (expected is None) == name.startswith(("layers.0", "layers.1"))
        for grad in others:
            assert (grad is None) == (expected is None)
            if expected is not None:
                assert_near(grad, expected, 1e-10, name)
    assert_near(stack(x), make_full(stack)(x), 1e-12)


def make_full(stack):
    full = make("mixed with MLPs")
    full.load_state_dict(stack.state_dict())
    return full


def test_a_horizon_in_steps_cuts_every_step():
    """Steps carry caches of the passes within the horizon, so their gradient is that of the prefill."""
    stack = make("mixed with MLPs", grad_horizon=2)
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    expected, stepped = results(stack, x, stack.prefill), results(stack, x, lambda x: unroll(stack, x))
    assert_all_near(stepped, expected, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_repeats_forever(kind):
    stack = make(kind)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    for name, parameter in stack.named_parameters():
        if name.endswith(("dt_bias", "dt_proj.bias")):  # steps so long that the past is soon forgotten
            parameter.data.clamp_(min=0)
    with torch.no_grad():
        y = stack(x.unsqueeze(1).expand(-1, 600, -1))[:, -1]
        assert_near(stack.step_infinite(x), y, 1e-8)


def test_dropout_only_in_training():
    stack = make("mixed with MLPs", dropout=0.5)
    plain = make_full(stack)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    assert not torch.equal(stack(x), stack(x))
    assert torch.equal(stack.eval()(x), plain.eval()(x))


def test_checkpointing_draws_the_same_and_gives_the_same_gradients():
    stack, again = (make("mixed with MLPs", dropout=0.3, checkpointing=c) for c in (False, True))
    again.load_state_dict(stack.state_dict())
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    grads = []
    for s in (stack, again):
        torch.manual_seed(4)
        s(x).square().sum().backward()
        grads.append({name: p.grad for name, p in s.named_parameters()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_the_cache_is_saved_with_the_name_of_its_stack(tmp_path):
    stack, other = make("virtual"), make("virtual")
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    _, cache = stack.prefill(x)
    cache.save(tmp_path / "cache", stack)
    again = StackCache.load(tmp_path / "cache", stack)
    assert torch.equal(stack.prefill(x, again)[0], stack.prefill(x, cache)[0])
    with pytest.raises(ValueError, match="belongs to another model"):
        StackCache.load(tmp_path / "cache", other)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "random"}, "schedule must be one of cyclic, stretched, or a list of layers, got 'random'"),
        ({"schedule": [0, 1], "n_virtual": 3}, "must have 3 entries, one per pass, got 2"),
        ({"schedule": [0, 2]}, "must name layers 0 to 1, got 2"),
        ({"schedule": []}, "a list of layers, got"),
        ({"n_virtual": 0}, "n_virtual must be at least 1, got 0"),
        ({"n_virtual": 2**20}, "at most 65,536 passes"),
        ({"grad_horizon": 3}, "grad_horizon must be 1 to 2, the passes, got 3"),
        ({"streams": 9}, "default gate_bias is undefined for 9 streams and 2 passes"),
        ({"streams": -1}, "streams must be 0"),
        ({"gates_per": "token"}, 'gates_per must be "layer" or "pass"'),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"layer_cfgs": [{}]}, "layer_cfgs must be a list of 2 tables, one per layer, got 1"),
        ({"layer_cfgs": [{}, {"layer": "Mamba2", "odd": 1}]}, r"layer_cfgs\[1\] has.* Mamba2 does not know: \['odd'\]"),
        ({"layer_cfgs": [{}, 3]}, r"layer_cfgs\[1\] must be a table of the block's fields, got 3"),
        ({"layer_cfgs": [{"layer": "Mamba9"}, {}]}, r'layer_cfgs\[0\]\["layer"\] must be one of Mamba1'),
        ({"n_layers": 3}, r"got \['n_layers'\]"),
    ],
)
def test_invalid_configs_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        Stack(**{"d_model": WIDTH, "n_layer": 2, **fields})


@pytest.mark.usefixtures("unchecked")
def test_bad_calls_say_what_was_expected():
    stack = make("Mamba2")
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"Stack.prefill: x must have shape"):
        stack.prefill(x[..., 1:])
    with pytest.raises(TypeError, match="float64"):
        stack.prefill(x.float())
    with pytest.raises(ValueError, match="cannot be combined"):
        stack.prefill(x, mask=torch.tensor([5, 5]), cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(TypeError, match="must be a StackCache"):
        stack.prefill(x, x)
    with pytest.raises(ValueError, match="must have 2 layers, got 3"):
        stack.prefill(x, make().init_cache(2))
    with pytest.raises(ValueError, match="passes must be -2 to 1, got 2"):
        stack.hidden_states(x, [2])
    with pytest.raises(TypeError, match="Stack: passes must be a list of integers, -2 to 1, got True"):
        stack.hidden_states(x, True)
    with pytest.raises(TypeError, match="not both"):
        Stack(stack.config, d_model=3)
