"""The scan: one signature, several algorithms that agree."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from anymamba.core import anomaly
from anymamba.core.checks import (
    check_annotated_shapes,
    check_dtypes,
    check_initial_state,
    check_nonpositive,
)
from anymamba.core.dtypes import without_autocast
from anymamba.core.operators import Operator, allocate_like, is_tracing
from anymamba.core.registry import Implementation
from anymamba.scan import segments, serial_recalculated
from anymamba.scan.minimal import scan_minimal
from anymamba.scan.path import SsdPath
from anymamba.scan.recurrent import scan_recurrent
from anymamba.scan.serial import scan_serial


@check_annotated_shapes
def scan(
    v: Float[Tensor, "b t r h p"],
    k: Float[Tensor, "b t r g n"],
    q: Float[Tensor, "b t r g n"],
    log_decay: Float[Tensor, "b t h"],
    *,
    initial_state: Float[Tensor, "z h p n"] | None = None,
    path: SsdPath | None = None,
    cu_seqlens: Int[Tensor, " z1"] | None = None,
) -> tuple[Float[Tensor, "b t r h p"], Float[Tensor, "z h p n"]]:
    """Run the linear recurrence that every SSD model is built on over a sequence.

        S_t = exp(a_t) S_{t-1} + Σ_r v_t[r] ⊗ k_t[r]        y_t[r] = S_t q_t[r]

    It is differentiable in every tensor, through both results. `v`, `k` and `q` share one dtype; decays and states are
    float32, or float64 for float64 inputs, and so is all arithmetic.

    Args:
        v: Values of MIMO rank r and h heads of width p.
        k: Keys of g groups of heads; head h reads group h // (h / g).
        q: Queries of g groups of heads.
        log_decay: Log-decays a, never positive (-inf forgets the state). Checked in eager mode on the CPU; elsewhere a
            positive value is undefined behavior.
        initial_state: S_{-1} of each row or packed sequence. Default: zeros.
        path: Algorithm and chunk length. Default: `SsdPath()`.
        cu_seqlens: Boundaries (0, ..., t) of sequences packed one after another into a batch of one, strictly
            increasing. Nothing crosses a boundary.

    Returns:
        y in the dtype of `v`, and the final state(s).

    Raises:
        ValueError: Shapes, devices or values do not match.
        TypeError: Dtypes do not match.
        RuntimeError: `path` requests a compiled kernel, and there is none.
    """
    path = SsdPath.or_default(path)
    check_groups("scan", v.shape[3], k.shape[3], v.shape[2])
    check_dtypes("scan", "v", v, activations={"k": k, "q": q}, states={"log_decay": log_decay})
    check_nonpositive("scan", "log_decay", log_decay, " (a decay is at most 1)")
    state = check_initial_state("scan", initial_state, v, (*v.shape[3:], k.shape[4]), cu_seqlens)
    with without_autocast(v.device):
        y, final_state = scan_operator(v, k, q, log_decay, state, cu_seqlens, path.chunk_len, path.algorithm)
    return y, final_state


def check_inputs_finite(where: str, **inputs: Tensor | None) -> None:
    """Apply the finiteness guard under the caller's names, before they are combined; `log_decay` may be infinite."""
    if anomaly.is_check_finite_on() and not is_tracing():
        anomaly.check_tensors_finite(f"{where}: input", [*inputs], inputs.values(), frozenset({"log_decay"}))


def check_groups(where: str, heads: int, groups: int, ranks: int) -> None:
    """Raise `ValueError` unless there is a rank, and the groups divide the heads."""
    for count, letter, name in ((ranks, "r", "ranks"), (groups, "g", "groups")):
        if count < 1:
            raise ValueError(f"{where}: there must be at least one of the {name}, got {letter} = 0")
    if heads % groups:
        raise ValueError(f"{where}: groups must divide heads, got g = {groups} and h = {heads}")


def fastest(v: Tensor, *_: Any) -> str:
    """Return the algorithm that "fastest" means without a kernel: a single step needs no chunks."""
    return "recurrent" if v.shape[1] == 1 else "serial_recalculated"


def _recalculated_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    return (serial_recalculated if inputs[0].is_cpu else segments).forward(*inputs)


def _recalculated_backward(dy: Tensor, dfinal_state: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return (serial_recalculated if inputs[0].is_cpu else segments).backward(dy, dfinal_state, *inputs)


_ALGORITHMS = {
    "recurrent": Implementation(scan_recurrent),
    "minimal": Implementation(scan_minimal),
    "serial": Implementation(scan_serial),
    "serial_recalculated": Implementation(_recalculated_forward, _recalculated_backward),
}


def _definition(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Run the equivalent algorithm that autograd differentiates."""
    algorithm = inputs[-1]
    if algorithm == "fused":
        raise RuntimeError("SsdPath.fused(): there is no compiled kernel inside anymamba.portable()")
    name = {"fastest": "minimal", "serial_recalculated": "serial"}.get(algorithm, algorithm)
    y, final_state = _ALGORITHMS[name].forward(*inputs)
    return y, final_state


scan_operator = Operator(
    "scan",
    inputs="Tensor v, Tensor k, Tensor q, Tensor log_decay, Tensor initial_state, Tensor? cu_seqlens, int? chunk_len, "
    "str algorithm",
    outputs="y, final_state",
    differentiable=5,
    fake=lambda v, k, q, log_decay, state, *_: allocate_like(v, state),
    definition=_definition,
    portable=_ALGORITHMS,
    fastest=fastest,
    may_be_infinite=frozenset({"log_decay"}),
)
