"""Attention against its formulas, and a cache that grows without ever changing."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F

from anymamba import Attention, AttentionCache, AttentionConfig
from tests.blocks.families import OPTIONS, make_block, tensors_of, unroll, without_padding
from tests.support import FLOOR, assert_near

ATTENTION = [name for name, (family, _) in OPTIONS.items() if family is Attention]


def define(block, x):
    """Compute the official full forward from its formulas, one query and one head at a time."""
    c, parameters = block.config, {name: p.detach() for name, p in block.named_parameters()}
    t, heads, groups, width = x.shape[0], c.num_heads, block.num_heads_kv, block.head_dim
    projected = x @ parameters["in_proj.weight"].T + parameters.get("in_proj.bias", 0)
    mlp = -(-c.mlp_dim // 256) * 256
    qkv, up, gate = projected.split([(heads + 2 * groups) * width, mlp // 2, mlp // 2], dim=-1)
    if c.d_conv:  # without an activation
        weight, bias = parameters["conv1d.weight"][:, 0], parameters["conv1d.bias"]
        past = torch.cat([torch.zeros(c.d_conv - 1, qkv.shape[1], dtype=x.dtype), qkv])
        qkv = torch.stack([(past[i : i + c.d_conv] * weight.T).sum(0) + bias for i in range(t)])
    q = qkv[:, : heads * width].view(t, heads, width).clone()
    k, v = qkv[:, heads * width :].view(t, 2, groups, width).clone().unbind(1)
    for position in range(t):
        for pair in range(c.rotary_emb_dim // 2):
            angle = position / c.rotary_emb_scale / c.rotary_emb_base ** (2 * pair / c.rotary_emb_dim)
            a, b = (2 * pair, 2 * pair + 1) if c.rotary_emb_interleaved else (pair, pair + c.rotary_emb_dim // 2)
            for rotated in (q, k):
                first, second = rotated[position, :, a].clone(), rotated[position, :, b].clone()
                rotated[position, :, a] = first * math.cos(angle) - second * math.sin(angle)
                rotated[position, :, b] = first * math.sin(angle) + second * math.cos(angle)
    scale = 1 / math.sqrt(width) if c.softmax_scale is None else c.softmax_scale
    y = torch.zeros(t, heads, width, dtype=x.dtype)
    for i in range(t):
        first = 0 if c.window is None else max(0, i + 1 - c.window)
        for h in range(heads):
            group = h // (heads // groups)
            scores = scale * k[first : i + 1, group] @ q[i, h]
            if c.softcap is not None:
                scores = c.softcap * torch.tanh(scores / c.softcap)
            y[i, h] = scores.softmax(0) @ v[first : i + 1, group]
    inner = torch.cat([y.flatten(1), up * F.silu(gate)], dim=-1)
    return inner @ parameters["out_proj.weight"].T + parameters.get("out_proj.bias", 0)


@pytest.mark.parametrize("options", ATTENTION)
def test_the_block_is_its_formulas(options):
    block, x = make_block(options), torch.randn(2, 9, 16, dtype=torch.float64)
    expected = torch.stack([define(block, row) for row in x])
    assert_near(block(x), expected, 1e-12)
    with torch.no_grad():
        assert_near(unroll(block, x, None)[0], expected, 1e-12)


@pytest.mark.parametrize("options", ATTENTION)
def test_gradients_are_those_of_finite_differences(options):
    block, x = make_block(options), torch.randn(2, 4, 16, dtype=torch.float64, requires_grad=True)
    cache = block.prefill(torch.randn(2, 3, 16, dtype=torch.float64))[1].detach()
    leaves = (x, cache.kv.requires_grad_(), block.in_proj.weight)

    def run(x, kv, weight):
        y, new = torch.func.functional_call(
            block, {"in_proj.weight": weight}, (x, cache._replace(kv=kv)), {"return_cache": True}
        )
        return y, new.kv

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@torch.no_grad()
def test_tokens_are_appended_in_place_and_no_earlier_cache_changes():
    block, x = make_block("attention groups"), torch.randn(2, 300, 16, dtype=torch.float64)
    _, cache = block.prefill(x[:, :50])
    caches, kept, addresses = [cache], [cache.clone()], set()
    for t in range(50, 300):
        cache = block.step(x[:, t], cache)[1]
        addresses.add(cache.kv.data_ptr())
        if t % 20 == 0:
            caches.append(cache)
            kept.append(cache.clone())
    assert len(addresses) <= 5  # copied when a buffer is full, not with every token
    for after, before in zip(caches, kept, strict=True):
        for name, tensor in tensors_of(before).items():
            assert torch.equal(getattr(after, name), tensor), name
    assert_near(cache.kv, block.prefill(x)[1].kv, FLOOR[torch.float64])


@torch.no_grad()
def test_a_cache_that_was_continued_may_be_continued_again():
    """The second continuation must not write where the first has written: each has its own row's tokens."""
    block, x = make_block("attention groups"), torch.randn(2, 12, 16, dtype=torch.float64)
    _, start = block.prefill(x[:, :5], mask=torch.tensor([5, 2]))  # rows of different lengths
    kept = start.clone()
    first_y, first = block.step(x[:, 5], start)
    counts = torch.tensor([0, 3])  # the longest row does not grow, so the tensor stays as long as it is
    _, short = block.prefill(x[:, 6:9], start, mask=counts)
    kept_short = short.clone()
    other_y, _ = block.prefill(-x[:, 6:9], start, mask=counts)
    again_y, again = block.step(x[:, 5], start)
    assert torch.equal(again_y, first_y)
    assert torch.equal(again.rows(1).kv, first.rows(1).kv)
    for cache, before in ((start, kept), (short, kept_short)):
        for name, tensor in tensors_of(without_padding(before)).items():
            assert torch.equal(getattr(without_padding(cache), name), tensor), name
    expected, _ = block.prefill(-x[1:, 6:9], start.rows(1))
    assert_near(other_y[1:], expected, FLOOR[torch.float64])


@torch.no_grad()
def test_branches_and_joined_rows_continue_as_alone(tmp_path):
    block, x = make_block("attention convolution and MLP"), torch.randn(3, 9, 16, dtype=torch.float64)
    _, cache = block.prefill(x[:, :6], mask=torch.tensor([6, 1, 4]))
    parts = [cache.rows(1), cache.rows([0, 2, 0])]
    assert [part.kv.shape[1] for part in parts] == [1, 6]  # a short row does not carry a long one's padding
    joined = AttentionCache.cat(parts)
    joined.save(tmp_path / "state")
    loaded = AttentionCache.load(tmp_path / "state")
    tokens = torch.stack([x[1, 6], x[0, 6], x[2, 6], x[0, 7]])
    y, new = block.step(tokens, loaded)
    assert new.lengths.tolist() == [2, 7, 5, 7]
    for row, (source, token) in enumerate([(1, x[1, 6]), (0, x[0, 6]), (2, x[2, 6]), (0, x[0, 7])]):
        expected, alone = block.step(token.unsqueeze(0), cache.rows(source))
        assert_near(y[row : row + 1], expected, FLOOR[torch.float64])
        assert_near(new.rows(row).kv, alone.kv, FLOOR[torch.float64])


@pytest.mark.parametrize("fields", [{}, {"softcap": 2.0}])
def test_padding_far_after_the_last_key_gives_no_nan(fields):
    block = Attention(16, num_heads=4, window=3, dtype=torch.float64, **fields)
    _, cache = block.prefill(torch.randn(2, 50, 16, dtype=torch.float64), mask=torch.tensor([50, 1]))
    x = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    y, new = block.prefill(x, cache.detach(), mask=torch.tensor([0, 9]))
    (y.sum() + new.kv.sum()).backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in block.parameters())


@pytest.mark.parametrize("window", [None, 7])
def test_queries_in_parts_are_the_whole(window, monkeypatch):
    block = Attention(16, num_heads=4, window=window, dtype=torch.float64)
    x = torch.randn(2, 40, 16, dtype=torch.float64)
    cache = block.prefill(x[:, :9])[1]
    expected = block.prefill(x[:, 9:], cache)[0]
    monkeypatch.setattr("anymamba.ops.causal_attention._MAX_MASK_ENTRIES", 200)
    assert_near(block.prefill(x[:, 9:], cache)[0], expected, FLOOR[torch.float64])


@pytest.mark.usefixtures("unchecked")
def test_lengths_that_cannot_be_are_rejected():
    block, x = Attention(16, num_heads=4), torch.randn(2, 3, 16)
    cache = block.prefill(x)[1]
    for lengths in ([4, 3], [-1, 3]):
        with pytest.raises(ValueError, match=r"step: cache.lengths must be from 0 to 3, got"):
            block.step(x[:, 0], cache._replace(lengths=torch.tensor(lengths)))
    with pytest.raises(TypeError, match=r"cache.lengths must be torch.int64"):
        block.step(x[:, 0], cache._replace(lengths=torch.tensor([3.0, 3.0])))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, "num_heads must divide d_model = 16, got 3"),
        ({"num_heads": 4, "num_heads_kv": 3}, "num_heads_kv must divide num_heads = 4, got 3"),
        (
            {"num_heads": 4, "rotary_emb_dim": 3},
            "rotary_emb_dim must be an even number up to the head's width 4, got 3",
        ),
        (
            {"num_heads": 4, "rotary_emb_dim": 6},
            "rotary_emb_dim must be an even number up to the head's width 4, got 6",
        ),
        ({"num_heads": 4, "causal": False}, "causal must be True"),
        ({"num_heads": 4, "softcap": 0.0}, "softcap must be positive, got 0.0"),
        ({"num_heads": 4, "window": 0}, "window must be None or at least 1, got 0"),
        ({"num_heads": 4, "d_conv": -1}, "d_conv must be at least 0, got -1"),
    ],
)
def test_invalid_configs_raise_by_name(fields, message, unchecked):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(16, **fields)


@pytest.mark.usefixtures("unchecked")
def test_fields_are_given_as_officially():
    block = Attention(16, 4, 2, 8, 256, False, False, 0.5, True, layer_idx=3)
    assert block.config == AttentionConfig(
        16,
        num_heads=4,
        num_heads_kv=2,
        head_dim=8,
        mlp_dim=256,
        qkv_proj_bias=False,
        out_proj_bias=False,
        softmax_scale=0.5,
    )
    assert copy.deepcopy(block).config == pickle.loads(pickle.dumps(block)).config == block.config
    with pytest.raises(TypeError, match="num_heads must be given"):
        Attention(16)
    with pytest.raises(TypeError, match="no field 'n_heads'; did you mean num_heads"):
        Attention(16, n_heads=3)
