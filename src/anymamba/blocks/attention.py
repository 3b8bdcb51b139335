"""Attention: config, cache and block, as the official `MHA` of hybrid models.

    q, k, v, x, z = in_proj(u)        q, k, v = conv(q, k, v)        q, k = rotate(q), rotate(k)
    y_i = Σ_{j ≤ i} softmax_j(scale q_i · k_j) v_j                   out = out_proj(y, x silu(z))

Everything but the scores is optional: the causal convolution (without SiLU), the rotation by position, and the gated
MLP whose channels x and z share the projections. `ops/causal_attention.py` has the scores and rotations.

| letter | b | t | d | h | g | e | v | w |
|---|---|---|---|---|---|---|---|---|
| | batch | time | d_model | heads | heads of keys and values | head width | (h + 2 g) e | conv width |

`prefill` from any cache, `step` unrolled from it, and any split of the sequence are the same function, as for every
other block. The cache grows: it holds the keys and values of every token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anymamba.blocks.base import Block
from anymamba.blocks.block_config import check_field_names, check_sizes, make_config
from anymamba.blocks.layers import CausalConv, ProjectionPart
from anymamba.core.cache_io import SavableTree
from anymamba.core.context_parallel import SequencePart
from anymamba.core.growing_buffer import append_steps
from anymamba.core.linear import apply_linear
from anymamba.ops.causal_attention import causal_attention, rotary_frequencies, rotary_tables, rotate_by_position
from anymamba.scan import SsdPath

if TYPE_CHECKING:
    from anymamba.kernels.step_description import StepBuilder

_MLP_MULTIPLE = 256


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Sizes and options of an attention block; the first twelve and the rotary ones are named as in the official one.

    Officially `causal` is False by default. Here every block is causal, so it is True, and False raises.
    """

    LAST_POSITIONAL_FIELD: ClassVar[str] = "causal"
    OPTIONAL_SIZES: ClassVar[frozenset[str]] = frozenset({"mlp_dim", "d_conv", "rotary_emb_dim"})

    d_model: int = field(kw_only=False)  # D, width of the residual stream
    num_heads: int  # H, heads of queries
    num_heads_kv: int | None = None  # G, heads of keys and values; None: one per query head
    head_dim: int | None = None  # width of a head; None: d_model / num_heads
    mlp_dim: int = 0  # channels of a gated MLP between the projections, rounded up to a multiple of 256; 0: none
    qkv_proj_bias: bool = True
    out_proj_bias: bool = True
    softmax_scale: int | float | None = None  # factor of the scores; None: 1/√head_dim
    causal: bool = True
    d_conv: int = 0  # W, width of a convolution over queries, keys and values; 0: none
    rotary_emb_dim: int = 0  # channels of a head that rotate with the position; 0: none
    rotary_emb_base: int | float = 10000.0
    rotary_emb_interleaved: bool = False  # pairs (2i, 2i + 1), not (i, i + rotary_emb_dim / 2)
    rotary_emb_scale: int | float = 1.0  # positions are divided by it
    window: int | None = None  # tokens that a query reads, its own included; None: all
    softcap: int | float | None = None  # scores are kept within ± softcap; None: any

    def __new__(cls, *positional: Any, **fields: Any) -> Any:
        """Check the fields before they meet the signature of `__init__`, whose error has no hint."""
        check_field_names(cls, fields)
        if (positional or fields) and "num_heads" not in fields:  # a copy is made without any
            raise TypeError(f"{cls.__name__}: num_heads must be given")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Reject combinations that cannot work."""
        name = type(self).__name__
        check_sizes(self)
        if not self.causal:
            raise ValueError(f"{name}: causal must be True: every block reads from left to right; got {self.causal}")
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(f"{name}: num_heads must divide d_model = {self.d_model}, got {self.num_heads}")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"{name}: num_heads_kv must divide num_heads = {self.num_heads}, got {self.kv_heads}")
        if self.rotary_emb_dim % 2 or self.rotary_emb_dim > self.head_width:
            expected = f"an even number up to the head's width {self.head_width}"
            raise ValueError(f"{name}: rotary_emb_dim must be {expected}, got {self.rotary_emb_dim}")
        for field_name in ("softmax_scale", "rotary_emb_base", "rotary_emb_scale", "softcap"):
            if (value := getattr(self, field_name)) is not None and value <= 0:
                raise ValueError(f"{name}: {field_name} must be positive, got {value}")

    @property
    def kv_heads(self) -> int:
        """Return the number of heads of keys and values."""
        return self.num_heads if self.num_heads_kv is None else self.num_heads_kv

    @property
    def head_width(self) -> int:
        """Return the width of a head."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def qkv_dim(self) -> int:
        """Return the number of channels of queries, keys and values together."""
        return (self.num_heads + 2 * self.kv_heads) * self.head_width

    @property
    def mlp_channels(self) -> int:
        """Return `mlp_dim`, rounded up: half of them are values and half are gates."""
        return -(-self.mlp_dim // _MLP_MULTIPLE) * _MLP_MULTIPLE

    @property
    def d_inner(self) -> int:
        """Return the number of channels that `out_proj` reads."""
        return self.num_heads * self.head_width + self.mlp_channels // 2


class _AttentionCacheFields(NamedTuple):
    kv: Float[Tensor, "b s 2 g e"]
    conv: Float[Tensor, "b v w"]
    lengths: Int[Tensor, " b"]


class AttentionCache(_AttentionCacheFields, SavableTree):
    """The cache of an attention block: it grows with the sequence.

    Attributes:
        kv: Rotated keys, and values, (b, s, 2, g, e), in the activations' dtype; what follows a row's length is
            padding.
        conv: Last `d_conv` inputs of the convolution, newest last, (b, v, w), in the activations' dtype.
        lengths: Number of tokens of each row, (b,), int64, on the CPU.
    """

    __slots__ = ()
    CPU_FIELDS: ClassVar[frozenset[str]] = frozenset({"lengths"})
    GROWING_FIELDS: ClassVar[frozenset[str]] = frozenset({"kv"})


class Attention(Block):
    """The attention block. Parameter names, shapes and initialization are those of the official `MHA`.

    Args:
        config: An `AttentionConfig`, or d_model, with the other fields of `AttentionConfig` as keywords.
        positional: Fields after d_model, in the order of the official block.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
    """

    CONFIG = AttentionConfig
    CACHE = AttentionCache
    MIRRORED_FIELDS = (
        *("d_model", "num_heads", "mlp_dim", "softmax_scale", "causal", "d_conv", "d_inner"),
        *("rotary_emb_dim", "rotary_emb_base", "rotary_emb_interleaved"),
    )

    def __init__(
        self,
        config: AttentionConfig | int | None = None,
        *positional: Any,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        """Create and initialize the parameters."""
        super().__init__(make_config(AttentionConfig, config, fields, positional))
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        c: AttentionConfig = self.config
        self.num_heads_kv = c.kv_heads  # numbers, where the config may hold None
        self.head_dim = c.head_width
        self.in_proj = nn.Linear(c.d_model, c.qkv_dim + c.mlp_channels, bias=c.qkv_proj_bias, **factory)
        if c.d_conv:
            self.conv1d = CausalConv(c.qkv_dim, c.d_conv, silu=False, **factory)
        self.out_proj = nn.Linear(c.d_inner, c.d_model, bias=c.out_proj_bias, **factory)

    def projection_parts(self) -> dict[str, tuple[ProjectionPart, ...]]:
        """Return the parts of `in_proj`: queries, keys, values, and the MLP's values and gates."""
        c, half = self.config, self.config.mlp_channels // 2
        widths = {"q": c.num_heads * c.head_width, "k": c.kv_heads * c.head_width, "v": c.kv_heads * c.head_width}
        names = {**widths, "mlp_value": half, "mlp_gate": half}
        return {"in_proj": tuple(ProjectionPart(name, rows) for name, rows in names.items() if rows)}

    def cache_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a token's key and value, of a convolution window, and of a length."""
        c = self.config
        return {"kv": (2, c.kv_heads, c.head_width), "conv": (c.qkv_dim, c.d_conv), "lengths": ()}

    def mix(
        self,
        x: Tensor,
        cache: AttentionCache,
        *,
        path: SsdPath,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        context: SequencePart | None = None,
    ) -> tuple[Tensor, AttentionCache]:
        """Compute the formulas at the top of this file; `path` has no meaning here."""
        if context is not None:
            raise ValueError("Attention: the ranks of a group cannot share a sequence with attention layers")
        c: AttentionConfig = self.config
        # 1) Projection and convolution.
        qkv_btv, mlp_btm = apply_linear(self.in_proj, x).split([c.qkv_dim, c.mlp_channels], dim=-1)
        window = cache.conv
        if c.d_conv:
            qkv_btv, window = self.conv1d(qkv_btv, window, lengths=lengths, cu_seqlens=cu_seqlens)
        # 2) Attention of each row, or of each packed sequence.
        if cu_seqlens is None:
            y_btv, kv, after = self._attend(qkv_btv, cache.kv, cache.lengths, lengths)
            new_cache = AttentionCache(kv, window, after)
        else:
            y_btv, new_cache = self._attend_packed(qkv_btv, cache, window, cu_seqlens)
        # 3) MLP and projection.
        if c.mlp_dim:
            value, gate = mlp_btm.chunk(2, dim=-1)
            y_btv = torch.cat([y_btv, value * F.silu(gate)], dim=-1)
        return apply_linear(self.out_proj, y_btv), new_cache

    def _attend_packed(
        self, qkv_1tv: Tensor, cache: AttentionCache, window: Tensor, cu_seqlens: Tensor
    ) -> tuple[Tensor, AttentionCache]:
        """Attend within each packed sequence alone, so that the work is that of the sequences and not of the row."""
        outputs, caches = [], []
        for i, part in enumerate(qkv_1tv.split(cu_seqlens.diff().tolist(), dim=1)):
            length = int(cache.lengths[i])
            y, kv, after = self._attend(part, cache.kv[i : i + 1, :length], cache.lengths[i : i + 1], None)
            outputs.append(y)
            caches.append(AttentionCache(kv, window[i : i + 1], after))
        return torch.cat(outputs, dim=1), AttentionCache.cat(caches)

    def _attend(
        self, qkv_btv: Tensor, past_kv: Tensor, begins: Tensor, counts: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the results (b, t, h e), all keys and values, and the new lengths, of rows that begin at `begins`."""
        c: AttentionConfig = self.config
        q_width = c.num_heads * c.head_width
        q_btv, kv_btv = qkv_btv.split([q_width, c.qkv_dim - q_width], dim=-1)
        q_bthe = q_btv.unflatten(-1, (c.num_heads, c.head_width))
        k_btge, v_btge = kv_btv.unflatten(-1, (2, c.kv_heads, c.head_width)).unbind(2)
        if c.rotary_emb_dim:
            positions_bt = (begins.unsqueeze(1) + torch.arange(qkv_btv.shape[1])).to(qkv_btv.device)
            numbers = (c.rotary_emb_dim, c.rotary_emb_base, c.rotary_emb_scale)
            tables = rotary_tables(positions_bt, *numbers, qkv_btv.dtype)
            q_bthe = rotate_by_position(q_bthe, tables, interleaved=c.rotary_emb_interleaved)
            k_btge = rotate_by_position(k_btge, tables, interleaved=c.rotary_emb_interleaved)
        new_kv = torch.stack([k_btge, v_btge], dim=2)
        kv, after = append_steps(past_kv.to(new_kv.dtype), begins, new_kv, counts)
        is_fresh = past_kv.shape[1] == 0
        # Fresh rows need no more than the call's own tokens, which may be more than the longest row has.
        k_bsge, v_bsge = (new_kv if is_fresh else kv).unbind(2)
        y_bthe = self.read_keys(q_bthe, k_bsge, v_bsge, None if is_fresh else begins)
        return y_bthe.flatten(2), kv, after

    def read_keys(
        self,
        q: Float[Tensor, "b t h e"],
        k: Float[Tensor, "b s g e"],
        v: Float[Tensor, "b s g e"],
        begins: Int[Tensor, " b"] | None,
    ) -> Float[Tensor, "b t h e"]:
        """Attend from rotated queries, the first of each row at position `begins` or 0, to keys from position 0 on."""
        c: AttentionConfig = self.config
        return causal_attention(q, k, v, begins, scale=c.softmax_scale, window=c.window, softcap=c.softcap)

    def describe_core(self, builder: StepBuilder, projected: int) -> int:
        """Scores and values over the row's own length, and the MLP."""
        builder.check_unmodified(self, Attention)
        c: AttentionConfig = self.config
        if c.d_conv:
            builder.reject("attention with a convolution has no compiled step")
        kv = builder.cache_tensor(2, c.kv_heads, c.head_width)
        builder.cache_tensor(c.qkv_dim, 0)
        lengths = builder.cache_tensor(dtype=torch.int64)
        builder.mark_growing(kv, lengths)
        y = builder.slot(c.d_inner)
        numbers = (c.rotary_emb_dim, c.rotary_emb_base, c.rotary_emb_scale)
        builder.phase(
            "attention",
            heads=c.num_heads,
            groups=c.kv_heads,
            head_width=c.head_width,
            rotated=c.rotary_emb_dim,
            interleaved=c.rotary_emb_interleaved,
            window=c.window or 0,
            scale=c.head_width**-0.5 if c.softmax_scale is None else c.softmax_scale,
            softcap=c.softcap or 0.0,
            x=projected,
            to=y,
            cache_kv=kv,
            cache_lengths=lengths,
            frequencies=rotary_frequencies(*numbers) if c.rotary_emb_dim else None,
        )
        if c.mlp_channels:
            half = c.mlp_channels // 2
            value = projected + c.qkv_dim
            builder.gate(value, value + half, half, to=y + c.num_heads * c.head_width)
        return y

    def extra_repr(self) -> str:
        """Return the sizes that `print(block)` shows."""
        c = self.config
        scale = 1 / math.sqrt(c.head_width) if c.softmax_scale is None else c.softmax_scale
        return f"num_heads={c.num_heads}, num_heads_kv={c.kv_heads}, head_dim={c.head_width}, scale={scale:.3g}"
