"""The scan, and its forms for Mamba-2 and Mamba-3, by the compiled kernels (contracts: `scan/`).

The backward keeps the inputs only; its formulas are those of `scan/serial_recalculated.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from anymamba.core.registry import Implementation
from anymamba.kernels.cpu import bindings
from anymamba.kernels.cpu.bindings import call, empty, empty_like, read_bounds, read_lengths, zeros_like
from anymamba.kernels.cpu.schema import ROTATIONS

# Steps times ranks of a chunk: the fastest of 32, 48, 64, 96 at heads of 64 and a state of 128.
CHUNK_ROWS = 64
_TENSORS = ("v", "k", "q", "log_decay", "scale", "initial_state")


class _Scan(NamedTuple):
    """Inputs of every scan, and those of Mamba-2's in addition."""

    v: Tensor  # (b, t, r, h, p)
    k: Tensor
    q: Tensor
    log_decay: Tensor
    scale: Tensor | None
    skip: Tensor | None
    initial_state: Tensor
    cu_seqlens: Tensor | None
    chunk_len: int | None

    @property
    def is_empty(self) -> bool:
        """Return whether there are no values, so that there is nothing to sum."""
        return not self.initial_state.shape[0] * self.v.shape[3] * self.v.shape[4]

    def run(self, function: str, tensors: dict[str, Tensor | None], results: dict[str, Tensor], **numbers: Any) -> None:
        """Call a kernel; `tensors` and `numbers` are those beyond these fields."""
        b, t, r, h, p = self.v.shape
        if t < 1 or self.k.shape[3] < 1 or h % self.k.shape[3]:
            raise ValueError(f"a scan has steps, and groups that divide the {h} heads, got {t} and {self.k.shape[3]}")
        chunk_len = max(1, CHUNK_ROWS // r) if self.chunk_len is None else self.chunk_len
        if chunk_len < 1:
            raise ValueError(f"chunks have at least one step, got {chunk_len}")
        skip = self.skip
        if skip is not None:
            skip = (skip if skip.ndim == 2 else skip.unsqueeze(-1)).expand(h, p)
        arguments = {**{name: getattr(self, name) for name in _TENSORS}, "skip": skip, **tensors}
        bounds = read_bounds(self.cu_seqlens, b, t)
        sizes = {"z": b if bounds is None else bounds.shape[0] - 1}
        call(function, self.v.dtype, arguments, results, bounds=bounds, sizes=sizes, chunk_len=chunk_len, **numbers)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return y and the final states."""
        y, final_state = empty_like(self.v), empty_like(self.initial_state)
        if self.initial_state.shape[0]:
            self.run("scan_forward", {}, {"y": y, "final_state": final_state})
        return y, final_state

    def backward(self, dy: Tensor, dfinal_state: Tensor) -> dict[str, Tensor]:
        """Return the gradients of the tensors, by name."""
        make = zeros_like if self.is_empty else empty_like
        grads = {f"d{name}": make(x) for name, x in self._asdict().items() if name in _TENSORS and x is not None}
        (z, h, p), acc_dtype = self.initial_state.shape[:3], self.log_decay.dtype
        if self.skip is not None:
            grads["dskip"] = make(empty((z, h, p), acc_dtype))
        if not self.is_empty:
            self.run("scan_backward", {"dy": dy, "dfinal_state": dfinal_state}, grads)
        if self.skip is not None:
            dskip = grads["dskip"].sum(0)
            grads["dskip"] = (dskip if self.skip.ndim == 2 else dskip.sum(-1)).to(self.skip.dtype)
        return grads


def _from_scan(*inputs: Any) -> _Scan:
    v, k, q, log_decay, state, cu_seqlens, chunk_len, _ = inputs
    return _Scan(v, k, q, log_decay, None, None, state, cu_seqlens, chunk_len)


def _from_ssd(*inputs: Any) -> _Scan:
    x, dt, log_decay, b, c, d, state, cu_seqlens, chunk_len, _ = inputs
    return _Scan(x.unsqueeze(2), b.unsqueeze(2), c.unsqueeze(2), log_decay, dt, d, state, cu_seqlens, chunk_len)


def _scan_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    return _from_scan(*inputs).forward()


def _scan_backward(dy: Tensor, dfinal_state: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    grads = _from_scan(*inputs).backward(dy, dfinal_state)
    return tuple(grads[name] for name in ("dv", "dk", "dq", "dlog_decay", "dinitial_state"))


def _ssd_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    y, final_state = _from_ssd(*inputs).forward()
    return y.squeeze(2), final_state


def _ssd_backward(dy: Tensor, dfinal_state: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    grads = _from_ssd(*inputs).backward(dy.unsqueeze(2), dfinal_state)
    dskip = grads.get("dskip", dy.new_empty(0))
    dx, db, dc = (grads[name].squeeze(2) for name in ("dv", "dk", "dq"))
    return dx, grads["dscale"], grads["dlog_decay"], db, dc, dskip, grads["dinitial_state"]


class _Rotated(NamedTuple):
    """Inputs of `rotated_trapezoid_scan`, in the order of its schema."""

    x: Tensor
    k: Tensor
    q: Tensor
    k_bias: Tensor
    q_bias: Tensor
    rate: Tensor
    step: Tensor
    log_decay: Tensor
    gamma: Tensor
    kappa: Tensor
    skip: Tensor
    value_weight: Tensor | None
    pending_state: Tensor
    initial_rotation: Tensor
    rotation: str
    lengths: Tensor | None
    cu_seqlens: Tensor | None
    chunk_len: int | None
    algorithm: str
    pathway: str

    def run(self, function: str, tensors: dict[str, Tensor | None], results: dict[str, Tensor]) -> None:
        """Call a kernel with all of them, and `tensors`."""
        r = self.k.shape[2]
        if r > 1 and self.value_weight is None:
            raise ValueError(f"value_weight must be given for more than one rank, got none for {r}")
        self._check_rotation()
        # One row of values for all ranks, each with its own weights: a stride of zero.
        v_btrhp = self.x.unsqueeze(2).expand(-1, -1, r, -1, -1)
        arguments = {
            name: getattr(self, name) for name in ("k_bias", "q_bias", "rate", "gamma", "kappa", "value_weight")
        }
        arguments |= {
            "dt": self.step,
            "initial_rotation": self.initial_rotation.flatten(2),
            "lengths": read_lengths(self.lengths, self.x.shape[1]),
            **tensors,
        }
        keys, skip, state = (self.k, self.q), self.skip, self.pending_state
        scan = _Scan(v_btrhp, *keys, self.log_decay, None, skip, state, self.cu_seqlens, self.chunk_len)
        scan.run(function, arguments, results, rotation=ROTATIONS.index(self.rotation))

    def _check_rotation(self) -> None:
        """Check that `rate` and `initial_rotation` belong together, and that the state has the channels that rotate."""
        heads, n, rates = self.x.shape[2], self.k.shape[4], self.rate.shape[-1]
        quaternion = self.rotation == "quaternion"
        count, width = (rates // max(1, 3 * heads), 4) if quaternion else (rates, 2)
        expected = (heads * count * 3, count, 4) if quaternion else (count, count)
        if (rates, *self.initial_rotation.shape[2:]) != expected:
            raise ValueError(
                f"rate and initial_rotation must describe the same {self.rotation} rotation of {heads} heads, "
                f"got {tuple(self.rate.shape)} and {tuple(self.initial_rotation.shape)}"
            )
        if count * width > n:
            raise ValueError(f"at most {n // width} {self.rotation} rotations fit into a state of {n}, got {count}")


def _rotated_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rotated = _Rotated(*inputs)
    (b, t, h, p), (r, n), z = rotated.x.shape, (rotated.k.shape[2], rotated.k.shape[4]), rotated.pending_state.shape[0]
    y, last_k = empty((b, t, r, h, p), rotated.x.dtype), empty((z, r, h, n), rotated.x.dtype)
    final_state, final_rotation = empty_like(rotated.pending_state), empty_like(rotated.initial_rotation)
    if z:
        results = {"y": y, "final_state": final_state, "last_k": last_k, "final_rotation": final_rotation}
        rotated.run("scan_forward", {}, results)
    return y, final_state, last_k, final_rotation


def _rotated_backward(
    dy: Tensor, dfinal_state: Tensor, dlast_k: Tensor, dfinal_rotation: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    rotated = _Rotated(*inputs)
    z, acc_dtype = rotated.pending_state.shape[0], rotated.step.dtype
    make = empty_like if z else zeros_like
    fields = {
        name: getattr(rotated, name) for name in ("k", "q", "rate", "log_decay", "gamma", "kappa", "initial_rotation")
    }
    fields |= {"v": rotated.x, "dt": rotated.step, "initial_state": rotated.pending_state}
    grads = {f"d{name}": make(x) for name, x in fields.items()}
    # Gradients of parameters come one per sequence, and are summed here.
    shared = {name: getattr(rotated, name) for name in ("k_bias", "q_bias", "value_weight")}
    shapes = {name: x.shape for name, x in shared.items() if x is not None} | {"skip": rotated.x.shape[2:]}
    grads |= {f"d{name}": make(empty((z, *shape), acc_dtype)) for name, shape in shapes.items()}
    if z:
        arguments: dict[str, Tensor | None] = {"dy": dy, "dfinal_state": dfinal_state, "dlast_k": dlast_k}
        rotated.run("scan_backward", {**arguments, "dfinal_rotation": dfinal_rotation.flatten(2)}, grads)
    for name, x in shared.items():
        if x is not None:
            grads[f"d{name}"] = grads[f"d{name}"].sum(0).to(x.dtype)
    grads["dskip"] = grads["dskip"].sum((0, 2)).to(rotated.skip.dtype)
    names = "v k q k_bias q_bias rate dt log_decay gamma kappa skip value_weight initial_state initial_rotation"
    return tuple(grads.get(f"d{name}", dy.new_empty(0)) for name in names.split())


IMPLEMENTATIONS = {
    "scan": Implementation(_scan_forward, _scan_backward, bindings.missing_for),
    "ssd": Implementation(_ssd_forward, _ssd_backward, bindings.missing_for),
    "rotated_trapezoid_scan": Implementation(_rotated_forward, _rotated_backward, bindings.missing_for),
}
