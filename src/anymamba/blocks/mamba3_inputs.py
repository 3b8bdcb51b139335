"""Mamba-3: the inputs of its scan, and the cache that it starts from if several ranks share a sequence."""

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

_TOKEN_FIELDS = ("x", "k", "q", "angular_rate", "dt", "log_decay", "gamma", "kappa")  # one value per token


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
    initial: Mamba3Cache,
    path: SsdPath,
    cu_seqlens: Tensor | None,
    context: SequencePart,
) -> Mamba3Cache:
    """Return the cache that a part of a sequence starts from: last token, rotation and state of the part before it.

    The state at the end of the part takes a second scan. As a matrix product (`anymamba.scan.chunking`) it would need
    the rotated key of every token, head and rank in memory, which the scan does not keep.

    Args:
        kind: Which channels rotate together.
        inputs: Inputs of this rank's scan.
        initial: Cache that the sequence, or each packed one, starts from.
        path: Algorithm of the scan.
        cu_seqlens: Boundaries of packed sequences.
        context: Part of the sequence that this rank holds.
    """
    # 1) The inputs of the last sequence, the only one that continues on the next rank.
    time = last_sequence_time(cu_seqlens)
    rows = slice(None) if cu_seqlens is None else slice(-1, None)
    last = inputs._replace(**{name: getattr(inputs, name)[:, time] for name in _TOKEN_FIELDS})

    # 2) Its last key, input and rotation, which need only the rotation before the part.
    def advance(*values: Tensor) -> tuple[Tensor, ...]:
        _, _, rotation, k, x, bias, total = values
        rotation = compose_rotations(kind, rotation, total)
        return rotate(kind, k.unsqueeze(1), bias, rotation.unsqueeze(1))[:, 0], x, rotation

    total = total_rotation(kind, last.angular_rate, last.dt, initial.rotation[-1:])
    local = (last.k[:, -1], last.x[:, -1], last.k_bias, total)
    k, v, rotation = context.exchange_boundary_state(
        (initial.k, initial.v, initial.rotation), cu_seqlens, local, advance
    )

    # 3) The state: the scan of this part from zeros, added to what remains of the previous rank's state.
    local_state = initial.ssm[rows]
    if context.continues_to_next:
        _, local_state, _, _ = rotated_trapezoid_scan(
            *last,
            initial_state=torch.zeros_like(local_state),
            previous_k=k[rows],
            previous_x=v[rows],
            initial_rotation=rotation[rows],
            rotation_kind=kind,
            path=path,
        )
    total_log_decay = last.log_decay.sum(1)[..., None, None]
    (ssm,) = context.exchange_boundary_state((initial.ssm,), cu_seqlens, (total_log_decay, local_state), carry_state)
    return Mamba3Cache(ssm, k, v, rotation)
