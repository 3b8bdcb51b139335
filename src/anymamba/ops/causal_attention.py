"""Causal attention over the steps of a cache and of the call, and rotary positions of its queries and keys.

    y_i = Σ_j softmax_j(scale q_i · k_j) v_j        over j ≤ i, and i - window < j if there is a window

Query head h reads the keys and values of head ⌊h g / n⌋ (grouped-query attention). A score may be capped before the
softmax, `s <- c tanh(s / c)`.

A rotary position p turns channels (i, i + r / 2), or (2i, 2i + 1) if interleaved, of the first r of each head by the
angle `p / (scale base^(2i / r))`.

Letters: b batch, t queries, s keys, h heads, g heads of keys and values, e width of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.core.dtypes import accumulation_dtype, state_dtype
from anymamba.core.operators import is_tracing

_MAX_MASK_ENTRIES = 2**22  # of the mask of one call: more queries are computed in parts


def rotary_tables(
    positions: Int[Tensor, "b t"], width: int, base: int | float, scale: int | float, dtype: torch.dtype
) -> tuple[Float[Tensor, "b t 1 x"], Float[Tensor, "b t 1 x"]]:
    """Return cosines and sines of the angles of each position, for `width` channels of activations of this dtype.

    They are float64 for float64, else float32; the angles of late positions need float64, where the device has it.
    """
    acc_dtype, device = accumulation_dtype(positions.device), positions.device
    frequencies_x = rotary_frequencies(width, base, scale).to(device=device, dtype=acc_dtype)
    angles = (positions.to(acc_dtype).unsqueeze(-1) * frequencies_x).unsqueeze(2)
    return angles.cos().to(state_dtype(dtype)), angles.sin().to(state_dtype(dtype))


def rotary_frequencies(width: int, base: int | float, scale: int | float) -> Float[Tensor, " x"]:
    """Return the angles per position of `width` channels, float64, on the CPU."""
    return 1 / (scale * base ** (torch.arange(0, width, 2, dtype=torch.float64) / width))


def rotate_by_position(
    x: Float[Tensor, "b t h e"],
    tables: tuple[Float[Tensor, "b t 1 x"], Float[Tensor, "b t 1 x"]],
    *,
    interleaved: bool,
) -> Float[Tensor, "b t h e"]:
    """Turn the first channels of each head by the angles of `rotary_tables`; the others stay as they are."""
    cos, sin = tables
    pairs = cos.shape[-1]
    turned, rest = x.split([2 * pairs, x.shape[-1] - 2 * pairs], dim=-1)
    turned = turned.to(cos.dtype)
    first, second = turned.unflatten(-1, (pairs, 2)).unbind(-1) if interleaved else turned.chunk(2, dim=-1)
    result = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(result, dim=-1).flatten(-2) if interleaved else torch.cat(result, dim=-1)
    return torch.cat([joined.to(x.dtype), rest], dim=-1)


def causal_attention(
    q: Float[Tensor, "b t h e"],
    k: Float[Tensor, "b s g e"],
    v: Float[Tensor, "b s g e"],
    lengths: Int[Tensor, " b"] | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "b t h e"]:
    """Attend from each query to the keys up to its own position.

    Args:
        q: Queries; the i-th of a row is at the position `lengths + i`.
        k: Keys, from position 0 on. What follows a row's last query may be anything that is finite.
        v: Values.
        lengths: Position of the first query of each row, on the CPU. Default: 0.
        scale: Factor of the scores. Default: 1/√e.
        window: Number of positions that a query reads, its own included. Default: all.
        softcap: Largest absolute value of a score. Default: none.
    """
    t, s = q.shape[1], k.shape[1]
    q_bhte, k_bgse, v_bgse = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    is_short = window is None or window >= s
    if lengths is None and is_short and softcap is None:
        y = _dot_product(q_bhte, k_bgse[:, :, :t], v_bgse[:, :, :t], None, scale, is_causal=True)
        return y.transpose(1, 2)
    begins_b = torch.zeros(1, dtype=torch.int64) if lengths is None else lengths
    if not is_tracing() and len(begins_b) and bool((begins_b == begins_b[0]).all()):
        begins_b = begins_b[:1]
        if t == 1 and is_short and softcap is None and int(begins_b) == s - 1:
            return _dot_product(q_bhte, k_bgse, v_bgse, None, scale).transpose(1, 2)
    # A mask has an entry for every query and key, so many queries are computed in parts.
    count = t if is_tracing() or q.is_meta else max(1, _MAX_MASK_ENTRIES // max(1, s * len(begins_b)))
    parts = []
    for begin in range(0, t, count):
        rows = q_bhte[:, :, begin : begin + count]
        mask = _visible_keys(begins_b.to(q.device) + begin, rows.shape[2], s, window).unsqueeze(1)
        if softcap is None:
            parts.append(_dot_product(rows, k_bgse, v_bgse, mask, scale))
        else:
            parts.append(_capped_attention(rows, k_bgse, v_bgse, mask, scale, softcap))
    return torch.cat(parts, dim=2).transpose(1, 2)


def _visible_keys(begins_b: Tensor, t: int, s: int, window: int | None) -> Tensor:
    """Return (b, t, s), True for the keys that each query reads."""
    # Queries of padding may be after the last key. They read the last ones: a softmax over none is not a number.
    query_bt1 = (begins_b.unsqueeze(1) + torch.arange(t, device=begins_b.device)).clamp(max=s - 1).unsqueeze(-1)
    key_s = torch.arange(s, device=begins_b.device)
    visible = key_s <= query_bt1
    return visible if window is None else visible & (key_s > query_bt1 - window)


def _dot_product(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, is_causal: bool = False
) -> Tensor:
    is_grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
    )


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Compute the formula at the top of this file with capped scores, in float32 or wider."""
    acc_dtype, groups = state_dtype(q.dtype), k.shape[1]
    q_bgxte = q.to(acc_dtype).unflatten(1, (groups, -1))
    k_bg1se, v_bg1se = k.to(acc_dtype).unsqueeze(2), v.to(acc_dtype).unsqueeze(2)
    scores = softcap * torch.tanh(q_bgxte @ k_bg1se.mT * (scale / softcap))
    weights = scores.masked_fill(~mask.unsqueeze(1), float("-inf")).softmax(-1)
    return (weights @ v_bg1se).flatten(1, 2).to(q.dtype)
