"""Mamba-3: the block, SISO and MIMO (Lahoti et al. 2026).

    z, x, B, C, dt, A, trap, rotation = in_proj(u)  dt = softplus(dt + dt_bias)      A = -max(act(A), A_floor)
    k, q = rotated(norm(B) + B_bias), rotated(norm(C) + C_bias)                      v[r] = x mimo_x[r]
    alpha = exp(dt A)     gamma = sigmoid(trap) dt     kappa = (1 - sigmoid(trap)) dt

    h_t = alpha_t (h_{t-1} + kappa_t Σ_r v_{t-1}[r] ⊗ k_{t-1}[r]) + gamma_t Σ_r v_t[r] ⊗ k_t[r]
    y_t[r] = h_t q_t[r] + D v_t[r]                  out = out_proj(Σ_r mimo_o[r] y[r] silu(z mimo_z[r]))

Where each line is computed: `ops/discretization.py` (step sizes, decays and weights), `ops/rotation.py` (how keys and
queries rotate), `scan/mamba3_scan.py` (the recurrence), `ops/norms_and_gates.py` (the gate over ranks).

| letter | b | t | d | h | p | n | g | r | z |
|---|---|---|---|---|---|---|---|---|---|
| | batch | time | d_model | heads | head width | state | groups | MIMO rank | sequences |

`prefill` from any cache, `step` unrolled from it, and any split of the sequence are the same function.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anymamba.blocks.base import Block
from anymamba.blocks.block_config import make_config
from anymamba.blocks.layers import GatedRMSNorm, ProjectionPart, RMSNorm, initial_dt_bias
from anymamba.blocks.mamba3_config import Mamba3Cache as Mamba3Cache
from anymamba.blocks.mamba3_config import Mamba3Config as Mamba3Config
from anymamba.blocks.mamba3_config import RotatedInputs
from anymamba.core.context_parallel import SequencePart
from anymamba.core.dtypes import state_dtype
from anymamba.core.layout import is_padding, last_sequence_time, last_steps
from anymamba.core.linear import apply_linear
from anymamba.ops.discretization import discretize
from anymamba.ops.norms_and_gates import rank_gate
from anymamba.ops.rotation import compose_rotations, identity_rotation, rotate, stationary_key, total_rotation
from anymamba.scan import SsdPath, rotated_trapezoid_scan
from anymamba.scan.chunking import carry_state

if TYPE_CHECKING:
    from anymamba.kernels.step_description import StepBuilder

_TOKEN_FIELDS = ("x", "k", "q", "angular_rate", "dt", "log_decay", "gamma", "kappa")  # inputs with one value per token


class Mamba3(Block):
    """The Mamba-3 block. Parameter names, shapes and initialization are the official ones.

    Args:
        config: A `Mamba3Config`, or d_model, with the other fields of `Mamba3Config` as keywords.
        positional: Fields after d_model, in the order of the official block.
        device: Device of the parameters.
        dtype: Dtype of the parameters (dt_bias, D and the key and query biases are float32 or wider, as officially).
    """

    CONFIG = Mamba3Config
    CACHE = Mamba3Cache
    MIRRORED_FIELDS = (
        *("d_model", "d_state", "expand", "d_inner", "headdim", "ngroups", "nheads", "rank", "is_mimo"),
        *("rope_fraction", "A_floor", "is_outproj_norm", "chunk_size"),
    )

    def __init__(
        self,
        config: Mamba3Config | int | None = None,
        *positional: Any,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        """Create and initialize the parameters."""
        super().__init__(make_config(Mamba3Config, config, fields, positional))
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        fp32_factory: dict[str, Any] = {"device": device, "dtype": state_dtype(dtype or torch.get_default_dtype())}
        c: Mamba3Config = self.config
        heads = c.nheads
        self.mimo_rank = c.rank  # officially 1 for SISO
        self.num_bc_heads = c.ngroups
        self.num_rope_angles = c.num_rotations
        self.in_proj = nn.Linear(c.d_model, sum(self._widths().values()), bias=c.bias, **factory)
        self.dt_bias = nn.Parameter(initial_dt_bias(heads, c.dt_min, c.dt_max, c.dt_init_floor, **fp32_factory))
        self.B_bias = nn.Parameter(torch.ones(heads, c.rank, c.d_state, **fp32_factory))
        self.C_bias = nn.Parameter(torch.ones(heads, c.rank, c.d_state, **fp32_factory))
        self.B_norm = RMSNorm(c.d_state, **factory)
        self.C_norm = RMSNorm(c.d_state, **factory)
        self.D = nn.Parameter(torch.ones(heads, **fp32_factory))
        if c.is_mimo:
            shape = (heads, c.rank, c.headdim)
            self.mimo_x = nn.Parameter(torch.full(shape, 1 / c.rank, **factory))
            self.mimo_z = nn.Parameter(torch.ones(shape, **factory))
            self.mimo_o = nn.Parameter(torch.full(shape, 1 / c.rank, **factory))
        if c.is_outproj_norm:
            self.norm = GatedRMSNorm(c.d_inner, group_size=c.headdim, norm_before_gate=True, **factory)
        self.out_proj = nn.Linear(c.d_inner, c.d_model, bias=c.bias, **factory)
        if c.learnable_init_states:
            self.init_states = nn.Parameter(torch.zeros(heads, c.headdim, c.d_state, **factory))
        for parameter in (self.dt_bias, self.D):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def reference_tensor(self) -> Tensor:
        """Return a parameter that has the dtype and device of the activations."""
        return self.B_norm.weight

    def _widths(self) -> dict[str, int]:
        """Return the widths of the parts of `in_proj`."""
        c = self.config
        inner, bc_width, heads = c.d_inner, c.rank * c.ngroups * c.d_state, c.nheads
        parts = {"z": inner, "x": inner, "B": bc_width, "C": bc_width, "dt": heads, "A": heads, "trap": heads}
        return {**parts, "rotation": c.rotation_channels}

    def projection_parts(self) -> dict[str, tuple[ProjectionPart, ...]]:
        """Return the parts of `in_proj`."""
        parts = ((name, rows) for name, rows in self._widths().items() if rows)
        return {"in_proj": tuple(ProjectionPart(name, rows, name not in ("dt", "A", "trap")) for name, rows in parts)}

    def cache_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a state, a key, a value and a rotation for each head."""
        c = self.config
        rotation = (c.nheads, c.num_rotations, 4) if c.rotation == "quaternion" else (c.nheads, c.num_rotations)
        shapes = {"ssm": (c.nheads, c.headdim, c.d_state), "k": (c.rank, c.nheads, c.d_state)}
        return {**shapes, "v": (c.nheads, c.headdim), "rotation": rotation}

    def init_cache(self, batch_size: int, dtype: torch.dtype | None = None) -> Mamba3Cache:
        """Return an empty cache: no previous token, no rotation, and the learnable initial state or zeros.

        Args:
            batch_size: Number of rows or packed sequences.
            dtype: Dtype of the activations. Default: that of the parameters.
        """
        cache: Mamba3Cache = super().init_cache(batch_size, dtype)
        c, ssm = self.config, cache.ssm
        identity = identity_rotation(c.rotation_kind, batch_size, c.nheads, c.num_rotations, ssm, ssm.dtype)
        return cache._replace(rotation=identity)

    def mix(
        self,
        x: Tensor,
        cache: Mamba3Cache,
        *,
        path: SsdPath,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        context: SequencePart | None = None,
    ) -> tuple[Tensor, Mamba3Cache]:
        """Compute the formulas at the top of this file."""
        inputs, z_bthp = self.scan_inputs(x, lengths=lengths)
        if context is not None:
            cache = self._exchange_initial_cache(inputs, cache, path, cu_seqlens, context)
        y_btrhp, ssm, k, rotation = rotated_trapezoid_scan(
            *inputs,
            initial_state=cache.ssm,
            previous_k=cache.k,
            previous_x=cache.v,
            initial_rotation=cache.rotation,
            rotation_kind=self.config.rotation_kind,
            path=path,
            lengths=lengths,
            cu_seqlens=cu_seqlens,
        )
        last_x = last_steps(inputs.x, cu_seqlens, lengths, cache.v)
        return self.output(y_btrhp, z_bthp), Mamba3Cache(ssm, k, last_x, rotation)

    def _exchange_initial_cache(
        self, inputs: RotatedInputs, start: Mamba3Cache, path: SsdPath, cu_seqlens: Tensor | None, context: SequencePart
    ) -> Mamba3Cache:
        """Return the cache that a part of a sequence starts from: last token, rotation and state of the part before it.

        The state at the end of the part takes a second scan. As a matrix product (`anymamba.scan.chunking`) it would
        need the rotated key of every token, head and rank in memory, which the scan does not keep.
        """
        kind = self.config.rotation_kind
        # 1) The inputs of the last sequence, the only one that continues on the next rank.
        time = last_sequence_time(cu_seqlens)
        rows = slice(None) if cu_seqlens is None else slice(-1, None)
        last = inputs._replace(**{name: getattr(inputs, name)[:, time] for name in _TOKEN_FIELDS})

        # 2) Its last key, input and rotation, which need only the rotation before the part.
        def advance(*values: Tensor) -> tuple[Tensor, ...]:
            _, _, rotation, k, x, bias, total = values
            rotation = compose_rotations(kind, rotation, total)
            return rotate(kind, k.unsqueeze(1), bias, rotation.unsqueeze(1))[:, 0], x, rotation

        total = total_rotation(kind, last.angular_rate, last.dt, start.rotation[-1:])
        token = (last.k[:, -1], last.x[:, -1], last.k_bias, total)
        k, v, rotation = context.exchange_boundary_state((start.k, start.v, start.rotation), cu_seqlens, token, advance)

        # 3) The state: the scan of this part from zeros, added to what remains of the previous rank's state.
        local_state = start.ssm[rows]
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
        local = (last.log_decay.sum(1)[..., None, None], local_state)
        (ssm,) = context.exchange_boundary_state((start.ssm,), cu_seqlens, local, carry_state)
        return Mamba3Cache(ssm, k, v, rotation)

    def scan_inputs(self, x: Tensor, *, lengths: Tensor | None = None) -> tuple[RotatedInputs, Tensor]:
        """Return the inputs of the scan, and the gate for `output`; arguments are those of `mix`."""
        z_bthp, x_bthp, k_btrgn, q_btrgn, *raw = self._split(apply_linear(self.in_proj, x))
        dt_bth, log_decay_bth, gamma_bth, kappa_bth, rate_btc = self._discretize(raw, lengths)
        rotation_dt_bth, rate_btc = self._rotation_steps(dt_bth, rate_btc, lengths)
        inputs = RotatedInputs(
            x_bthp,
            self.B_norm(k_btrgn),
            self.C_norm(q_btrgn),
            self.B_bias,
            self.C_bias,
            rate_btc,
            rotation_dt_bth,
            log_decay_bth,
            gamma_bth,
            kappa_bth,
            self.D,
            self.mimo_x if self.config.is_mimo else None,
        )
        return inputs, z_bthp

    def step_infinite(self, x: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """Return the stationary output for a token that repeats forever, in closed form.

        The token k steps back has weight `alpha^k gamma + alpha^{k-1} beta [k ≥ 1]` and is rotated k times; the sum
        over all k is one factor on the key. No cache goes in or comes out.
        """
        self._check_input(f"{type(self).__name__}.step_infinite", x, "b d")
        c: Mamba3Config = self.config
        z_b1hp, x_b1hp, k_b1rgn, q_b1rgn, *raw = self._split(apply_linear(self.in_proj, x).unsqueeze(1))
        dt_b1h, log_decay_b1h, gamma_b1h, kappa_b1h, rate_b1c = self._discretize(raw, None)
        rotation_dt_bh, rate_bc = (x[:, 0] for x in self._rotation_steps(dt_b1h, rate_b1c, None))
        alpha_bh, acc_dtype = torch.exp(log_decay_b1h)[:, 0], dt_b1h.dtype
        k_brhn, q_brhn = (
            normed[:, 0].to(acc_dtype).repeat_interleave(c.nheads // c.ngroups, dim=2)
            + bias.to(acc_dtype).transpose(0, 1)
            for normed, bias in ((self.B_norm(k_b1rgn), self.B_bias), (self.C_norm(q_b1rgn), self.C_bias))
        )
        gamma_bh, beta_bh = gamma_b1h[:, 0], kappa_b1h[:, 0] * alpha_bh
        k_sum_brhn = stationary_key(
            c.rotation_kind, k_brhn, rate_bc, rotation_dt_bh, gamma_bh, beta_bh, alpha_bh, c.num_rotations
        )
        v_brhp = x_b1hp.to(acc_dtype)
        if c.is_mimo:
            v_brhp = v_brhp * self.mimo_x.to(acc_dtype).transpose(0, 1)
        y_brhp = torch.einsum("brhn,bqhn,bqhp->brhp", q_brhn, k_sum_brhn, v_brhp)
        y_brhp = torch.addcmul(y_brhp, self.D.to(acc_dtype).unsqueeze(-1), v_brhp).to(x_b1hp.dtype)
        return self.output(y_brhp.unsqueeze(1), z_b1hp).squeeze(1)

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Split (b, t, ...) into z, x (b, t, h, p); B, C (b, t, r, g, n); dt, A, trap (b, t, h); rotation (b, t, c)."""
        c = self.config
        z, x, k, q, *raw = projected.split(list(self._widths().values()), dim=-1)
        hp, rgn = (c.nheads, c.headdim), (c.rank, c.ngroups, c.d_state)
        return z.unflatten(-1, hp), x.unflatten(-1, hp), k.unflatten(-1, rgn), q.unflatten(-1, rgn), *raw

    def _discretize(self, raw: list[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        c: Mamba3Config = self.config
        dt, a, trapezoid_logit, rotation = raw
        return discretize(
            dt,
            a,
            trapezoid_logit,
            rotation,
            self.dt_bias,
            heavy_tail=c.a_activation == "heavy_tail",
            a_floor=c.A_floor,
            dt_limit=c.dt_limit,
            max_rotation=c.rotation_range,
            quaternion=c.rotation == "quaternion",
            lengths=lengths,
        )

    def _rotation_steps(self, dt_bth: Tensor, rate_btc: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return step sizes and angular rates of the rotation; a fixed rotation does not depend on the token."""
        c: Mamba3Config = self.config
        if c.rotation != "fixed":
            return dt_bth, rate_btc
        index_s = torch.arange(c.num_rotations, dtype=dt_bth.dtype, device=dt_bth.device)
        rate_s = c.rotation_range * 10000 ** (-index_s / max(1, c.num_rotations))
        rotation_dt_bth = torch.ones_like(dt_bth)
        if lengths is not None:
            rotation_dt_bth = rotation_dt_bth.masked_fill(is_padding(lengths, dt_bth.shape[1]).unsqueeze(-1), 0)
        return rotation_dt_bth, rate_s.expand(*dt_bth.shape[:2], -1)

    def output(self, y_btrhp: Tensor, z_bthp: Tensor) -> Tensor:
        """Apply what follows the scan: gate (and norm) each rank, sum the ranks, project to (b, t, d)."""
        c: Mamba3Config = self.config
        if not c.is_outproj_norm:
            weights = (self.mimo_z, self.mimo_o) if c.is_mimo else ()
            return apply_linear(self.out_proj, rank_gate(y_btrhp, z_bthp, *weights).flatten(2))
        if not c.is_mimo:
            return apply_linear(self.out_proj, self.norm(y_btrhp.squeeze(2).flatten(2), z_bthp.flatten(2)))
        z_btrhp = z_bthp.unsqueeze(2) * self.mimo_z.transpose(0, 1).to(z_bthp.dtype)
        normed_btrhp = self.norm(y_btrhp.flatten(3), z_btrhp.flatten(3)).unflatten(3, (c.nheads, c.headdim))
        return apply_linear(
            self.out_proj, (normed_btrhp * self.mimo_o.transpose(0, 1).to(z_bthp.dtype)).sum(2).flatten(2)
        )

    def describe_core(self, builder: StepBuilder, projected: int) -> int:
        """Numbers and keys that heads share, then states, readout and gate."""
        builder.check_unmodified(self, Mamba3)
        c: Mamba3Config = self.config
        if c.rotation == "fixed":
            builder.reject("a fixed rotation has no compiled step")
        names = ("z", "x", "b", "c", "dt", "a", "trap", "rotation_raw")
        starts = dict(zip(names, accumulate(list(self._widths().values())[:-1], initial=projected), strict=True))
        key_norm, query_norm = (builder.submodule(self, name, RMSNorm) for name in ("B_norm", "C_norm"))
        out_norm = builder.submodule(self, "norm", GatedRMSNorm) if c.is_outproj_norm else None
        by_head = {"key_bias": "B_bias", "query_bias": "C_bias"}
        mimo = ("mimo_x", "mimo_z", "mimo_o") if c.is_mimo else ()
        y, cache = builder.slot(c.d_inner), self.cache_shapes()
        fields = {
            "heads": c.nheads,
            "head_width": c.headdim,
            "groups": c.ngroups,
            "state": c.d_state,
            "rank": c.rank,
            "num_rotations": c.num_rotations,
            "rotation": c.rotation_kind,
            "heavy_tail": c.a_activation == "heavy_tail",
            "rate_range": c.rotation_range,
            "dt_min": c.dt_limit[0],
            "dt_max": c.dt_limit[1],
            "a_floor": c.A_floor,
            "key_eps": builder.attribute(key_norm, "eps"),
            "query_eps": builder.attribute(query_norm, "eps"),
            "out_eps": 0.0 if out_norm is None else builder.attribute(out_norm, "eps"),
            **starts,
            "numbers": builder.slot(4 * c.nheads + c.rotation_channels),
            "keys": builder.slot(2 * c.rank * c.ngroups * c.d_state),
            "to": y,
            "cache_state": builder.cache_tensor(*cache["ssm"], dtype=builder.acc_dtype),
            "cache_k": builder.cache_tensor(*cache["k"]),
            "cache_v": builder.cache_tensor(*cache["v"]),
            "cache_rotation": builder.cache_tensor(*cache["rotation"], dtype=builder.acc_dtype),
            "key_norm": builder.parameter(key_norm, "weight", c.d_state),
            "query_norm": builder.parameter(query_norm, "weight", c.d_state),
            **{field: builder.parameter(self, name, c.nheads, c.rank, c.d_state) for field, name in by_head.items()},
            "dt_bias": builder.parameter(self, "dt_bias", c.nheads),
            "skip": builder.parameter(self, "D", c.nheads),
            **{name: builder.parameter(self, name, c.nheads, c.rank, c.headdim) for name in mimo},
        }
        if out_norm is not None:
            fields["out_norm"] = builder.parameter(out_norm, "weight", c.d_inner)
        builder.phase("mamba3_tokens", **fields)
        builder.phase("mamba3_heads", **fields)
        return y
