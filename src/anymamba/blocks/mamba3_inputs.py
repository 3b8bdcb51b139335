"""Mamba-3: the inputs of its scan, and what it starts from if several workers share a sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anymamba.blocks.mamba3_config import Mamba3Cache
from anymamba.core.context_parallel import SequencePart
from anymamba.core.layout import last_sequence_time
from anymamba.ops.rotation import RotationKind, compose_rotations, rotate, total_rotation
from anymamba.scan import SsdPath, rotated_trapezoid_scan
from anymamba.scan.chunking import carry_state

_OF_TIME = ("x", "k", "q", "angular_rate", "dt", "log_decay", "gamma", "kappa")  # have a value for every token


class RotatedInputs(NamedTuple):
    """The tensors of `anymamba.rotated_trapezoid_scan`, in its order."""

    x: Float[Tensor, "b t h p"]
    k: Float[Tensor, "b t r g n"]
    q: Float[Tensor, "b t r g n"]
    k_bias: Float[Tensor, "h r n"]
    q_bias: Float[Tensor, "h r n"]
    angular_rate: Float[Tensor, "b t c"]
    dt: Float[Tensor, "b t h"]
    log_decay: Float[Tensor, "b t h"]
    gamma: Float[Tensor, "b t h"]
    kappa: Float[Tensor, "b t h"]
    D: Float[Tensor, " h"]
    value_weight: Float[Tensor, "h r p"] | None


def exchange_initial_cache(
    kind: RotationKind,
    inputs: RotatedInputs,
    starts: Mamba3Cache,
    path: SsdPath,
    cu_seqlens: Tensor | None,
    context: SequencePart,
) -> Mamba3Cache:
    """What a worker's part of a sequence starts from: the last token, the rotation and the state of the part before it.

    The state at the end of the part is a whole scan. As a matrix product (`anymamba.scan.chunking`) it would need the
    rotated key of every token, head and rank in memory, which the scan does not keep.

    Args:
        kind: of rotation.
        inputs: of this worker's scan.
        starts: what the sequence, or each packed one, starts from.
        path: the scan's algorithm.
        cu_seqlens: boundaries of packed sequences.
        context: this worker's part.
    """
    tail = last_sequence_time(cu_seqlens)
    of_time = {name: getattr(inputs, name)[:, tail] for name in _OF_TIME}
    last = inputs._replace(**of_time)

    def next_token(*values: Tensor) -> tuple[Tensor, ...]:
        _, _, rotation, k, x, bias, total = values
        rotation = compose_rotations(kind, rotation, total)
        return rotate(kind, k.unsqueeze(1), bias, rotation.unsqueeze(1))[:, 0], x, rotation

    total = total_rotation(kind, last.angular_rate, last.dt, starts.rotation[-1:])
    own = (last.k[:, -1], last.x[:, -1], last.k_bias, total)
    k, v, rotation = context.exchange_boundary_state((starts.k, starts.v, starts.rotation), cu_seqlens, own, next_token)
    rows = slice(None) if cu_seqlens is None else slice(-1, None)
    own_state = starts.ssm[rows]
    if context.continues_to_next:
        _, own_state, _, _ = rotated_trapezoid_scan(
            *last,
            initial_state=torch.zeros_like(own_state),
            previous_k=k[rows],
            previous_x=v[rows],
            initial_rotation=rotation[rows],
            rotation_kind=kind,
            path=path,
        )
    kept = last.log_decay.sum(1)[..., None, None]
    (ssm,) = context.exchange_boundary_state((starts.ssm,), cu_seqlens, (kept, own_state), carry_state)
    return Mamba3Cache(ssm, k, v, rotation)
