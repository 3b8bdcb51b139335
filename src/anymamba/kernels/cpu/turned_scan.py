"""Forward and backward of Mamba-3's recurrence by the compiled scan (contract: `blocks/turned_scan.py`)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from anymamba.kernels import library
from anymamba.kernels.cpu.scan import Call


class _Inputs(NamedTuple):
    """The operator's inputs, in the order of its schema."""

    x: Tensor
    k: Tensor
    q: Tensor
    k_bias: Tensor
    q_bias: Tensor
    rate: Tensor
    dt: Tensor
    log_decay: Tensor
    gamma: Tensor
    kappa: Tensor
    skip: Tensor
    value_weight: Tensor | None
    initial_state: Tensor
    start: Tensor
    interleaved: bool
    chunk_len: int
    lengths: Tensor | None
    cu_seqlens: Tensor | None

    def call(self) -> Call:
        """A call with all of them filled in."""
        (b, t, h, p), (r, n), pairs = self.x.shape, (self.k.shape[2], self.k.shape[4]), self.rate.shape[-1]
        if r > 1 and self.value_weight is None:
            raise ValueError(f"value_weight must be given for more than one rank, got none for {r}")
        if not 0 <= 2 * pairs <= n:
            raise ValueError(f"at most {n // 2} pairs can turn in a state of {n}, got {pairs}")
        # One row of values for all ranks, each with its own weights: a stride of zero.
        v_btrhp = self.x.unsqueeze(2).expand(-1, -1, r, -1, -1)
        call = Call(v_btrhp, self.k, self.q, self.log_decay, self.chunk_len, self.cu_seqlens)
        call.scale_and_skip(None, self.skip)
        call.args.pairs, call.args.interleaved = pairs, self.interleaved
        call.given("k_bias", self.k_bias, (h, r, n))
        call.given("q_bias", self.q_bias, (h, r, n))
        call.given("rate", self.rate, (b, t, pairs))
        for name in ("dt", "gamma", "kappa"):
            call.given(name, getattr(self, name), (b, t, h))
        call.given("initial_state", self.initial_state, call.state_shape)
        call.given("start", self.start, (call.args.sequences, h, pairs))
        if self.value_weight is not None:
            call.given("value_weight", self.value_weight, (h, r, p))
        if self.lengths is not None:
            call.dense("lengths", library.checked_lengths(self.lengths, b, t))
        return call


def turned_scan_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (b, t, r, h, p), the final states, the last keys (z, r, h, n) and the last angles (z, h, s)."""
    i = _Inputs(*arguments)
    (b, t, h, p), (r, n), sequences = i.x.shape, (i.k.shape[2], i.k.shape[4]), i.initial_state.shape[0]
    y = library.empty((b, t, r, h, p), dtype=i.x.dtype)
    last_k = library.empty((sequences, r, h, n), dtype=i.x.dtype)
    final_state, turned = (library.empty(x.shape, dtype=i.dt.dtype) for x in (i.initial_state, i.start))
    if sequences:
        i.call().run("scan_forward", y=y, final_state=final_state, last_k=last_k, turned=turned)
    return y, final_state, last_k, turned


def turned_scan_backward(
    dy: Tensor, dfinal_state: Tensor, dlast_k: Tensor, dturned: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """The gradients of the inputs from x to start, those of parameters summed over the sequences."""
    i = _Inputs(*arguments)
    sequences, wide = i.initial_state.shape[0], i.dt.dtype
    make = library.empty if sequences else library.zeros
    tokens = ("k", "q", "rate", "dt", "log_decay", "gamma", "kappa")
    grads = {name: make(x.shape, dtype=x.dtype) for name, x in (("v", i.x), *((n, getattr(i, n)) for n in tokens))}
    grads |= {name: make(getattr(i, name).shape, dtype=wide) for name in ("initial_state", "start")}
    parameters = {"k_bias": i.k_bias, "q_bias": i.q_bias}
    if i.value_weight is not None:
        parameters["value_weight"] = i.value_weight
    grads |= {name: make((sequences, *x.shape), dtype=wide) for name, x in parameters.items()}
    grads["skip"] = make((sequences, *i.x.shape[2:]), dtype=wide)
    if sequences:
        call = i.call()
        (b, t, h, p), r, n = i.x.shape, i.k.shape[2], i.k.shape[4]
        call.strided("dy", dy, (b, t, r, h, p))
        call.given("dfinal_state", dfinal_state, call.state_shape)
        call.given("dlast_k", dlast_k, (sequences, r, h, n), i.x.dtype)
        call.given("dturned", dturned, i.start.shape)
        call.run("scan_backward", **{f"d{name}": grad for name, grad in grads.items()})
    summed = {name: grads[name].sum(0).to(x.dtype) for name, x in parameters.items()}
    summed["skip"] = grads["skip"].sum((0, 2)).to(i.skip.dtype)
    found = {**grads, **summed, "x": grads["v"]}
    return tuple(found.get(name, dy.new_empty(0)) for name in _Inputs._fields[: _Inputs._fields.index("interleaved")])
