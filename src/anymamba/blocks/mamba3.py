"""Mamba-3: config, cache and block, SISO and MIMO (Lahoti et al. 2026).

    z, x, B, C, dt, A, trap, turn = in_proj(u)      dt = softplus(dt + dt_bias)      A = -max(act(A), A_floor)
    k, q = rotated(norm(B) + B_bias), rotated(norm(C) + C_bias)                      v[r] = x mimo_x[r]
    alpha = exp(dt A)     gamma = sigmoid(trap) dt     kappa = (1 - sigmoid(trap)) dt

    h_t = alpha_t (h_{t-1} + kappa_t Σ_r v_{t-1}[r] ⊗ k_{t-1}[r]) + gamma_t Σ_r v_t[r] ⊗ k_t[r]
    y_t[r] = h_t q_t[r] + D v_t[r]                  out = out_proj(Σ_r mimo_o[r] y[r] silu(z mimo_z[r]))

The trapezoidal rule weighs every token twice. Two pathways compute it on the same scan:

- *double*: two scans, one over tokens and one over their predecessors.
- *single*: one scan with the two weights of a token added up, `gamma_t + kappa_{t+1}`, from the state with the pending
  `kappa_0` term added; the look-ahead `kappa_{t+1}` is taken back from the token's own output. There the rotation of
  key and query cancels, so that correction is a few small products.

Both leave the same state at the end of a call, so that the pathway (`SsdPath.pathway`) may change at any cut.

| letter | b | t | d | h | p | n | g | e | r | z |
|---|---|---|---|---|---|---|---|---|---|---|
| | batch | time | d_model | heads | head width | state | groups | heads of a group | MIMO rank | sequences |

`prefill` from any cache, `step` unrolled from it, and any split of the sequence are the same function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anymamba.blocks.block import Block, Part
from anymamba.blocks.config import expect_sizes, make_config
from anymamba.blocks.initialisation import initial_dt_bias
from anymamba.blocks.mimo import gate_ranks
from anymamba.blocks.norms import GatedRMSNorm, RMSNorm
from anymamba.blocks.padding import Padding
from anymamba.blocks.preparation import prepare
from anymamba.blocks.rotation import ComplexRotation, FixedRotation, QuaternionRotation, Rotation
from anymamba.blocks.sequences import first_of, following, last_of, previous
from anymamba.blocks.turned_scan import turned_scan
from anymamba.ground.states import SavedTree
from anymamba.kernels.cpu.program import Program
from anymamba.kernels.watch import NotCovered
from anymamba.scan import SsdPath, scan, scan_step
from anymamba.scan.checks import expect_like, expect_shape
from anymamba.scan.numerics import state_dtype, without_autocast
from anymamba.scan.scan import resolve_path


@dataclass(frozen=True, kw_only=True)
class Mamba3Config:
    """Sizes and options of a Mamba-3 block, named as in the official implementation."""

    d_model: int  # D, width of the residual stream
    d_state: int = 128  # N, state size of a head
    expand: int | float = 2  # E / D
    headdim: int = 64  # P, width of a head
    ngroups: int = 1  # G, groups of heads that share B and C
    rope_fraction: int | float = 0.5  # share of the state that rotates, from 0 to 1
    dt_min: int | float = 0.001  # initial dt log-uniform in (dt_min, dt_max), at least dt_init_floor
    dt_max: int | float = 0.1
    dt_init_floor: int | float = 1e-4
    A_floor: int | float = 1e-4  # least decay rate
    is_outproj_norm: bool = False  # norm per head before the gate
    is_mimo: bool = False  # several inputs and outputs per head, with their own weights and pairing
    mimo_rank: int = 4  # R, of MIMO
    bias: bool = False  # of in_proj and out_proj; official blocks have none
    chunk_size: int | None = None  # L, for paths that carry no chunk length; None: SsdPath.optimal_chunk_len
    a_activation: Literal["heavy_tail", "softplus"] = "heavy_tail"  # official since June 2026 | before
    rotation: Literal["complex", "quaternion", "fixed"] = "complex"  # fixed: the same for every token, as RoPE
    rotation_range: int | float = 1.0  # largest turn per unit of dt, in half circles; 1 is official
    dt_limit: tuple[int | float, int | float] = (0.0, math.inf)  # dt is clamped to it, in every mode
    learnable_init_states: bool = False  # a parameter is the state of a fresh start

    def __post_init__(self) -> None:
        """Refuse combinations that cannot work."""
        expect_sizes(self)
        if self.expand <= 0 or not float(self.expand * self.d_model).is_integer():
            raise ValueError(
                f"Mamba3Config: expand · d_model must be a whole number of channels, got {self.expand} · {self.d_model}"
            )
        if self.d_inner % self.headdim:
            raise ValueError(
                f"Mamba3Config: headdim must divide the {self.d_inner} inner channels, got headdim = {self.headdim}"
            )
        if self.nheads % self.ngroups:
            raise ValueError(f"Mamba3Config: ngroups must divide the {self.nheads} heads, got ngroups = {self.ngroups}")
        if not 0 <= self.rope_fraction <= 1:
            raise ValueError(f"Mamba3Config: rope_fraction must be between 0 and 1, got {self.rope_fraction}")
        unit = 4 if self.rotation == "quaternion" else 2
        if self.rope_fraction > 0 and self.d_state % unit:
            raise ValueError(
                f"Mamba3Config: d_state must be a multiple of {unit} for {self.rotation} rotation, got {self.d_state}"
            )
        if self.rope_fraction > 0 and int(self.d_state * self.rope_fraction) < unit:
            raise ValueError(
                f"Mamba3Config: rope_fraction · d_state must be 0 or at least {unit}, the channels that turn together, "
                f"got {self.rope_fraction} · {self.d_state}"
            )
        if self.a_activation not in ("heavy_tail", "softplus"):
            raise ValueError(f"Mamba3Config: a_activation must be heavy_tail or softplus, got {self.a_activation!r}")
        if self.rotation not in ("complex", "quaternion", "fixed"):
            raise ValueError(f"Mamba3Config: rotation must be complex, quaternion or fixed, got {self.rotation!r}")
        if self.A_floor < 0:
            raise ValueError(f"Mamba3Config: A_floor must not be negative, got {self.A_floor}")
        if not 0 < self.dt_min <= self.dt_max:
            raise ValueError(f"Mamba3Config: 0 < dt_min <= dt_max must hold, got {self.dt_min} and {self.dt_max}")
        if not 0 <= self.dt_limit[0] <= self.dt_limit[1]:
            raise ValueError(f"Mamba3Config: dt_limit must satisfy 0 <= low <= high, got {self.dt_limit}")

    @property
    def d_inner(self) -> int:
        """E = expand · d_model."""
        return int(self.expand * self.d_model)

    @property
    def nheads(self) -> int:
        """H."""
        return self.d_inner // self.headdim

    @property
    def rank(self) -> int:
        """R: `mimo_rank` for MIMO, else 1."""
        return self.mimo_rank if self.is_mimo else 1

    def make_rotation(self) -> Rotation:
        """The rotation that these options describe."""
        width = int(self.d_state * self.rope_fraction)
        if self.rotation == "quaternion":
            return QuaternionRotation(width // 4, self.rotation_range)
        kind = FixedRotation if self.rotation == "fixed" else ComplexRotation
        return kind(width // 2, not self.is_mimo, self.rotation_range)


class _Mamba3CacheFields(NamedTuple):
    ssm: Float[Tensor, "b h p n"]
    k: Float[Tensor, "b r h n"]
    v: Float[Tensor, "b h p"]
    rotation: Float[Tensor, "b h *turn"]


class Mamba3Cache(_Mamba3CacheFields, SavedTree):
    """What a block carries from one token to the next.

    Attributes:
        ssm: the state h, (b, h, p, n), float32 or wider.
        k: the last key, after norm, bias and rotation, (b, r, h, n).
        v: the last x, before `mimo_x`, (b, h, p).
        rotation: the running rotation, angles (b, h, s) or unit quaternions (b, h, j, 4), float32 or wider.
    """

    __slots__ = ()
    STATES: ClassVar[frozenset[str]] = frozenset({"ssm", "rotation"})


class _Tokens(NamedTuple):
    """What the recurrence needs of each token, decays and weights in the state's dtype."""

    x_bthp: Tensor
    z_bthp: Tensor
    k_btrhn: Tensor
    q_btrhn: Tensor
    log_decay_bth: Tensor
    gamma_bth: Tensor
    kappa_bth: Tensor
    same_bthrq: Tensor
    turned: Tensor


class Mamba3(Block):
    """The Mamba-3 block. Parameter names, shapes and initialisation are the official ones.

    Args:
        config: a `Mamba3Config`, or d_model, with the other fields of `Mamba3Config` as keywords.
        device: of the parameters.
        dtype: of the parameters (dt_bias, D and the key and query biases are float32 or wider, as officially).
    """

    def __init__(
        self,
        config: Mamba3Config | int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        """Create and initialise the parameters."""
        super().__init__()
        self.config = config = make_config(Mamba3Config, config, fields)
        self.rotation = config.make_rotation()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        wide: dict[str, Any] = {"device": device, "dtype": state_dtype(dtype or torch.get_default_dtype())}
        c, heads = config, config.nheads
        self.in_proj = nn.Linear(c.d_model, sum(self._widths()), bias=c.bias, **factory)
        self.dt_bias = nn.Parameter(initial_dt_bias(heads, c.dt_min, c.dt_max, c.dt_init_floor, **wide))
        self.B_bias = nn.Parameter(torch.ones(heads, c.rank, c.d_state, **wide))
        self.C_bias = nn.Parameter(torch.ones(heads, c.rank, c.d_state, **wide))
        self.B_norm = RMSNorm(c.d_state, **factory)
        self.C_norm = RMSNorm(c.d_state, **factory)
        self.D = nn.Parameter(torch.ones(heads, **wide))
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

    def _like(self) -> Tensor:
        return self.B_norm.weight

    def _widths(self) -> list[int]:
        """Channels of z, x, B, C, dt, A, trap and the rotation in the projection."""
        c = self.config
        shared = c.rank * c.ngroups * c.d_state
        return [c.d_inner, c.d_inner, shared, shared, c.nheads, c.nheads, c.nheads, self.rotation.channels(c.nheads)]

    def seams(self) -> dict[str, tuple[Part, ...]]:
        """The parts of `in_proj`."""
        names, per_head = ("z", "x", "B", "C", "dt", "A", "trap", "turn"), ("dt", "A", "trap")
        parts = zip(names, self._widths(), strict=True)
        return {"in_proj": tuple(Part(name, rows, name not in per_head) for name, rows in parts if rows)}

    def init_cache(self, batch_size: int, dtype: torch.dtype | None = None) -> Mamba3Cache:
        """The cache of a fresh start: no previous token, no rotation, and the learnable initial state or zeros.

        Args:
            batch_size: rows, or packed sequences.
            dtype: of the activations; the parameters' if not given.
        """
        c, like = self.config, self.B_norm.weight
        dtype = dtype or like.dtype
        wide = state_dtype(dtype)
        if c.learnable_init_states:
            ssm = self.init_states.to(wide).repeat(batch_size, 1, 1, 1)
        else:
            ssm = like.new_zeros((batch_size, c.nheads, c.headdim, c.d_state), dtype=wide)
        return Mamba3Cache(
            ssm,
            like.new_zeros((batch_size, c.rank, c.nheads, c.d_state), dtype=dtype),
            like.new_zeros((batch_size, c.nheads, c.headdim), dtype=dtype),
            self.rotation.start(batch_size, c.nheads, like, wide),
        )

    def prefill(
        self,
        x: Float[Tensor, "b t d"],
        cache: Mamba3Cache | None = None,
        *,
        path: SsdPath | None = None,
        cu_seqlens: Int[Tensor, " z1"] | None = None,
        mask: Bool[Tensor, "b t"] | Int[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], Mamba3Cache]:
        """Run the block over a sequence of any length, from any cache to a new one.

        Args:
            x: inputs, (b, t, d).
            cache: where the rows (or packed sequences) continue from; a fresh start if not given.
            path: the scan's algorithm and the pathway; the default, with the config's `chunk_size`, if not given.
            cu_seqlens: boundaries (0, ..., t) of sequences packed into a batch of one; one cache row per sequence.
            mask: for padded batches, True for real tokens (b, t), padding anywhere in a row; or the lengths (b,) of
                rows that are padded at the end. Outputs at the padding are zero.

        Returns:
            y (b, t, d), and the cache behind the last real token of each row.
        """
        x, rows, padding = self._enter(x, cu_seqlens, mask)
        projected = self.in_proj(x)
        cache = self._checked_cache("prefill", cache, rows, projected)
        path = resolve_path(self._path(path), projected.device, projected.dtype)
        if path.algorithm == "fused" and path.pathway == "single" and type(self.rotation) is ComplexRotation:
            y_btrhp, z_bthp, new = self._compiled(projected, cache, path, cu_seqlens, padding)
        else:
            y_btrhp, z_bthp, new = self._portable(projected, cache, path, cu_seqlens, padding)
        out = self._output(y_btrhp, z_bthp)
        return (out if padding is None else padding.restore(out)), new

    def _portable(
        self,
        projected: Tensor,
        cache: Mamba3Cache,
        path: SsdPath,
        cu_seqlens: Tensor | None,
        padding: Padding | None,
    ) -> tuple[Tensor, Tensor, Mamba3Cache]:
        """Everything of `prefill` between the projections: y (b, t, r, h, p), the gate z (b, t, h, p), the cache."""
        tokens = self._tokens(projected, cache, cu_seqlens, padding)
        recur = self._single if path.pathway == "single" else self._double
        y_btrhp, ssm = recur(tokens, cache, path, cu_seqlens)
        lengths = padding and padding.lengths
        new = Mamba3Cache(
            ssm,
            last_of(tokens.k_btrhn, cu_seqlens, lengths, cache.k),
            last_of(tokens.x_bthp, cu_seqlens, lengths, cache.v),
            last_of(tokens.turned, cu_seqlens, lengths, cache.rotation),
        )
        return y_btrhp, tokens.z_bthp, new

    def _compiled(
        self,
        projected: Tensor,
        cache: Mamba3Cache,
        path: SsdPath,
        cu_seqlens: Tensor | None,
        padding: Padding | None,
    ) -> tuple[Tensor, Tensor, Mamba3Cache]:
        """`_portable` on the single pathway by the compiled kernels."""
        c, rotation = self.config, self.rotation
        assert isinstance(rotation, ComplexRotation)
        z_bthp, x_bthp, k_btrgn, q_btrgn, *raw = self._channels(projected)
        lengths = padding and padding.lengths
        dt_bth, log_decay_bth, gamma_bth, kappa_bth, rate_bts = prepare(
            *raw,
            self.dt_bias,
            c.a_activation == "heavy_tail",
            float(c.A_floor),
            *map(float, c.dt_limit),
            float(rotation.range),
            lengths,
        )
        y_btrhp, ssm, last_k, turned = turned_scan(
            x_bthp,
            self.B_norm(k_btrgn),
            self.C_norm(q_btrgn),
            self.B_bias,
            self.C_bias,
            rate_bts,
            dt_bth,
            log_decay_bth,
            gamma_bth,
            kappa_bth,
            self.D,
            self.mimo_x if c.is_mimo else None,
            self._with_pending(cache, first_of(kappa_bth, cu_seqlens)),
            cache.rotation,
            rotation.interleaved,
            path.chunk_len_or_optimal(c.d_state, c.headdim, c.rank),
            lengths,
            cu_seqlens,
        )
        last_v = last_of(x_bthp, cu_seqlens, lengths, cache.v)
        if lengths is not None:  # a row without tokens keeps what it had
            last_k = torch.where((lengths > 0).view(-1, 1, 1, 1), last_k, cache.k)
            turned = torch.where((lengths > 0).view(-1, 1, 1), turned, cache.rotation)
        return y_btrhp, z_bthp, Mamba3Cache(ssm, last_k, last_v, turned)

    def step(
        self, x: Float[Tensor, "b d"], cache: Mamba3Cache | None = None
    ) -> tuple[Float[Tensor, "b d"], Mamba3Cache]:
        """Run the block over one token.

        Args:
            x: inputs, (b, d).
            cache: where the rows go on from; a fresh start if not given. It is not changed.

        Returns:
            y (b, d), and the new cache.
        """
        if (done := self._step_whole(x, cache)) is not None:
            return done
        (b,) = self._check_input("step", x, "b d")
        projected = self.in_proj(x)
        cache = self._checked_cache("step", cache, b, projected)
        if (done := self._step_core(projected, cache)) is not None:
            return self.out_proj(done[0]), done[1]
        tokens = self._tokens(projected.unsqueeze(1), cache, None, None)
        state = self._with_pending(cache, tokens.kappa_bth[:, 0])
        v_brhp = self._values(tokens.x_bthp)[:, 0]
        weighted_brhp = (v_brhp * tokens.gamma_bth[:, 0, None, :, None]).to(v_brhp.dtype)
        k_brhn, q_brhn = tokens.k_btrhn[:, 0], tokens.q_btrhn[:, 0]
        y_brhp, ssm = scan_step(weighted_brhp, k_brhn, q_brhn, tokens.log_decay_bth[:, 0], state)
        y_brhp = torch.addcmul(y_brhp, self.D.to(y_brhp.dtype).unsqueeze(-1), v_brhp)
        out = self._output(y_brhp.unsqueeze(1), tokens.z_bthp).squeeze(1)
        return out, Mamba3Cache(ssm, k_brhn, tokens.x_bthp[:, 0].clone(), tokens.turned[:, 0])

    def _record_core(self, program: Program, projected: int) -> int:
        c: Mamba3Config = program.watch.value(self, "config")
        rotation = program.watch.value(self, "rotation")
        if type(self) is not Mamba3 or type(rotation) is not ComplexRotation:
            raise NotCovered
        names = ("z", "x", "b", "c", "dt", "a", "trap", "angle")
        starts = accumulate(self._widths()[:-1], initial=projected)
        key_norm, query_norm = (program.watch.child(self, name, RMSNorm) for name in ("B_norm", "C_norm"))
        out_norm = program.watch.child(self, "norm", GatedRMSNorm) if c.is_outproj_norm else None
        mimo = ("mimo_x", "mimo_z", "mimo_o") if c.is_mimo else ()
        y = program.slot(c.d_inner)
        program.mamba3(
            heads=c.nheads,
            head_width=c.headdim,
            groups=c.ngroups,
            state=c.d_state,
            rank=c.rank,
            pairs=rotation.pairs,
            interleaved=rotation.interleaved,
            heavy_tail=c.a_activation == "heavy_tail",
            rate_range=rotation.range * math.pi,
            dt_min=c.dt_limit[0],
            dt_max=c.dt_limit[1],
            a_floor=c.A_floor,
            key_eps=program.watch.value(key_norm, "eps"),
            query_eps=program.watch.value(query_norm, "eps"),
            out_eps=0.0 if out_norm is None else program.watch.value(out_norm, "eps"),
            **dict(zip(names, starts, strict=True)),
            keys=program.slot(2 * c.rank * c.ngroups * c.d_state),
            to=y,
            cache_state=program.cached(c.nheads, c.headdim, c.d_state, dtype=program.wide),
            cache_k=program.cached(c.rank, c.nheads, c.d_state),
            cache_v=program.cached(c.nheads, c.headdim),
            cache_angle=program.cached(c.nheads, rotation.pairs, dtype=program.wide),
            key_norm=program.parameter(key_norm, "weight", c.d_state),
            query_norm=program.parameter(query_norm, "weight", c.d_state),
            key_bias=program.parameter(self, "B_bias", c.nheads, c.rank, c.d_state),
            query_bias=program.parameter(self, "C_bias", c.nheads, c.rank, c.d_state),
            dt_bias=program.parameter(self, "dt_bias", c.nheads),
            skip=program.parameter(self, "D", c.nheads),
            **{name: program.parameter(self, name, c.nheads, c.rank, c.headdim) for name in mimo},
            **({} if out_norm is None else {"out_norm": program.parameter(out_norm, "weight", c.d_inner)}),
        )
        return y

    def step_infinite(self, x: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """The stationary output under a token that repeats for ever, in closed form: (b, d) -> (b, d).

        The token k steps back has weight `alpha^k gamma + alpha^{k-1} beta [k ≥ 1]` and is turned k times; the sum over
        all k is one factor on the key. No cache goes in or comes out.
        """
        self._check_input("step_infinite", x, "b d")
        z_b1hp, x_b1hp, k_b1rgn, q_b1rgn, dt_b1h, a_b1h, lam_b1h, raw = self._split(self.in_proj(x).unsqueeze(1))
        dt_bh, alpha_bh = dt_b1h[:, 0], torch.exp(dt_b1h * a_b1h)[:, 0]
        gamma_bh, kappa_bh = lam_b1h[:, 0] * dt_bh, (1 - lam_b1h[:, 0]) * dt_bh
        wide = dt_bh.dtype
        k_brhn, q_brhn = (
            m[:, 0].to(wide).repeat_interleave(self.config.nheads // self.config.ngroups, dim=2)
            + bias.to(wide).transpose(0, 1)
            for m, bias in ((k_b1rgn, self.B_bias), (q_b1rgn, self.C_bias))
        )
        k_sum_brhn = self.rotation.stationary(k_brhn, raw[:, 0], dt_bh, gamma_bh, kappa_bh * alpha_bh, alpha_bh)
        v_brhp = self._values(x_b1hp)[:, 0].to(wide)
        y_brhp = torch.einsum("brhn,bqhn,bqhp->brhp", q_brhn, k_sum_brhn, v_brhp)
        y_brhp = torch.addcmul(y_brhp, self.D.to(wide).unsqueeze(-1), v_brhp).to(x_b1hp.dtype)
        return self._output(y_brhp.unsqueeze(1), z_b1hp).squeeze(1)

    def _channels(self, projected: Tensor) -> tuple[Tensor, ...]:
        """(b, t, ...) -> z, x (b, t, h, p); B, C (b, t, r, g, n); dt, A, trap (b, t, h); rotation, all as they came."""
        c = self.config
        z, x, k, q, *raw = projected.split(self._widths(), dim=-1)
        heads, shared = (c.nheads, c.headdim), (c.rank, c.ngroups, c.d_state)
        return z.unflatten(-1, heads), x.unflatten(-1, heads), k.unflatten(-1, shared), q.unflatten(-1, shared), *raw

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """(b, t, ...) -> z, x (b, t, h, p); normed B, C (b, t, r, g, n); dt, A, lambda (b, t, h); rotation."""
        c = self.config
        z, x, k, q, dt, a, trap, raw = self._channels(projected)
        wide = state_dtype(projected.dtype)
        dt = F.softplus(dt.to(wide) + self.dt_bias.to(wide))
        if c.dt_limit != (0.0, math.inf):
            dt = dt.clamp(*c.dt_limit)
        activation = heavy_tail if c.a_activation == "heavy_tail" else F.softplus
        rate = -activation(a.to(wide)).clamp(min=c.A_floor)
        return z, x, self.B_norm(k), self.C_norm(q), dt, rate, torch.sigmoid(trap.to(wide)), raw

    def _tokens(
        self, projected: Tensor, cache: Mamba3Cache, cu_seqlens: Tensor | None, padding: Padding | None
    ) -> _Tokens:
        z, x, k, q, dt, rate, lam, raw = self._split(projected)
        if padding is not None:
            dt = dt.masked_fill(~padding.front.unsqueeze(-1), 0)
        turned = self.rotation.advance(raw, dt, cache.rotation, cu_seqlens)
        k_rotated, q_rotated = self.rotation.rotate(k, q, self.B_bias, self.C_bias, turned)
        same = self._same_step(k, q)
        return _Tokens(x, z, k_rotated, q_rotated, dt * rate, lam * dt, (1 - lam) * dt, same, turned)

    def _same_step(self, k_btrgn: Tensor, q_btrgn: Tensor) -> Tensor:
        """`<q_t[r], k_t[q]>` of the same step, (b, t, h, r, q): the rotation cancels and the biases split off."""
        g, wide = self.config.ngroups, self.B_bias.dtype
        k_btqgn, q_btrgn = k_btrgn.to(wide), q_btrgn.to(wide)
        groups = (g, self.config.nheads // g)
        k_bias_geqn, q_bias_gern = self.B_bias.unflatten(0, groups), self.C_bias.unflatten(0, groups)
        with without_autocast(k_btqgn.device):
            same_btgerq = (
                torch.einsum("btrgn,btqgn->btgrq", q_btrgn, k_btqgn).unsqueeze(3)
                + torch.einsum("btrgn,geqn->btgerq", q_btrgn, k_bias_geqn)
                + torch.einsum("gern,btqgn->btgerq", q_bias_gern, k_btqgn)
                + torch.einsum("gern,geqn->gerq", q_bias_gern, k_bias_geqn)
            )
        return same_btgerq.flatten(2, 3)

    def _values(self, x_bthp: Tensor) -> Tensor:
        """(b, t, h, p) -> (b, t, r, h, p)."""
        v = x_bthp.unsqueeze(2)
        return v * self.mimo_x.transpose(0, 1).to(v.dtype) if self.config.is_mimo else v

    def _with_pending(self, cache: Mamba3Cache, kappa_zh: Tensor) -> Tensor:
        """The state with the last token's second weight, which only the next token's step size tells."""
        v_zrhp = self._values(cache.v.unsqueeze(1))[:, 0].to(cache.ssm.dtype)
        weighted_zrhp = v_zrhp * kappa_zh[:, None, :, None]
        with without_autocast(cache.ssm.device):
            return cache.ssm + torch.einsum("zrhp,zrhn->zhpn", weighted_zrhp, cache.k.to(cache.ssm.dtype))

    def _single(
        self, tokens: _Tokens, cache: Mamba3Cache, path: SsdPath, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ahead_bth = following(tokens.kappa_bth, cu_seqlens)
        v_btrhp = self._values(tokens.x_bthp)
        y_btrhp, ssm = scan(
            (v_btrhp * (tokens.gamma_bth + ahead_bth)[:, :, None, :, None]).to(v_btrhp.dtype),
            tokens.k_btrhn,
            tokens.q_btrhn,
            tokens.log_decay_bth,
            initial_state=self._with_pending(cache, first_of(tokens.kappa_bth, cu_seqlens)),
            path=path,
            cu_seqlens=cu_seqlens,
        )
        skip = torch.diag_embed(self.D.unsqueeze(-1).expand(-1, self.rank))
        own_bthrq = (skip - ahead_bth[..., None, None] * tokens.same_bthrq).to(y_btrhp.dtype)
        if not self.config.is_mimo:
            return torch.addcmul(y_btrhp, own_bthrq.squeeze(-1).transpose(2, 3).unsqueeze(-1), v_btrhp), ssm
        mixed_btrhp = torch.einsum("bthrq,hqp->btrhp", own_bthrq, self.mimo_x.to(y_btrhp.dtype))
        return torch.addcmul(y_btrhp, mixed_btrhp, tokens.x_bthp.unsqueeze(2)), ssm

    def _double(
        self, tokens: _Tokens, cache: Mamba3Cache, path: SsdPath, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        v_btrhp = self._values(tokens.x_bthp)
        y_btrhp, ssm = scan(
            (v_btrhp * tokens.gamma_bth[:, :, None, :, None]).to(v_btrhp.dtype),
            tokens.k_btrhn,
            tokens.q_btrhn,
            tokens.log_decay_bth,
            initial_state=cache.ssm,
            path=path,
            cu_seqlens=cu_seqlens,
        )
        beta_bth = tokens.kappa_bth * torch.exp(tokens.log_decay_bth)
        v_before_btrhp = self._values(previous(tokens.x_bthp, cache.v, cu_seqlens))
        y_before_btrhp, ssm_before = scan(
            (v_before_btrhp * beta_bth[:, :, None, :, None]).to(v_btrhp.dtype),
            previous(tokens.k_btrhn, cache.k, cu_seqlens),
            tokens.q_btrhn,
            tokens.log_decay_bth,
            path=path,
            cu_seqlens=cu_seqlens,
        )
        y_btrhp = torch.addcmul(y_btrhp + y_before_btrhp, self.D.to(y_btrhp.dtype).unsqueeze(-1), v_btrhp)
        return y_btrhp, ssm + ssm_before

    def _output(self, y_btrhp: Tensor, z_bthp: Tensor) -> Tensor:
        """Gate (and norm) each rank, sum the ranks, project to (b, t, d)."""
        c = self.config
        if not c.is_outproj_norm:
            weights = (self.mimo_z, self.mimo_o) if c.is_mimo else ()
            return self.out_proj(gate_ranks(y_btrhp, z_bthp, *weights).flatten(2))
        if not c.is_mimo:
            return self.out_proj(self.norm(y_btrhp.squeeze(2).flatten(2), z_bthp.flatten(2)))
        z_btrhp = z_bthp.unsqueeze(2) * self.mimo_z.transpose(0, 1).to(z_bthp.dtype)
        normed_btrhp = self.norm(y_btrhp.flatten(3), z_btrhp.flatten(3)).unflatten(3, (c.nheads, c.headdim))
        return self.out_proj((normed_btrhp * self.mimo_o.transpose(0, 1).to(z_bthp.dtype)).sum(2).flatten(2))

    def _checked_cache(self, method: str, cache: Mamba3Cache | None, rows: int, projected: Tensor) -> Mamba3Cache:
        if cache is None:
            return self.init_cache(rows, projected.dtype)
        c, where = self.config, f"Mamba3.{method}"
        if not isinstance(cache, Mamba3Cache):
            raise TypeError(f"{where}: cache must be a Mamba3Cache, got {type(cache).__name__}")
        sizes = {"b": rows, "r": c.rank, "h": c.nheads, "p": c.headdim, "n": c.d_state}
        wide = state_dtype(projected.dtype)
        expect_shape(where, "cache.ssm", cache.ssm, "b h p n", sizes)
        expect_shape(where, "cache.k", cache.k, "b r h n", sizes)
        expect_shape(where, "cache.v", cache.v, "b h p", sizes)
        expected = self.rotation.start(rows, c.nheads, projected, wide).shape
        if cache.rotation.shape != expected:
            raise ValueError(
                f"{where}: cache.rotation must have shape {tuple(expected)}, got {tuple(cache.rotation.shape)}"
            )
        for name, dtype in (("ssm", wide), ("k", projected.dtype), ("v", projected.dtype), ("rotation", wide)):
            expect_like(where, f"cache.{name}", getattr(cache, name), dtype, projected.device)
        return cache


def heavy_tail(x: Tensor) -> Tensor:
    """`1 + x` for x ≥ 0, `1 / (1 - x)` below: positive, smooth, decaying like 1/|x| where softplus decays like e^x."""
    return F.relu(x) + 1 / (1 - x.clamp(max=0))
