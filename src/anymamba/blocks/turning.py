"""Keys and queries, expanded from groups to heads, biased and rotated: one operator for every kind of rotation.

The backward keeps the inputs only, which are small: the heads of a group share their keys and queries until here.

Letters: b batch, t time, m = (b t) rows, r MIMO rank, g groups, h = (g e) heads, e heads of a group, n state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.operators import cache_blocks, define_operator


class Turning(NamedTuple):
    """How one kind of rotation acts on keys or queries (m, r, h, n).

    Attributes:
        prepare: position (m, h, ...) -> whatever the other three need of it.
        turn: (x, prepared) -> x rotated, in place.
        turn_back: (x, prepared) -> x rotated by the inverse, in place.
        gradient: (rotated x, gradient of rotated x, prepared) -> gradient of the position.
    """

    prepare: Callable[[Tensor], Any]
    turn: Callable[[Tensor, Any], Tensor]
    turn_back: Callable[[Tensor, Any], Tensor]
    gradient: Callable[[Tensor, Tensor, Any], Tensor]


def _rows(x: Tensor) -> Tensor:
    """(b, t, ...) -> (m, ...)."""
    return x.flatten(0, 1)


def _by_head(x_mrgn: Tensor, bias_rhn: Tensor, out_mrhn: Tensor | None = None) -> Tensor:
    """Expand groups to heads and add the bias, in the bias' dtype: (m, r, h, n), in `out_mrhn` if given."""
    g = x_mrgn.shape[2]
    groups = (g, bias_rhn.shape[1] // g)
    out_mrgen = None if out_mrhn is None else out_mrhn.unflatten(2, groups)
    x_mrg1n = x_mrgn.to(bias_rhn.dtype).unsqueeze(3)
    return torch.add(x_mrg1n, bias_rhn.unflatten(1, groups), out=out_mrgen).flatten(2, 3)


def turning_operator(name: str, turning: Turning) -> Callable[..., Any]:
    """Register `anymamba::name`: (k, q (b, t, r, g, n), k_bias, q_bias (h, r, n), position) -> k, q (b, t, r, h, n)."""

    def sides(arguments: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
        k, q, k_bias, q_bias, position = arguments
        biases = (bias.to(position.dtype).transpose(0, 1).contiguous() for bias in (k_bias, q_bias))
        return list(zip((_rows(k), _rows(q)), biases, strict=True))

    def fake(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        k, _, k_bias, _, _ = arguments
        shape = (*k.shape[:3], k_bias.shape[0], k.shape[4])
        return k.new_empty(shape), k.new_empty(shape)

    def forward(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        outputs, position, pairs = fake(*arguments), _rows(arguments[4]), sides(arguments)
        for start, stop in cache_blocks(position, position.shape[0], math.prod(outputs[0].shape[2:])):
            prepared = turning.prepare(position[start:stop])
            for (x_mrgn, bias_rhn), out in zip(pairs, outputs, strict=True):
                out_mrhn = _rows(out)[start:stop]
                if out_mrhn.dtype == bias_rhn.dtype:
                    turning.turn(_by_head(x_mrgn[start:stop], bias_rhn, out_mrhn), prepared)
                else:
                    out_mrhn.copy_(turning.turn(_by_head(x_mrgn[start:stop], bias_rhn), prepared))
        return outputs

    def backward(dk: Tensor, dq: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
        position = _rows(arguments[4])
        dposition = torch.zeros(position.shape, dtype=position.dtype, device=position.device)
        dxs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in arguments[:2]]
        pairs = sides(arguments)
        dbiases = [torch.zeros_like(bias_rhn) for _, bias_rhn in pairs]
        for start, stop in cache_blocks(position, position.shape[0], math.prod(dk.shape[2:])):
            prepared = turning.prepare(position[start:stop])
            for (x_mrgn, bias_rhn), dout, dx, dbias in zip(pairs, (dk, dq), dxs, dbiases, strict=True):
                rotated = turning.turn(_by_head(x_mrgn[start:stop], bias_rhn), prepared)
                drotated = _rows(dout)[start:stop].to(bias_rhn.dtype, copy=True)
                dposition[start:stop] += turning.gradient(rotated, drotated, prepared)
                dhead_mrhn = turning.turn_back(drotated, prepared)
                dbias += dhead_mrhn.sum(0)
                g = x_mrgn.shape[2]
                _rows(dx)[start:stop] = dhead_mrhn.unflatten(2, (g, dhead_mrhn.shape[2] // g)).sum(3)
        dk_bias, dq_bias = (
            dbias.transpose(0, 1).to(bias.dtype).contiguous()
            for dbias, bias in zip(dbiases, arguments[2:4], strict=True)
        )
        return *dxs, dk_bias, dq_bias, dposition.reshape(arguments[4].shape)

    return define_operator(
        name,
        inputs="Tensor k, Tensor q, Tensor k_bias, Tensor q_bias, Tensor position",
        outputs=2,
        differentiable=5,
        forward=forward,
        backward=backward,
        fake=fake,
    )
