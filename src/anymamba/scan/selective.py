"""Mamba-1's selective scan: every channel has its own decay for each of its states.

    Δ_t = softplus(dt_t)        h_t[i, n] = exp(Δ_t[i] A[i, n]) h_{t-1}[i, n] + Δ_t[i] x_t[i] B_t[n]
    y_t[i] = (Σ_n h_t[i, n] C_t[n] + D[i] x_t[i]) silu(z_t[i])

The decays of a channel differ from state to state, so no matrix product computes it: all algorithms go through time.

Letters: b batch, t time, i channels, n state, s sequences, l steps of a block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from anymamba.kernels.cpu.selective import selective_backward, selective_forward
from anymamba.operators import CACHE_ELEMENTS, define_operator, silu_backward
from anymamba.scan.checks import check_cu_seqlens, expect_like, expect_shape, values_are_cheap
from anymamba.scan.numerics import decay_factor, state_dtype, without_autocast
from anymamba.scan.path import SsdPath
from anymamba.scan.scan import resolve_path

_ELSEWHERE_ELEMENTS = 2**24  # of a block on a device that is not a CPU: enough work for a launch, 64 MiB of float32


def selective_scan(
    x: Float[Tensor, "b t i"],
    dt: Float[Tensor, "b t i"],
    A: Float[Tensor, "i n"],
    B: Float[Tensor, "b t n"],
    C: Float[Tensor, "b t n"],
    D: Float[Tensor, " i"] | None = None,
    z: Float[Tensor, "b t i"] | None = None,
    *,
    initial_state: Float[Tensor, "s i n"] | None = None,
    path: SsdPath | None = None,
    cu_seqlens: Int[Tensor, " s1"] | None = None,
) -> tuple[Float[Tensor, "b t i"], Float[Tensor, "s i n"]]:
    """Run the selective state space model of Mamba-1 over a sequence.

    Args:
        x: inputs, (b, t, i).
        dt: step sizes before their softplus, (b, t, i), in the dtype of `A`; -inf is no step.
        A: decay rates, (i, n), not positive, float32 (float64 for float64 `x`).
        B: input projections, (b, t, n).
        C: output projections, (b, t, n).
        D: skip weights, (i,), or none.
        z: gates, (b, t, i), or none.
        initial_state: (b, i, n), or (sequences, i, n) for packed input, in the dtype of `A`. Zeros if not given.
        path: `SsdPath()` is the fastest there is, `recurrent` the definition with torch's own gradients, `fused` the
            compiled kernels and `serial_recalculated` the portable code with a backward by hand, in blocks of
            `chunk_len` steps. There are no others: they are matrix products.
        cu_seqlens: boundaries (0, ..., t) of sequences packed into a batch of one.

    Returns:
        y (b, t, i) in the dtype of `x`, and the final state(s), in the shape of `initial_state`.

    Raises:
        ValueError: shapes, devices or values that do not fit, or a path that does not exist here.
        TypeError: dtypes that do not fit.
        RuntimeError: `path` asks for a compiled kernel where there is none.
    """
    initial_state = _checked(x, dt, A, B, C, D, z, initial_state, cu_seqlens)
    path = resolve_path(path, x.device, x.dtype)
    arguments = (x, dt, A, B, C, D, z, initial_state, cu_seqlens)
    with without_autocast(x.device):
        if path.algorithm == "fused":
            y, state = _fused(*arguments)
        elif path.algorithm == "serial_recalculated":
            y, state = _portable(*arguments, path.chunk_len)
        elif path.algorithm == "recurrent":
            y, state = _recurrent(*arguments)
        else:
            raise ValueError(
                "selective_scan: path must be fastest, recurrent, serial_recalculated or fused: Mamba-1's scan is no "
                f"matrix product, got {path.algorithm!r}"
            )
    return y, state


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
    """Advance the state by one token: y (b, i) and the new state. Arguments as for `selective_scan`."""
    with without_autocast(x.device):
        wide = state.dtype
        size_bi, x_bi = F.softplus(dt.to(wide)), x.to(wide)
        kept_bin = decay_factor(size_bi.unsqueeze(-1) * A, wide) * state
        state = torch.addcmul(kept_bin, (size_bi * x_bi).unsqueeze(-1), B.to(wide).unsqueeze(1))
        y_bi = (state @ C.to(wide).unsqueeze(-1)).squeeze(-1)
        if D is not None:
            y_bi = torch.addcmul(y_bi, D.to(wide), x_bi)
        if z is not None:
            y_bi = y_bi * F.silu(z.to(wide))
        return y_bi.to(x.dtype), state


def _checked(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Raise unless the inputs meet the contract; the initial state, made of zeros where there is none."""
    where = "selective_scan"
    sizes: dict[str, int] = {}
    expect_shape(where, "x", x, "b t i", sizes)
    if not x.dtype.is_floating_point:
        raise TypeError(f"{where}: x must be of a floating-point dtype, got {x.dtype}")
    wide = state_dtype(x.dtype)
    if sizes["t"] < 1:
        raise ValueError(f"{where}: the sequence must have at least one step, got t = 0")
    for name, tensor, letters, dtype in (
        ("dt", dt, "b t i", wide),
        ("A", a, "i n", wide),
        ("B", b, "b t n", x.dtype),
        ("C", c, "b t n", x.dtype),
        ("D", d, "i", None),  # of any floating-point dtype
        ("z", z, "b t i", x.dtype),
    ):
        if tensor is None and name in ("D", "z"):
            continue
        expect_shape(where, name, tensor, letters, sizes)  # type: ignore[arg-type]
        expect_like(where, name, tensor, dtype or tensor.dtype, x.device)  # type: ignore[arg-type, union-attr]
    if d is not None and not d.dtype.is_floating_point:
        raise TypeError(f"{where}: D must be of a floating-point dtype, got {d.dtype}")
    if cu_seqlens is not None:
        check_cu_seqlens(where, cu_seqlens, sizes["b"], sizes["t"], x.device)
    if values_are_cheap(a) and a.numel() and (largest := a.detach().max().item()) > 0:
        raise ValueError(f"{where}: A must not be positive, got up to {largest:.6g}")
    rows = sizes["b"] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        return x.new_zeros((rows, sizes["i"], sizes["n"]), dtype=wide)
    expect_shape(where, "initial_state", initial_state, "s i n", {**sizes, "s": rows})
    expect_like(where, "initial_state", initial_state, wide, x.device)
    return initial_state


def _recurrent(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The definition."""
    ys, finals = [], []
    for start, stop, rows in _sequences(x.shape[1], initial_state.shape[0], cu_seqlens):
        state = initial_state[rows]
        for t in range(start, stop):
            gate = None if z is None else z[:, t]
            y_bi, state = selective_step(x[:, t], dt[:, t], a, b[:, t], c[:, t], d, gate, state)
            ys.append(y_bi)
        finals.append(state)
    return torch.stack(ys, 1), torch.cat(finals)


def _sequences(t: int, rows: int, cu_seqlens: Tensor | None) -> Iterator[tuple[int, int, slice]]:
    """First step, last step + 1 and rows of the state: of all rows at once, or of each packed sequence."""
    if cu_seqlens is None:
        yield 0, t, slice(rows)
        return
    bounds = cu_seqlens.tolist()
    for row, (start, stop) in enumerate(itertools.pairwise(bounds)):
        yield start, stop, slice(row, row + 1)


class _Block(NamedTuple):
    """Some steps of the sequence, in the dtype of the state.

    Attributes:
        raw: dt before its softplus, (b, l, i).
        size: dt behind it, (b, l, i).
        x: (b, l, i).
        a: decays, (b, l, i, n).
        b: (b, l, n).
        c: (b, l, n).
        h: states behind each step, (b, l, i, n).
    """

    raw: Tensor
    size: Tensor
    x: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    h: Tensor

    @staticmethod
    def of(x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, state: Tensor, steps: slice) -> _Block:
        """Compute the states from the one before the first step."""
        raw = dt[:, steps]
        x, b, c = (part[:, steps].to(rates.dtype) for part in (x, b, c))
        size = F.softplus(raw)
        a = decay_factor(size.unsqueeze(-1) * rates, rates.dtype)
        h = (size * x).unsqueeze(-1) * b.unsqueeze(2)
        for i in range(h.shape[1]):
            state = h[:, i].addcmul_(a[:, i], state)
        return _Block(raw, size, x, a, b, c, h)

    def read(self, skip: Tensor | None) -> Tensor:
        """y before its gate, (b, l, i)."""
        y = (self.h @ self.c.unsqueeze(-1)).squeeze(-1)
        return y if skip is None else y.addcmul_(skip.to(y.dtype), self.x)


def _blocks(x: Tensor, start: int, stop: int, n: int, chunk_len: int | None, least: int = 1) -> list[slice]:
    """Cut steps into blocks of at least `least` whose states, if that is possible, stay in a CPU's cache."""
    most = CACHE_ELEMENTS if x.device.type == "cpu" else _ELSEWHERE_ELEMENTS
    length = chunk_len or max(least, most // max(1, x.shape[0] * x.shape[2] * n))
    return [slice(first, min(first + length, stop)) for first in range(start, stop, length)]


def _dense_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _forward(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    chunk_len: int | None,
) -> tuple[Tensor, Tensor]:
    y, final = _dense_like(x), torch.empty_like(initial_state)
    for start, stop, rows in _sequences(x.shape[1], initial_state.shape[0], cu_seqlens):
        state = initial_state[rows]
        for steps in _blocks(x, start, stop, a.shape[1], chunk_len):
            block = _Block.of(x, dt, a, b, c, state, steps)
            out, state = block.read(d), block.h[:, -1]
            y[:, steps] = out if z is None else out.mul_(F.silu(z[:, steps].to(out.dtype)))
        final[rows] = state
    return y, final


def _backward(
    dy: Tensor,
    dfinal: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    chunk_len: int | None,
) -> tuple[Tensor, ...]:
    """The gradients of the first eight inputs. Only a state a block is kept; those within are computed again.

    With g_t the gradient of h_t: g_t = dy_t ⊗ C_t + exp(Δ_{t+1} A) g_{t+1}, and that of the exponent Δ_t A is
    g_t exp(Δ_t A) h_{t-1}.
    """
    dx, ddt, db, dc = (_dense_like(part) for part in (x, dt, b, c))
    dz = None if z is None else _dense_like(z)
    da, dinitial = torch.zeros_like(a), torch.empty_like(initial_state)
    dskip = a.new_zeros(a.shape[0])
    for start, stop, rows in _sequences(x.shape[1], initial_state.shape[0], cu_seqlens):
        # As many states are kept as a block has: memory grows with the root of the length.
        blocks = _blocks(x, start, stop, a.shape[1], chunk_len, math.isqrt(stop - start))
        states = [initial_state[rows]]
        for steps in blocks[:-1]:
            states.append(_Block.of(x, dt, a, b, c, states[-1], steps).h[:, -1].clone())
        carry = dfinal[rows]
        for steps, before in zip(reversed(blocks), reversed(states), strict=True):
            block = _Block.of(x, dt, a, b, c, before, steps)
            grad = dy[:, steps].to(a.dtype)
            if z is not None and dz is not None:
                gate = z[:, steps].to(a.dtype)
                dz[:, steps] = silu_backward(grad * block.read(d), gate)
                grad = grad * F.silu(gate)
            g = grad.unsqueeze(-1) * block.c.unsqueeze(2)
            for i in reversed(range(g.shape[1])):
                g[:, i] += carry
                carry = g[:, i] * block.a[:, i]
            dc[:, steps] = (grad.unsqueeze(2) @ block.h).squeeze(2)
            scaled = block.size * block.x
            db[:, steps] = (scaled.unsqueeze(2) @ g).squeeze(2)
            through = (g @ block.b.unsqueeze(-1)).squeeze(-1)
            previous = torch.cat([before.unsqueeze(1), block.h[:, :-1]], 1)
            dexponent = g.mul_(block.a).mul_(previous)
            da += torch.einsum("blin,bli->in", dexponent, block.size)
            dsize = torch.addcmul((dexponent * a).sum(-1), block.x, through)
            ddt[:, steps] = dsize * torch.sigmoid(block.raw)
            dx[:, steps] = (
                block.size * through if d is None else torch.addcmul(block.size * through, d.to(a.dtype), grad)
            )
            dskip += (grad * block.x).sum((0, 1))
        dinitial[rows] = carry
    given = dskip if d is None else dskip.to(d.dtype)
    return dx, ddt, da, db, dc, given, x.new_empty(0) if dz is None else dz, dinitial


def _fake(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    state = arguments[6]
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(
        state.shape, dtype=state.dtype, device=x.device
    )


_INPUTS = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor initial_state, "
_portable = define_operator(
    "selective_scan",
    inputs=_INPUTS + "Tensor? cu_seqlens, int? chunk_len",
    outputs=2,
    differentiable=8,
    forward=_forward,
    backward=_backward,
    fake=_fake,
)
_fused = define_operator(
    "selective_scan_fused",
    inputs=_INPUTS + "Tensor? cu_seqlens",
    outputs=2,
    differentiable=8,
    forward=selective_forward,
    backward=selective_backward,
    fake=_fake,
)
