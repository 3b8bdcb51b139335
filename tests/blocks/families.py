"""Blocks of every family and option, and one way to run them and collect every output and gradient."""

import torch

from anymamba import Attention, Mamba1, Mamba2, Mamba3
from tests.scan import cases

SMALL = {"d_model": 16, "d_state": 8, "headdim": 8}
HEADS = {"d_model": 16, "num_heads": 4}
SIZES = {Mamba1: {"d_model": 16, "d_state": 8}, Mamba2: SMALL, Mamba3: SMALL, Attention: HEADS}
OPTIONS = {
    "mamba1": (Mamba1, {}),
    "mamba1 odd sizes": (Mamba1, {"expand": 2.25, "d_state": 5, "dt_rank": 3, "d_conv": 3}),
    "mamba1 biases": (Mamba1, {"bias": True, "conv_bias": False, "dt_init": "constant"}),
    "mamba2": (Mamba2, {}),
    "mamba1 plain inner norms": (Mamba1, {"inner_norms": "plain", "dt_rank": 3}),
    "mamba1 weighted inner norms": (Mamba1, {"inner_norms": "weighted", "inner_norm_eps": 1e-3}),
    "mamba2 without convolution history": (Mamba2, {"d_conv": 1}),
    "mamba2 groups": (Mamba2, {"ngroups": 2}),
    "mamba2 float expand": (Mamba2, {"expand": 1.5}),
    "mamba2 half SSM": (Mamba2, {"d_ssm": 16}),
    "mamba2 D per channel": (Mamba2, {"D_has_hdim": True}),
    "mamba2 gate only": (Mamba2, {"rmsnorm": False}),
    "mamba2 norm first": (Mamba2, {"norm_before_gate": True, "ngroups": 2}),
    "mamba2 biases": (Mamba2, {"bias": True, "conv_bias": False}),
    "mamba2 dt limited": (Mamba2, {"dt_limit": (0.01, 0.05)}),
    "mamba2 learnable start": (Mamba2, {"learnable_init_states": True}),
    "mamba2 chunks of five": (Mamba2, {"chunk_size": 5}),
    "mamba3": (Mamba3, {}),
    "mamba3 groups": (Mamba3, {"ngroups": 2}),
    "mamba3 group per head": (Mamba3, {"ngroups": 4}),
    "mamba3 no rotation": (Mamba3, {"rope_fraction": 0}),
    "mamba3 full rotation": (Mamba3, {"rope_fraction": 1.0, "rotation_range": 2.0}),
    "mamba3 biases": (Mamba3, {"bias": True}),
    "mamba3 out norm": (Mamba3, {"is_outproj_norm": True}),
    "mamba3 softplus": (Mamba3, {"a_activation": "softplus", "dt_limit": (0.01, 0.05)}),
    "mamba3 learnable start": (Mamba3, {"learnable_init_states": True, "chunk_size": 3}),
    "mamba3 quaternion": (Mamba3, {"rotation": "quaternion", "ngroups": 2}),
    "mamba3 fixed rotation": (Mamba3, {"rotation": "fixed"}),
    "mamba3 mimo 1": (Mamba3, {"is_mimo": True, "mimo_rank": 1}),
    "mamba3 mimo 2": (Mamba3, {"is_mimo": True, "mimo_rank": 2, "ngroups": 2}),
    "mamba3 mimo 3": (Mamba3, {"is_mimo": True, "mimo_rank": 3, "is_outproj_norm": True}),
    "mamba3 mimo 4": (Mamba3, {"is_mimo": True, "mimo_rank": 4, "rope_fraction": 1}),
    "mamba3 mimo quaternion": (Mamba3, {"is_mimo": True, "mimo_rank": 2, "rotation": "quaternion", "rope_fraction": 1}),
    "attention": (Attention, {}),
    "attention groups": (Attention, {"num_heads_kv": 2, "rotary_emb_dim": 4, "softmax_scale": 0.7}),
    "attention one group": (Attention, {"num_heads_kv": 1, "head_dim": 6, "rotary_emb_dim": 4, "rotary_emb_base": 50}),
    "attention interleaved": (
        Attention,
        {"rotary_emb_dim": 2, "rotary_emb_interleaved": True, "rotary_emb_scale": 0.5, "qkv_proj_bias": False},
    ),
    "attention convolution and MLP": (Attention, {"d_conv": 3, "mlp_dim": 20, "rotary_emb_dim": 4}),
    "attention window": (Attention, {"window": 3, "rotary_emb_dim": 4, "out_proj_bias": False}),
    "attention softcap": (Attention, {"softcap": 1.5, "num_heads_kv": 2, "window": 20}),
}
FEW = {
    name: OPTIONS[name]
    for name in (
        "mamba1",
        "mamba2 groups",
        "mamba2 biases",
        "mamba3",
        "mamba3 quaternion",
        "mamba3 fixed rotation",
        "mamba3 mimo 2",
        "mamba3 mimo 3",
        "attention groups",
        "attention convolution and MLP",
        "attention window",
    )
}
# Those with a scan: attention has no recurrence, and keeps the lengths of its cache on the CPU.
WITH_SCAN, FEW_WITH_SCAN = ([name for name in names if OPTIONS[name][0] is not Attention] for names in (OPTIONS, FEW))
PATHWAYS = {Mamba1: ["single"], Mamba2: ["single"], Mamba3: ["single", "double"], Attention: ["single"]}
ALGORITHMS = {
    Mamba1: [name for name in cases.ALGORITHMS if name not in ("minimal", "serial")],
    Mamba2: cases.ALGORITHMS,
    Mamba3: cases.ALGORITHMS,
    Attention: ["recurrent"],  # it has no scan, and takes any path
}
FEW_BY_ALGORITHM = [(options, name) for options, (family, _) in FEW.items() for name in ALGORITHMS[family]]


def make_block(options, dtype=torch.float64):
    """Make a block with all parameters away from their initial ones and zeros, so that each plays a part."""
    family, fields = OPTIONS[options]
    block = family(**{**SIZES[family], **fields}, dtype=dtype)
    for name, parameter in block.named_parameters():
        if name in ("B_bias", "C_bias", "D", "init_states", "norm.weight") or "mimo" in name or "_norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    if isinstance(block, Mamba3):  # rotations and decays that matter within a few tokens
        block.dt_bias.data += 3
    return block


def tensors_of(cache):
    return dict(zip(cache._fields, cache, strict=True))


def without_padding(cache):
    """Return the cache with zeros after the steps that each row of a growing tensor has."""
    if not cache.GROWING_FIELDS:
        return cache
    trimmed = cache.trim()
    is_real = torch.arange(int(cache.lengths.max() if len(cache.lengths) else 0)) < cache.lengths.unsqueeze(1)
    fields = {name: getattr(trimmed, name) for name in cache.GROWING_FIELDS}
    return trimmed._replace(
        **{name: x * is_real.view(*is_real.shape, *[1] * (x.ndim - 2)) for name, x in fields.items()}
    )


def random_cache(block, rows):
    """Make a cache of random leaves; unit quaternions where the cache holds those, rows of lengths 5, 2, 4, 0."""
    empty = block.init_cache(rows)
    if growing := empty.GROWING_FIELDS:
        lengths = torch.tensor([5, 2, 4, 0])[:rows]
        longer = {name: getattr(empty, name).new_zeros(rows, 5, *getattr(empty, name).shape[2:]) for name in growing}
        empty = empty._replace(**longer, lengths=lengths)
    leaves = {
        name: x if name in empty.CPU_FIELDS else torch.randn(x.shape, dtype=x.dtype)
        for name, x in tensors_of(empty).items()
    }
    if getattr(block.config, "rotation", None) == "quaternion":
        leaves["rotation"] /= leaves["rotation"].norm(dim=-1, keepdim=True)
    return empty._replace(**{name: x.requires_grad_(x.is_floating_point()) for name, x in leaves.items()})


def unroll(block, x, cache):
    """Call `step` on every token."""
    ys = []
    for t in range(x.shape[1]):
        y, cache = block.step(x[:, t], cache)
        ys.append(y)
    return torch.stack(ys, 1), cache


def results(block, x, cache, run, leaves=None):
    """Return outputs, every cache field, and the gradients of the input, all parameters and the incoming cache.

    An angle counts by its cosine and sine: it is kept modulo a full circle.
    """
    x = x.detach().clone().requires_grad_()
    y, new = run(block, x, cache)
    outputs = {"y": y, **tensors_of(without_padding(new))}
    if "rotation" in outputs and outputs["rotation"].ndim == 3:
        angle = outputs.pop("rotation")
        outputs |= {"cos": angle.cos(), "sin": angle.sin()}
    leaves = {"x": x, **dict(block.named_parameters())}
    if cache is not None:
        leaves |= {f"cache.{name}": leaf for name, leaf in tensors_of(cache).items() if leaf.requires_grad}
    generator = torch.Generator().manual_seed(5)
    loss = sum(
        (o * torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype)).sum() for o in outputs.values()
    )
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = {f"grad of {n}": g for n, g in zip(leaves, grads, strict=True) if g is not None}
    return {**{name: o.detach() for name, o in outputs.items()}, **named}
