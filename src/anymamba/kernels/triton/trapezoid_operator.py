"""Mamba-3's rotated trapezoid (contract: scan/mamba3_scan.py) on the kernels of the scan.

Both pathways are one scan. Token j enters the state with weight `s_j = gamma_j + kappa_{j+1}`, that of its own step and
that of the next, and the outputs of its own step see it with `gamma_j` alone (chunk_outputs.py). At the end of a
sequence there is no next step, so the final state is that of the recurrence:

    S_t = exp(a_t) S_{t-1} + s_t Σ_r v_t[r] ⊗ k_t[r]        y_t[r] = S'_t q_t[r],  S' with gamma_t in the place of s_t

Rotated keys and queries of every head are written to memory before the scan: five kernels read them, and sines and
cosines cost more than the bytes. Quaternions are left to the portable code.

A forward launches six kernels, a backward about sixteen; between them torch expands values to ranks and shifts weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anymamba.core.dtypes import state_dtype
from anymamba.core.layout import last_steps, shift_earlier, shift_later
from anymamba.core.operators import allocate_like
from anymamba.kernels.triton.angle_kernels import (
    rate_gradients,
    rotate_keys,
    rotate_keys_backward,
    sum_angle_gradients,
    sum_angles,
)
from anymamba.kernels.triton.block_sizes import MAX_RANK, fit
from anymamba.kernels.triton.elementwise import ACC_DTYPES
from anymamba.kernels.triton.launch import launch, row_major
from anymamba.kernels.triton.part_sums import add_parts
from anymamba.kernels.triton.selection import GpuKernel
from anymamba.kernels.triton.ssd_operators import ChunkedScan

_BLOCK = 32  # tokens of a program


class _Rotated(NamedTuple):
    """Inputs of the operator, in its order."""

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
    pending_state: Tensor
    initial_rotation: Tensor
    rotation: str
    lengths: Tensor | None
    cu_seqlens: Tensor | None
    chunk_len: int | None
    algorithm: str
    pathway: str

    @property
    def pairs(self) -> int:
        """Return the number of angles of a head."""
        return self.initial_rotation.shape[2]

    def sum_angles(self) -> tuple[Tensor, Tensor]:
        """Return the angles of every token (tokens, h, s), and the last ones of every sequence."""
        (b, t, h, _), rate, dt = self.x.shape, row_major(self.rate).flatten(0, 1), row_major(self.dt).flatten(0, 1)
        theta = self.initial_rotation.new_empty((b * t, h, self.pairs))
        initial = self.initial_rotation.contiguous()
        (final,) = allocate_like(initial)
        launch(
            sum_angles,
            (initial.shape[0], h, -(-self.pairs // 32)),
            *(rate, dt, initial, self.cu_seqlens, theta, final, t, h, self.pairs, rate.stride(0), dt.stride(0)),
            BLOCK=_BLOCK,
            PAIRS=32,
            PACKED=self.cu_seqlens is not None,
            num_warps=4,
        )
        return theta, final

    def rotate(self, k: Tensor, bias: Tensor, theta: Tensor) -> Tensor:
        """Return keys or queries with their bias, rotated, (b, t, r, h, n)."""
        (b, t, h, _), (r, groups, n) = self.x.shape, k.shape[2:]
        flat = row_major(k).flatten(0, 1)
        rotated = k.new_empty((b, t, r, h, n))
        tile = fit((n + 1) // 2, 64)
        launch(
            rotate_keys,
            (-(-(b * t) // _BLOCK), h * r, -(-((n + 1) // 2) // tile)),
            *(flat, bias.contiguous(), theta, rotated, b * t, h, n, self.pairs, r, h // groups, *flat.stride()[:3]),
            HALVES=self.rotation == "halves",
            BLOCK=_BLOCK,
            PAIRS=tile,
            ACC=ACC_DTYPES[state_dtype(self.x.dtype)],
            num_warps=4,
        )
        return rotated

    def rotate_back(
        self, bias: Tensor, rotated: Tensor, drotated: Tensor, theta: Tensor, dtheta: Tensor, *, add: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of keys or queries and of their bias; write or add that of the angles of each rank."""
        (b, t, r, h, n), groups = rotated.shape, self.k.shape[3]
        blocks, tile = -(-(b * t) // _BLOCK), fit((n + 1) // 2, 32)
        dk = rotated.new_empty((b, t, r, groups, n))
        dbias = theta.new_empty((blocks, h, r, n))
        launch(
            rotate_keys_backward,
            (blocks, groups * r, -(-((n + 1) // 2) // tile)),
            *(rotated, drotated, theta, dk, dbias, dtheta, b * t, h, groups, n, self.pairs, r, h // groups),
            ADD=add,
            HALVES=self.rotation == "halves",
            BLOCK=_BLOCK,
            PAIRS=tile,
            ACC=ACC_DTYPES[state_dtype(self.x.dtype)],
            num_warps=4,
        )
        return dk, dbias.sum(0).to(bias.dtype)

    def angle_gradients(self, dtheta: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the rates, of dt through them, and of the first angles."""
        (b, t, h, _), sequences = self.x.shape, self.initial_rotation.shape[0]
        rate, dt = row_major(self.rate).flatten(0, 1), row_major(self.dt).flatten(0, 1)
        drate, ddt, dinitial = allocate_like(self.rate, self.dt, self.initial_rotation)
        launch(
            sum_angle_gradients,
            (sequences, h, -(-self.pairs // 32)),
            *(dtheta, dfinal.contiguous(), self.cu_seqlens, dinitial, t, h, self.pairs),
            BLOCK=_BLOCK,
            PAIRS=32,
            PACKED=self.cu_seqlens is not None,
            num_warps=4,
        )
        launch(
            rate_gradients,
            (-(-(b * t) // _BLOCK),),
            *(dtheta, rate, dt, drate, ddt, b * t, h, self.pairs, rate.stride(0), dt.stride(0)),
            BLOCK=_BLOCK,
            PAIRS=fit(self.pairs, 64),
            ACC=ACC_DTYPES[state_dtype(self.x.dtype)],
            num_warps=4,
        )
        return drate, ddt, dinitial

    def expand_ranks(self) -> Tensor:
        """Return the values of every rank, (b, t, r, h, p)."""
        v = self.x.unsqueeze(2)
        return v if self.value_weight is None else v * self.value_weight.transpose(0, 1).to(v.dtype)

    def scan(self, k: Tensor, q: Tensor) -> ChunkedScan:
        """Return the scan of rotated keys and queries."""
        scale = self.gamma + shift_earlier(self.kappa, self.cu_seqlens)
        skip = self.skip.unsqueeze(-1).expand(self.x.shape[2:])
        start = self.log_decay, self.pending_state, self.cu_seqlens, self.chunk_len
        return ChunkedScan(self.expand_ranks(), k, q, *start, scale=scale, diagonal=self.gamma, skip=skip)

    def last_tokens(self) -> Tensor:
        """Return the index of the last real token of every sequence, that of its first if there is none."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens[1:].long() - 1
        b, t = self.x.shape[:2]
        lengths = self.x.new_full((b,), t, dtype=torch.int64) if self.lengths is None else self.lengths.long()
        return torch.arange(b, device=self.x.device) * t + (lengths - 1).clamp(min=0)


def _forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rotated = _Rotated(*inputs)
    theta, final_rotation = rotated.sum_angles()
    k = rotated.rotate(rotated.k, rotated.k_bias, theta)
    y, state = rotated.scan(k, rotated.rotate(rotated.q, rotated.q_bias, theta)).forward()
    no_k = k.new_zeros((state.shape[0], *k.shape[2:]))
    return y, state, last_steps(k, rotated.cu_seqlens, rotated.lengths, no_k).contiguous(), final_rotation


def _backward(dy: Tensor, dstate: Tensor, dlast_k: Tensor, dfinal_rotation: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    rotated = _Rotated(*inputs)
    acc_dtype = state_dtype(rotated.x.dtype)
    # 1) Recompute what the forward rotated, and go back through the scan.
    theta, _ = rotated.sum_angles()
    k, q = (rotated.rotate(x, bias, theta) for x, bias in zip(rotated[1:3], rotated[3:5], strict=True))
    grads = rotated.scan(k, q).backward(dy, dstate, key_dtype=acc_dtype)
    # 2) The rotated key of the last token is a result of its own.
    dk, last = grads["dk"].flatten(0, 1), rotated.last_tokens()
    dlast = dlast_k.to(acc_dtype)
    if rotated.lengths is not None:
        dlast = dlast * (rotated.lengths > 0).view(-1, 1, 1, 1)
    dk.index_put_((last,), dk[last] + dlast)
    # 3) Rotate back.
    dtheta = theta.new_empty((rotated.k.shape[2], *theta.shape))
    dk, dk_bias = rotated.rotate_back(rotated.k_bias, k, dk, theta, dtheta, add=False)
    dq, dq_bias = rotated.rotate_back(rotated.q_bias, q, grads["dq"], theta, dtheta, add=True)
    drate, ddt, dinitial_rotation = rotated.angle_gradients(add_parts(dtheta), dfinal_rotation)
    # 4) Weights and values.
    dgamma = grads["dscale"] + grads["ddiagonal"]
    dkappa = shift_later(grads["dscale"], rotated.cu_seqlens)
    dv, weight = grads["dv"], rotated.value_weight
    if weight is None:
        dx, dweight = dv.squeeze(2), dy.new_empty(0)
    else:
        dx = torch.einsum("btrhp,hrp->bthp", dv.to(acc_dtype), weight.to(acc_dtype)).to(dv.dtype).contiguous()
        dweight = torch.einsum("btrhp,bthp->hrp", dv.to(acc_dtype), rotated.x.to(acc_dtype))
        dweight = dweight.to(weight.dtype).contiguous()
    dskip = grads["dskip"].sum(-1).to(rotated.skip.dtype)
    tokens = (dx, dk, dq, dk_bias, dq_bias, drate, ddt, grads["dlog_decay"], dgamma, dkappa)
    return (*tokens, dskip, dweight, grads["dinitial_state"], dinitial_rotation)


def _missing(x: Tensor, k: Tensor, *others: Any) -> str:
    if others[12] == "quaternion":
        return "quaternions rotate in portable code"
    if k.shape[2] > MAX_RANK:
        return f"there are at most {MAX_RANK} MIMO ranks"
    if not x.numel() or not k.numel() or not others[11].shape[2] or not others[10].shape[0]:
        return "there is nothing to compute"
    return ""


def _examples(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    acc_dtype, (t, r, h, p, g, n, s) = state_dtype(dtype), (37, 2, 4, 5, 2, 10, 3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def draw_wide(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, dtype=acc_dtype)

    tokens = (draw(1, t, h, p), draw(1, t, r, g, n), draw(1, t, r, g, n), draw(h, r, n), draw(h, r, n))
    steps = (draw_wide(1, t, s), draw_wide(1, t, h), -draw_wide(1, t, h), draw_wide(1, t, h), draw_wide(1, t, h))
    others = (draw(h), draw(h, r, p), draw_wide(3, h, p, n), draw_wide(3, h, s), "interleaved", None)
    return (*tokens, *steps, *others, torch.tensor([0, 1, 20, t], device=device), None, "fastest", "single")


KERNELS = {"rotated_trapezoid_scan": GpuKernel(_forward, _backward, _examples, _missing)}
