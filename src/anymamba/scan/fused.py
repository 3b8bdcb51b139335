"""The scan by the compiled kernels: the algorithm of `serial_recalculated`, fused and vectorised, for CPUs.

It is registered as an operator, so that `torch.compile` and `torch.export` see one node, for any sequence length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymamba.kernels.cpu.scan import scan_backward, scan_forward, ssd_backward, ssd_forward
from anymamba.operators import define_operator
from anymamba.scan.operator import scan_operator

scan_fused = scan_operator("scan_fused", scan_forward, scan_backward)


def _fake(v: Tensor, k: Tensor, q: Tensor, a: Tensor, scale: Any, skip: Any, initial_state: Tensor, *_: Any) -> Any:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=v.device) for x in (v, initial_state))


# The scan of `scale · v` with `skip · v` added to y, without a pass over memory for either.
ssd_fused = define_operator(
    "ssd_fused",
    inputs="Tensor v, Tensor k, Tensor q, Tensor log_decay, Tensor? scale, Tensor? skip, Tensor initial_state, "
    "SymInt chunk_len, Tensor? cu_seqlens",
    outputs=2,
    differentiable=7,
    forward=ssd_forward,
    backward=ssd_backward,
    fake=_fake,
)
