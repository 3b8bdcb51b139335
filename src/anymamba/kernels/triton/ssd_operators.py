"""The operators `scan` and `ssd` by the kernels of chunk_states.py, chunk_outputs.py and chunk_gradients.py.

The backward keeps the inputs only and recomputes the states that enter the chunks. A forward launches three kernels, a
backward six.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.core.operators import allocate_like
from anymamba.kernels.triton.block_sizes import MAX_RANK, BlockSizes, block_sizes, chunk_rows, fit, precision
from anymamba.kernels.triton.chunk_gradients import write_key_query_gradients, write_value_gradients
from anymamba.kernels.triton.chunk_outputs import write_outputs
from anymamba.kernels.triton.chunk_states import add_chunk_states, pass_states
from anymamba.kernels.triton.launch import launch, row_major, target_of
from anymamba.kernels.triton.part_sums import add_parts
from anymamba.kernels.triton.selection import GpuKernel

_HEADS_PER_SLICE = 8  # whose gradients of keys and queries one program adds up
_TRITON_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.bfloat16}


class Chunks(NamedTuple):
    """How the tokens of all sequences are cut into chunks.

    Attributes:
        table: First and last-plus-one token of each chunk, (total, 2), or None if rows are cut alike. Without a copy to
            the host only an upper bound of the total is known, so the last chunks may be empty.
        first: First chunk of each sequence and the end of the last, (z + 1,), or None.
        total: Number of chunks.
        per_row: Number of chunks per row of a batch.
        length: Steps of a chunk.
    """

    table: Tensor | None
    first: Tensor | None
    total: int
    per_row: int
    length: int

    @staticmethod
    def cut(b: int, t: int, cu_seqlens: Tensor | None, length: int) -> Chunks:
        """Cut rows of `t` tokens, or packed sequences."""
        per_row = -(-t // length)
        if cu_seqlens is None:
            return Chunks(None, None, b * per_row, per_row, length)
        bounds, z = cu_seqlens.long(), cu_seqlens.shape[0] - 1
        counts = (bounds.diff() + length - 1) // length
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        chunks = torch.arange(t // length + z, device=bounds.device)
        sequence = torch.searchsorted(first[1:], chunks, right=True).clamp(max=z - 1)
        starts = bounds[sequence] + (chunks - first[sequence]) * length
        stops = torch.minimum(starts + length, bounds[sequence + 1])
        return Chunks(torch.stack([starts, stops], 1), first, chunks.shape[0], per_row, length)


class ChunkedScan:
    """A scan of weighted values, on tensors whose rows are laid end to end, with its chunks."""

    def __init__(
        self,
        v: Tensor,  # (b, t, r, h, p)
        k: Tensor,  # (b, t, r, g, n)
        q: Tensor,  # (b, t, r, g, n)
        log_decay: Tensor,  # (b, t, h)
        initial_state: Tensor,  # (z, h, p, n)
        cu_seqlens: Tensor | None,
        chunk_len: int | None,
        *,
        scale: Tensor | None = None,  # (b, t, h)
        diagonal: Tensor | None = None,  # (b, t, h)
        skip: Tensor | None = None,  # (h, p)
    ) -> None:
        """Lay out the inputs; the last three are those of chunk_outputs.py."""
        b, t = v.shape[:2]
        self.shape = v.shape
        self.dtype = v.dtype
        self.t = t
        self.tokens = b * t
        self.rank = v.shape[2]
        self.heads = v.shape[3]
        self.width = v.shape[4]
        self.groups = k.shape[3]
        self.state = k.shape[4]
        self.v = row_major(v).flatten(0, 1)
        self.k = row_major(k).flatten(0, 1)
        self.q = row_major(q).flatten(0, 1)
        self.log_decay = log_decay.flatten(0, 1)
        # These two share their strides.
        self.scale = None if scale is None else scale.contiguous().flatten(0, 1)
        self.diagonal = None if diagonal is None else diagonal.contiguous().flatten(0, 1)
        self.skip = None if skip is None else skip.contiguous()
        self.initial_state = initial_state.contiguous()
        self.acc_dtype = state_dtype(v.dtype)
        self.target = target_of(v.device)
        self.precision = precision(v.dtype, self.target)
        max_rows = chunk_rows(v.dtype, self.target)
        length = max(1, min(chunk_len or max_rows, max_rows // self.rank))
        self.rows = fit(length * self.rank, max_rows)
        self.chunks = Chunks.cut(b, t, cu_seqlens, length)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return y (b, t, r, h, p) and the final states."""
        (y,) = allocate_like(self.v)
        states, final_state = self._entering_states()
        sizes = self._sizes("write_outputs")
        tensors = (self.v, self.k, self.q, self.log_decay, self.scale, self.diagonal, self.skip, self.chunks.table)
        launch(
            write_outputs,
            (self.chunks.total, self.heads, -(-self.width // sizes.width)),
            *tensors,
            states,
            y,
            *self._counts(),
            *self._strides(self.v, self.k, self.q),
            **self._constants(sizes),
        )
        return y.view(self.shape), final_state

    def backward(self, dy: Tensor, dfinal_state: Tensor, *, key_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the gradients by name, those of heads' weights as (b, t, h) and of the skip as (h, p).

        Those of keys and queries have `key_dtype`, by default that of keys and queries.
        """
        b, t = self.shape[:2]
        dy = row_major(dy).flatten(0, 1)
        entering, _ = self._entering_states()
        leaving, totals = self._chunk_states(dy, self.q, None, to_end=False)
        dinitial_state = self._pass(leaving, totals, dfinal_state.contiguous(), reverse=True)
        dv, dskip = self._value_gradients(dy, leaving)
        grads = self._key_query_gradients(dy, entering, leaving, key_dtype or self.dtype)
        grads = {name: x.view(b, t, *x.shape[1:]) for name, x in {**grads, "dv": dv}.items()}
        grads["dinitial_state"] = dinitial_state
        return grads if dskip is None else {**grads, "dskip": dskip}

    def _entering_states(self) -> tuple[Tensor, Tensor]:
        """Return the states before the chunks, and the final states."""
        states, totals = self._chunk_states(self.v, self.k, self.scale, to_end=True)
        return states, self._pass(states, totals, self.initial_state, reverse=False)

    def _chunk_states(self, v: Tensor, k: Tensor, scale: Tensor | None, *, to_end: bool) -> tuple[Tensor, Tensor]:
        """Return what chunks add to states, and the decay of each whole chunk."""
        sizes = self._sizes("add_chunk_states")
        states = v.new_empty((self.chunks.total, self.heads, self.width, self.state), dtype=self.acc_dtype)
        totals = states.new_empty((self.chunks.total, self.heads))
        tiles = -(-self.width // sizes.width) * -(-self.state // sizes.state)
        launch(
            add_chunk_states,
            (self.chunks.total, self.heads, tiles),
            v,
            k,
            self.log_decay,
            scale,
            self.chunks.table,
            states,
            totals,
            *self._counts(),
            *self._strides(v, k),
            TO_END=to_end,
            **{**self._constants(sizes), "PRECISION": self.precision.state},
        )
        return states, totals

    def _pass(self, states: Tensor, totals: Tensor, initial: Tensor, *, reverse: bool) -> Tensor:
        """Turn what chunks add into the states before them, or if reversed after them; return the last state."""
        (final,) = allocate_like(initial)
        size = self.width * self.state
        block = fit(size, 512)
        launch(
            pass_states,
            (initial.shape[0], self.heads, -(-size // block)),
            states,
            totals,
            initial,
            final,
            self.chunks.first,
            self.chunks.per_row,
            self.heads,
            size,
            REVERSE=reverse,
            PACKED=self.chunks.table is not None,
            BLOCK=block,
            num_warps=4,
            num_stages=1,
        )
        return final

    def _value_gradients(self, dy: Tensor, leaving: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of v and of the skip."""
        (dv,) = allocate_like(self.v)
        # A packed batch may have empty chunks, which write nothing.
        new = dv.new_empty if self.chunks.table is None else dv.new_zeros
        dskip = None
        if self.skip is not None:
            dskip = new((self.chunks.total, self.heads, self.width), dtype=self.acc_dtype)
        sizes = self._sizes("write_value_gradients")
        launch(
            write_value_gradients,
            (self.chunks.total, self.heads, -(-self.width // sizes.width)),
            *(self.v, self.k, self.q, self.log_decay, self.scale, self.diagonal, self.skip, self.chunks.table),
            leaving,
            dy,
            dv,
            dskip,
            *self._counts(),
            *self._strides(self.v, self.k, self.q),
            *dy.stride()[:3],
            **self._constants(sizes),
        )
        return dv, None if dskip is None else dskip.sum(0)

    def _key_query_gradients(
        self, dy: Tensor, entering: Tensor, leaving: Tensor, key_dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return the gradients of k, q, the log-decays and the weights, with tokens as their first axis."""
        sizes = self._sizes("write_key_query_gradients")
        slices, tiles = -(-(self.heads // self.groups) // _HEADS_PER_SLICE), -(-self.state // sizes.state)
        # Parts of a sum are in the dtype of states; a sum of one part is in its own.
        dtype = key_dtype if slices == 1 else self.acc_dtype
        dk, dq = (self.v.new_empty((slices, *x.shape), dtype=dtype) for x in (self.k, self.q))
        da = entering.new_empty((tiles, self.tokens, self.heads))
        by_rank = (tiles, self.tokens, self.rank, self.heads)
        dscale, ddiagonal = (None if x is None else entering.new_empty(by_rank) for x in (self.scale, self.diagonal))
        launch(
            write_key_query_gradients,
            (self.chunks.total, self.groups * slices, tiles),
            *(self.v, self.k, self.q, self.log_decay, self.scale, self.diagonal, self.chunks.table),
            entering,
            leaving,
            dy,
            dk,
            dq,
            da,
            dscale,
            ddiagonal,
            self.t,
            self.tokens,
            self.chunks.per_row,
            self.chunks.length,
            self.heads,
            self.width,
            self.state,
            self.groups,
            self.heads // self.groups,
            slices,
            *self._strides(self.v, self.k, self.q),
            *dy.stride()[:3],
            HEADS=_HEADS_PER_SLICE,
            **self._constants(sizes),
        )
        grads = {"dk": add_parts(dk, key_dtype), "dq": add_parts(dq, key_dtype), "dlog_decay": add_parts(da)}
        for name, parts in (("dscale", dscale), ("ddiagonal", ddiagonal)):
            if parts is not None:
                by_rank_trh = add_parts(parts)
                grads[name] = by_rank_trh[:, 0] if self.rank == 1 else by_rank_trh.sum(1)
        return grads

    def _sizes(self, kernel: str) -> BlockSizes:
        """Return the sizes of blocks, no larger than these inputs need."""
        sizes = block_sizes(kernel, self.target, self.dtype)
        return sizes._replace(width=fit(self.width, sizes.width), state=fit(self.state, sizes.state))

    def _counts(self) -> tuple[int, ...]:
        return (
            self.t,
            self.chunks.per_row,
            self.chunks.length,
            self.heads,
            self.width,
            self.state,
            self.heads // self.groups,
        )

    def _strides(self, *tensors: Tensor) -> tuple[int, ...]:
        """Return the strides of values, keys and queries, then of the log-decays and the weights."""
        strides = [stride for x in tensors for stride in x.stride()[:3]]
        scale_strides = (0, 0) if self.scale is None else self.scale.stride()
        return (*strides, *self.log_decay.stride(), *scale_strides)

    def _constants(self, sizes: BlockSizes) -> dict[str, Any]:
        return {
            "RANK": self.rank,
            "ROWS": self.rows,
            "WIDTH": sizes.width,
            "STATE": sizes.state,
            "PACKED": self.chunks.table is not None,
            "ACC": _TRITON_DTYPES[self.acc_dtype],
            "OPERAND": _TRITON_DTYPES[self.precision.operand],
            "PRECISION": self.precision.output,
            "num_warps": sizes.num_warps,
            "num_stages": sizes.num_stages,
        }


def _is_empty(v: Tensor, state: Tensor) -> bool:
    return not v.numel() or not state.shape[0]


def _scan_of(*inputs: Any) -> ChunkedScan:
    return ChunkedScan(*inputs[:7])


def _scan_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    v, state = inputs[0], inputs[4]
    return (torch.zeros_like(v), state.clone()) if _is_empty(v, state) else _scan_of(*inputs).forward()


def _scan_backward(dy: Tensor, dfinal_state: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    if _is_empty(inputs[0], inputs[4]):
        return (*(torch.zeros_like(x) for x in inputs[:4]), dfinal_state.clone())
    grads = _scan_of(*inputs).backward(dy, dfinal_state)
    return tuple(grads[name] for name in ("dv", "dk", "dq", "dlog_decay", "dinitial_state"))


def _scan_missing(v: Tensor, *_: Any) -> str:
    return "" if v.shape[2] <= MAX_RANK else f"there are at most {MAX_RANK} MIMO ranks"


def _scan_examples(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    v, k, q, log_decay, state = _draw(device, dtype, r=2, h=4, p=24, g=2, n=40)
    cu_seqlens = torch.tensor([0, 1, 40, 75], device=device)
    return v, k, q, log_decay, state, cu_seqlens, None, "fastest"


def _draw(device: torch.device, dtype: torch.dtype, *, r: int, h: int, p: int, g: int, n: int) -> tuple[Tensor, ...]:
    """Draw values, keys, queries, log-decays and the states of three packed sequences of 75 tokens."""
    shapes = ((1, 75, r, h, p), (1, 75, r, g, n), (1, 75, r, g, n))
    v, k, q = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    acc_dtype = state_dtype(dtype)
    log_decay = -torch.rand((1, 75, h), device=device, dtype=acc_dtype)
    return v, k, q, log_decay, torch.randn((3, h, p, n), device=device, dtype=acc_dtype)


def _ssd_of(*inputs: Any) -> ChunkedScan:
    x, dt, log_decay, b, c, d, state, cu_seqlens, chunk_len, _ = inputs
    v, k, q = (tensor.unsqueeze(2) for tensor in (x, b, c))
    skip = None if d is None else (d if d.ndim == 2 else d.unsqueeze(-1)).expand(x.shape[2:])
    return ChunkedScan(v, k, q, log_decay, state, cu_seqlens, chunk_len, scale=dt, skip=skip)


def _ssd_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    x, state = inputs[0], inputs[6]
    if _is_empty(x, state):
        return torch.zeros_like(x), state.clone()
    y, final_state = _ssd_of(*inputs).forward()
    return y.squeeze(2), final_state


def _ssd_backward(dy: Tensor, dfinal_state: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    d = inputs[5]
    dd = dy.new_empty(0)
    if _is_empty(inputs[0], inputs[6]):
        zeros = [torch.zeros_like(x) for x in inputs[:5]]
        return (*zeros, dd if d is None else torch.zeros_like(d), dfinal_state.clone())
    grads = _ssd_of(*inputs).backward(dy.unsqueeze(2), dfinal_state)
    dx, db, dc = (grads[name].squeeze(2) for name in ("dv", "dk", "dq"))
    if d is not None:
        dd = (grads["dskip"] if d.ndim == 2 else grads["dskip"].sum(-1)).to(d.dtype)
    return dx, grads["dscale"], grads["dlog_decay"], db, dc, dd, grads["dinitial_state"]


def _ssd_examples(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    v, k, q, log_decay, state = _draw(device, dtype, r=1, h=3, p=24, g=1, n=40)
    x, b, c = (tensor.squeeze(2) for tensor in (v, k, q))
    cu_seqlens = torch.tensor([0, 1, 40, 75], device=device)
    skip = torch.randn((3, 24), device=device).to(dtype)
    return x, -log_decay, log_decay, b, c, skip, state, cu_seqlens, None, "fastest"


KERNELS = {
    "scan": GpuKernel(_scan_forward, _scan_backward, _scan_examples, _scan_missing),
    "ssd": GpuKernel(_ssd_forward, _ssd_backward, _ssd_examples),
}
