"""Mamba-1's selective scan: every channel has its own decay for each of its states.

    Δ_t = softplus(dt_t)        h_t[i, n] = exp(Δ_t[i] A[i, n]) h_{t-1}[i, n] + Δ_t[i] x_t[i] B_t[n]
    y_t[i] = (Σ_n h_t[i, n] C_t[n] + D[i] x_t[i]) silu(z_t[i])

The decays of a channel differ from state to state, so no matrix product computes it: all algorithms go through time.

Letters: b batch, t time, i channels, n state, l steps of a block. Here z is the gate, and sequences are rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.core.checks import (
    check_annotated_shapes,
    check_dtypes,
    check_initial_state,
    check_nonpositive,
    check_parameter,
)
from anymamba.core.dtypes import without_autocast
from anymamba.core.layout import Span, sequence_spans, split_span
from anymamba.core.operators import Operator, allocate_like
from anymamba.core.recompute import CACHE_BLOCK_NUMEL
from anymamba.core.registry import Implementation
from anymamba.scan.chunking import decay_factor
from anymamba.scan.path import SsdPath
from anymamba.scan.scan import fastest

_DEVICE_BLOCK_ELEMENTS = 2**24  # of a block on other devices than a CPU: enough work for a launch, 64 MiB of float32


@check_annotated_shapes
def selective_scan(
    x: Float[Tensor, "b t i"],
    dt: Float[Tensor, "b t i"],
    A: Float[Tensor, "i n"],
    B: Float[Tensor, "b t n"],
    C: Float[Tensor, "b t n"],
    D: Float[Tensor, " i"] | None = None,
    z: Float[Tensor, "b t i"] | None = None,
    *,
    initial_state: Float[Tensor, "rows i n"] | None = None,
    path: SsdPath | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
) -> tuple[Float[Tensor, "b t i"], Float[Tensor, "rows i n"]]:
    """Run the selective state space model of Mamba-1 over a sequence.

    Args:
        x: Inputs.
        dt: Step sizes before their softplus, in the dtype of `A`; -inf means no step.
        A: Decay rates, never positive, float32 (float64 for float64 `x`).
        B: Input projections.
        C: Output projections.
        D: Skip weights. Default: no skip.
        z: Gates. Default: no gate.
        initial_state: State of each row or packed sequence, in the dtype of `A`. Default: zeros.
        path: `SsdPath()` is the fastest available, `recurrent` the definition with torch's own gradients, `fused` the
            compiled kernels and `serial_recalculated` the portable code with a backward by hand, in blocks of
            `chunk_len` steps. The others are rejected: they are matrix products.
        cu_seqlens: Boundaries (0, ..., t) of sequences packed into a batch of one.

    Returns:
        y in the dtype of `x`, and the final state(s).

    Raises:
        ValueError: Shapes, devices or values do not match, or Mamba-1 has no such algorithm.
        TypeError: Dtypes do not match.
        RuntimeError: `path` requests a compiled kernel, and there is none.
    """
    path = SsdPath.or_default(path)
    if path.algorithm in ("minimal", "serial"):
        raise ValueError(
            "selective_scan: path must be fastest, recurrent, serial_recalculated or fused: Mamba-1's scan is no "
            f"matrix product, got {path.algorithm!r}"
        )
    check_dtypes("selective_scan", "x", x, activations={"B": B, "C": C, "z": z}, states={"dt": dt, "A": A})
    check_parameter("selective_scan", "D", D, x)
    check_nonpositive("selective_scan", "A", A)
    state = check_initial_state("selective_scan", initial_state, x, tuple(A.shape), cu_seqlens)
    with without_autocast(x.device):
        y, final_state = _operator(x, dt, A, B, C, D, z, state, cu_seqlens, path.chunk_len, path.algorithm)
    return y, final_state


def selective_step(
    x: Float[Tensor, "b i"],
    dt: Float[Tensor, "b i"],
    A: Float[Tensor, "i n"],
    B: Float[Tensor, "b n"],
    C: Float[Tensor, "b n"],
    D: Float[Tensor, " i"] | None,
    z: Float[Tensor, "b i"] | None,
    state: Float[Tensor, "b i n"],
) -> tuple[Float[Tensor, "b i"], Float[Tensor, "b i n"]]:
    """Advance the state by one token; return y and the new state. Arguments are those of `selective_scan`."""
    with without_autocast(x.device):
        return _step(x, dt, A, B, C, D, z, state)


def _step(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    acc_dtype = state.dtype
    size_bi, x_bi = F.softplus(dt.to(acc_dtype)), x.to(acc_dtype)
    kept_bin = decay_factor(size_bi.unsqueeze(-1) * a, acc_dtype) * state
    state = torch.addcmul(kept_bin, (size_bi * x_bi).unsqueeze(-1), b.to(acc_dtype).unsqueeze(1))
    y_bi = (state @ c.to(acc_dtype).unsqueeze(-1)).squeeze(-1)
    if d is not None:
        y_bi = torch.addcmul(y_bi, d.to(acc_dtype), x_bi)
    if z is not None:
        y_bi = y_bi * F.silu(z.to(acc_dtype))
    return y_bi.to(x.dtype), state


class _Inputs(NamedTuple):
    """Inputs of every algorithm, in the order of the operator."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    z: Tensor | None
    initial_state: Tensor
    cu_seqlens: Tensor | None
    chunk_len: int | None
    algorithm: str


def _recurrent(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Compute the scan by its definition."""
    x, dt, a, b, c, d, z, initial_state, cu_seqlens, _, _ = _Inputs(*inputs)
    ys, finals = [], []
    for rows, start, stop in sequence_spans(x.shape[1], cu_seqlens):
        state = initial_state[rows]
        for t in range(start, stop):
            gate = None if z is None else z[:, t]
            y_bi, state = _step(x[:, t], dt[:, t], a, b[:, t], c[:, t], d, gate, state)
            ys.append(y_bi)
        finals.append(state)
    return torch.stack(ys, 1), torch.cat(finals)


class _Block(NamedTuple):
    """A block of consecutive steps, in the dtype of the state."""

    raw: Tensor  # dt before its softplus, (b, l, i)
    size: Tensor  # dt after its softplus, (b, l, i)
    x: Tensor  # (b, l, i)
    a: Tensor  # decays, (b, l, i, n)
    b: Tensor  # (b, l, n)
    c: Tensor  # (b, l, n)
    h: Tensor  # states after each step, (b, l, i, n)

    @staticmethod
    def of(x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, state: Tensor, steps: slice) -> _Block:
        """Compute the states of a block from the one before its first step."""
        raw = dt[:, steps]
        x, b, c = (part[:, steps].to(rates.dtype) for part in (x, b, c))
        size = F.softplus(raw)
        a = decay_factor(size.unsqueeze(-1) * rates, rates.dtype)
        h = (size * x).unsqueeze(-1) * b.unsqueeze(2)
        _run_recurrence(a, h, state)
        return _Block(raw, size, x, a, b, c, h)

    def read(self, skip: Tensor | None) -> Tensor:
        """Return y before its gate, (b, l, i)."""
        y = (self.h @ self.c.unsqueeze(-1)).squeeze(-1)
        return y if skip is None else y.addcmul_(skip.to(y.dtype), self.x)


def _run_recurrence(a_blin: Tensor, h_blin: Tensor, state_bin: Tensor) -> None:
    """Turn the additions in `h` into states, `h_t += a_t h_{t-1}`, in place.

    A CPU goes step by step. Other devices, where a launch costs more than a step, run √l groups of √l steps at once,
    from zeros, and then add what enters each group: 3 √l launches instead of l.
    """
    steps, first = h_blin.shape[1], 0
    if not h_blin.is_cpu and (width := math.isqrt(steps)) > 1:
        first = steps // width * width
        groups_bclin = h_blin[:, :first].unflatten(1, (-1, width))
        decays_bclin = a_blin[:, :first].unflatten(1, (-1, width)).clone()
        for i in range(1, width):
            groups_bclin[:, :, i].addcmul_(decays_bclin[:, :, i], groups_bclin[:, :, i - 1])
            decays_bclin[:, :, i] *= decays_bclin[:, :, i - 1]
        for c in range(steps // width):
            state_bin = groups_bclin[:, c].addcmul_(decays_bclin[:, c], state_bin.unsqueeze(1))[:, -1]
    for i in range(first, steps):
        state_bin = h_blin[:, i].addcmul_(a_blin[:, i], state_bin)


def _run_recurrence_backwards(a_blin: Tensor, g_blin: Tensor, carry_bin: Tensor) -> tuple[Tensor, Tensor]:
    """Add to `g_t` what the later steps pass back, `a_{t+1} g_{t+1}`; return it, and what the first step passes on.

    `carry` is what the last step receives. The memory of `g` may be reused.
    """
    if g_blin.is_cpu:
        for i in reversed(range(g_blin.shape[1])):
            g_blin[:, i] += carry_bin
            carry_bin = g_blin[:, i] * a_blin[:, i]
        return g_blin, carry_bin
    next_a_blin = torch.cat([a_blin[:, 1:], torch.ones_like(a_blin[:, :1])], 1)
    reversed_blin = g_blin.flip(1)
    _run_recurrence(next_a_blin.flip(1), reversed_blin, carry_bin)
    g_blin = reversed_blin.flip(1)
    return g_blin, g_blin[:, 0] * a_blin[:, 0]


def _blocks(x: Tensor, span: Span, n: int, chunk_len: int | None, min_len: int = 1) -> list[slice]:
    """Cut steps into blocks of at least `min_len` whose states stay in a CPU's cache if possible."""
    max_elements = CACHE_BLOCK_NUMEL if x.device.type == "cpu" else _DEVICE_BLOCK_ELEMENTS
    return list(split_span(span, chunk_len or max(min_len, max_elements // max(1, x.shape[0] * x.shape[2] * n))))


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    x, dt, a, b, c, d, z, initial_state, cu_seqlens, chunk_len, _ = _Inputs(*inputs)
    y, final = allocate_like(x, initial_state)
    for span in sequence_spans(x.shape[1], cu_seqlens):
        state = initial_state[span.rows]
        for steps in _blocks(x, span, a.shape[1], chunk_len):
            block = _Block.of(x, dt, a, b, c, state, steps)
            out, state = block.read(d), block.h[:, -1]
            y[:, steps] = out if z is None else out.mul_(F.silu(z[:, steps].to(out.dtype)))
        final[span.rows] = state
    return y, final


def _backward(dy: Tensor, dfinal: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Compute the gradients of the first eight inputs. Only one state per block is kept; the others are recomputed.

    With g_t the gradient of h_t: g_t = dy_t ⊗ C_t + exp(Δ_{t+1} A) g_{t+1}, and that of the exponent Δ_t A is
    g_t exp(Δ_t A) h_{t-1}.
    """
    x, dt, a, b, c, d, z, initial_state, cu_seqlens, chunk_len, _ = _Inputs(*inputs)
    dx, ddt, db, dc, dinitial = allocate_like(x, dt, b, c, initial_state)
    dz = None if z is None else allocate_like(z)[0]
    da, dskip = torch.zeros_like(a), a.new_zeros(a.shape[0])
    for span in sequence_spans(x.shape[1], cu_seqlens):
        # 1) Recompute the states before the blocks. There are as many as a block has steps, so memory grows with √t.
        blocks = _blocks(x, span, a.shape[1], chunk_len, math.isqrt(span.stop - span.start))
        states = [initial_state[span.rows]]
        for steps in blocks[:-1]:
            states.append(_Block.of(x, dt, a, b, c, states[-1], steps).h[:, -1].clone())
        # 2) From the last block to the first, pass back the gradient of the state.
        carry = dfinal[span.rows]
        for steps, before in zip(reversed(blocks), reversed(states), strict=True):
            block = _Block.of(x, dt, a, b, c, before, steps)
            # 3) Through the gate.
            grad = dy[:, steps].to(a.dtype)
            if z is not None and dz is not None:
                gate = z[:, steps].to(a.dtype)
                dz[:, steps] = torch.ops.aten.silu_backward(grad * block.read(d), gate)
                grad = grad * F.silu(gate)
            # 4) g, step by step; nothing but this depends on the order of time.
            g = grad.unsqueeze(-1) * block.c.unsqueeze(2)
            g, carry = _run_recurrence_backwards(block.a, g, carry)
            # 5) From g to the inputs of all steps of the block.
            dc[:, steps] = (grad.unsqueeze(2) @ block.h).squeeze(2)
            scaled = block.size * block.x
            db[:, steps] = (scaled.unsqueeze(2) @ g).squeeze(2)
            through = (g @ block.b.unsqueeze(-1)).squeeze(-1)
            previous = torch.cat([before.unsqueeze(1), block.h[:, :-1]], 1)
            dexponent = g.mul_(block.a).mul_(previous)
            da += torch.einsum("blin,bli->in", dexponent, block.size)
            dsize = torch.addcmul((dexponent * a).sum(-1), block.x, through)
            ddt[:, steps] = dsize * torch.sigmoid(block.raw)
            through_state = block.size * through
            dx[:, steps] = through_state if d is None else torch.addcmul(through_state, d.to(a.dtype), grad)
            dskip += (grad * block.x).sum((0, 1))
        dinitial[span.rows] = carry
    dd = dskip if d is None else dskip.to(d.dtype)
    return dx, ddt, da, db, dc, dd, x.new_empty(0) if dz is None else dz, dinitial


_ALGORITHMS = {"recurrent": Implementation(_recurrent), "serial_recalculated": Implementation(_forward, _backward)}
_operator = Operator(
    "selective_scan",
    inputs="Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor initial_state, "
    "Tensor? cu_seqlens, int? chunk_len, str algorithm",
    outputs="y, final_state",
    differentiable=8,
    fake=lambda *inputs: allocate_like(inputs[0], inputs[7]),
    definition=_recurrent,
    portable=_ALGORITHMS,
    fastest=fastest,
    may_be_infinite=frozenset({"dt"}),
)
