"""Mamba-2: config, cache and block (Dao & Gu 2024, "Transformers are SSMs").

    z, xBC, dt = in_proj(u)                       xBC = silu(conv(xBC))           dt = clamp(softplus(dt + dt_bias))
    h_t = exp(dt_t A) h_{t-1} + dt_t x_t ⊗ B_t    y_t = h_t C_t + D x_t           out = out_proj(norm(y silu(z)))

| letter | b | t | d | i | h | p | n | g | v | w |
|---|---|---|---|---|---|---|---|---|---|---|
| | batch | time | d_model | d_ssm = h p | heads | head width | state | groups | i + 2 g n | conv width |

`prefill` from any cache, `step` unrolled from it, and any split of the sequence are the same function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anymamba.blocks.base import Block
from anymamba.blocks.block_config import BlockConfig, make_config
from anymamba.blocks.layers import CausalConv, GatedRMSNorm, ProjectionPart, initial_dt_bias
from anymamba.core.cache_io import SavableTree
from anymamba.core.context_parallel import SequencePart
from anymamba.core.dtypes import state_dtype
from anymamba.core.layout import last_sequence_time
from anymamba.core.linear import apply_linear
from anymamba.ops.conv import exchange_conv_window
from anymamba.ops.discretization import stationary_weight, step_sizes
from anymamba.scan import SsdPath, ssd
from anymamba.scan.chunking import carry_state, compute_final_state

if TYPE_CHECKING:
    from anymamba.kernels.step_description import StepBuilder


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(BlockConfig):
    """Sizes and options of a Mamba-2 block, named as in the official implementation."""

    LAST_POSITIONAL_FIELD: ClassVar[str] = "chunk_size"

    d_model: int = field(kw_only=False)  # D, width of the residual stream
    d_state: int = 128  # N, state size of a head
    d_conv: int = 4  # W, width of the convolution; 1 is a per-token scale
    conv_init: float | None = None  # conv weights uniform in ±conv_init; None: ±1/√W
    expand: int | float = 2  # E / D
    headdim: int = 64  # P, width of a head
    d_ssm: int | None = None  # channels that pass the SSM, the rest pass a gated MLP; None: all
    ngroups: int = 1  # G, groups of heads that share B and C
    A_init_range: tuple[int | float, int | float] = (1, 16)  # -A uniform in it
    D_has_hdim: bool = False  # skip weight per channel instead of per head
    rmsnorm: bool = True  # norm before out_proj; False: gate only
    norm_before_gate: bool = False
    dt_min: int | float = 0.001  # initial dt log-uniform in (dt_min, dt_max), at least dt_init_floor
    dt_max: int | float = 0.1
    dt_init_floor: int | float = 1e-4
    dt_limit: tuple[int | float, int | float] = (0.0, math.inf)  # dt is clamped to it, in every mode
    bias: bool = False  # of in_proj and out_proj
    conv_bias: bool = True
    chunk_size: int | None = None  # L, for paths that carry no chunk length; None: SsdPath.optimal_chunk_len
    learnable_init_states: bool = False  # a parameter is the state of an empty cache
    norm_eps: int | float = 1e-5  # of the norm before out_proj

    def __post_init__(self) -> None:
        """Reject combinations that cannot work."""
        self.check_common_fields()
        if not 0 < self.ssm_width <= self.d_inner:
            raise ValueError(f"Mamba2Config: d_ssm must be between 1 and d_inner = {self.d_inner}, got {self.d_ssm}")
        self.check_heads(self.ssm_width)
        if self.norm_eps <= 0:
            raise ValueError(f"Mamba2Config: norm_eps must be positive, got {self.norm_eps}")
        if not 0 < self.A_init_range[0] <= self.A_init_range[1]:
            raise ValueError(f"Mamba2Config: A_init_range must satisfy 0 < low <= high, got {self.A_init_range}")

    @property
    def ssm_width(self) -> int:
        """Return the number of channels that pass the SSM."""
        return self.d_inner if self.d_ssm is None else self.d_ssm

    @property
    def nheads(self) -> int:
        """Return the number of heads H."""
        return self.ssm_width // self.headdim

    @property
    def conv_dim(self) -> int:
        """Return the number of channels that pass the convolution: x, B and C."""
        return self.ssm_width + 2 * self.ngroups * self.d_state


class _Mamba2CacheFields(NamedTuple):
    conv: Float[Tensor, "b v w"]
    ssm: Float[Tensor, "b h p n"]


class Mamba2Cache(_Mamba2CacheFields, SavableTree):
    """The cache of a Mamba-2 block: everything that it carries from one token to the next.

    Attributes:
        conv: Last `d_conv` inputs of the convolution, newest last, (b, v, w), in the activations' dtype.
        ssm: State, (b, h, p, n), float32 or wider.
    """

    __slots__ = ()
    FP32_FIELDS: ClassVar[frozenset[str]] = frozenset({"ssm"})


class SsdInputs(NamedTuple):
    """The tensors of `anymamba.ssd`, in its order."""

    x: Float[Tensor, "b t h p"]
    dt: Float[Tensor, "b t h"]
    A: Float[Tensor, " h"]
    B: Float[Tensor, "b t g n"]
    C: Float[Tensor, "b t g n"]
    D: Float[Tensor, "*h_or_hp"]


class Mamba2(Block):
    """The Mamba-2 block. Parameter names, shapes and initialization are the official ones.

    Args:
        config: A `Mamba2Config`, or d_model, with the other fields of `Mamba2Config` as keywords.
        positional: Fields after d_model, in the order of the official block.
        device: Device of the parameters.
        dtype: Dtype of the parameters (D is float32 or wider, as officially).
    """

    CONFIG = Mamba2Config
    CACHE = Mamba2Cache
    MIRRORED_FIELDS = (
        *("d_model", "d_state", "d_conv", "expand", "d_inner", "headdim", "ngroups", "nheads", "conv_dim"),
        *("D_has_hdim", "rmsnorm", "norm_before_gate", "dt_limit", "chunk_size"),
    )

    def __init__(
        self,
        config: Mamba2Config | int | None = None,
        *positional: Any,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        """Create and initialize the parameters."""
        super().__init__(make_config(Mamba2Config, config, fields, positional))
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        c: Mamba2Config = self.config
        heads, width = c.nheads, c.ssm_width
        self.d_ssm = width  # a number, where the config may hold None
        self.mlp_width = c.d_inner - width
        self.in_proj = nn.Linear(c.d_model, 2 * self.mlp_width + width + c.conv_dim + heads, bias=c.bias, **factory)
        self.conv1d = CausalConv(c.conv_dim, c.d_conv, bias=c.conv_bias, **factory)
        if c.conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -c.conv_init, c.conv_init)
        self.dt_bias = nn.Parameter(initial_dt_bias(heads, c.dt_min, c.dt_max, c.dt_init_floor, **factory))
        a_h = torch.empty(heads, dtype=torch.float32, device=device).uniform_(*c.A_init_range)
        self.A_log = nn.Parameter(torch.log(a_h).to(dtype or torch.get_default_dtype()))
        skip_dtype = state_dtype(dtype or torch.get_default_dtype())
        self.D = nn.Parameter(torch.ones(width if c.D_has_hdim else heads, device=device, dtype=skip_dtype))
        if c.rmsnorm:
            norm: dict[str, Any] = {
                "group_size": width // c.ngroups,
                "norm_before_gate": c.norm_before_gate,
                "eps": c.norm_eps,
            }
            self.norm = GatedRMSNorm(width, **norm, **factory)
        self.out_proj = nn.Linear(c.d_inner, c.d_model, bias=c.bias, **factory)
        if c.learnable_init_states:
            self.init_states = nn.Parameter(torch.zeros(heads, c.headdim, c.d_state, **factory))
        for parameter in (self.dt_bias, self.A_log, self.D):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def reference_tensor(self) -> Tensor:
        """Return a parameter that has the dtype and device of the activations."""
        return self.conv1d.weight

    def projection_parts(self) -> dict[str, tuple[ProjectionPart, ...]]:
        """Return the parts of `in_proj`, as `_split` and `_heads` cut its output."""
        c = self.config
        mlp, ssm, bc = self.mlp_width, c.ssm_width, c.ngroups * c.d_state
        names = {"z0": mlp, "x0": mlp, "z": ssm, "x": ssm, "B": bc, "C": bc}
        parts = (ProjectionPart(name, rows) for name, rows in names.items() if rows)
        return {"in_proj": (*parts, ProjectionPart("dt", c.nheads, is_matrix=False))}

    def cache_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a convolution window over x, B and C, and of one SSM state per head."""
        c = self.config
        return {"conv": (c.conv_dim, c.d_conv), "ssm": (c.nheads, c.headdim, c.d_state)}

    def mix(
        self,
        x: Tensor,
        cache: Mamba2Cache,
        *,
        path: SsdPath,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        context: SequencePart | None = None,
    ) -> tuple[Tensor, Mamba2Cache]:
        """Compute the formulas at the top of this file."""
        inputs, gates, window = self.scan_inputs(x, cache, lengths=lengths, cu_seqlens=cu_seqlens, context=context)
        ssm = cache.ssm if context is None else self._exchange_initial_state(inputs, cache.ssm, cu_seqlens, context)
        y_bthp, ssm = ssd(*inputs, initial_state=ssm, path=path, cu_seqlens=cu_seqlens)
        return self.output(y_bthp, gates), Mamba2Cache(window, ssm)

    def _exchange_initial_state(
        self, inputs: SsdInputs, initial: Tensor, cu_seqlens: Tensor | None, context: SequencePart
    ) -> Tensor:
        """Return the states that the scan starts from, (z, h, p, n), with the previous rank's where one continues."""
        tail = last_sequence_time(cu_seqlens)
        x, dt, b = inputs.x[:, tail], inputs.dt[:, tail], inputs.B[:, tail]
        log_decay, local_state = dt * inputs.A, initial[-1:]
        if context.continues_to_next:
            v = (x * dt.unsqueeze(-1)).to(x.dtype)
            local_state = compute_final_state(v.unsqueeze(2), b.unsqueeze(2), log_decay)
        local = (log_decay.sum(1)[..., None, None], local_state)
        (exchanged,) = context.exchange_boundary_state((initial,), cu_seqlens, local, carry_state)
        return exchanged

    def scan_inputs(
        self,
        x: Tensor,
        cache: Mamba2Cache,
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        context: SequencePart | None = None,
    ) -> tuple[SsdInputs, tuple[Tensor, ...], Tensor]:
        """Return the inputs of the scan, the gates for `output`, and the new window; arguments are those of `mix`."""
        z0, x0, z_bti, xbc_btv, dt_bth = self._split(apply_linear(self.in_proj, x))
        start = cache.conv if context is None else exchange_conv_window(xbc_btv, cache.conv, cu_seqlens, context)
        xbc_btv, window = self.conv1d(xbc_btv, start, lengths=lengths, cu_seqlens=cu_seqlens)
        dt_bth = self._dt(dt_bth, lengths)
        x_bthp, b_btgn, c_btgn = self._heads(xbc_btv)
        rates = -torch.exp(self.A_log.to(dt_bth.dtype))
        skip = self.D.unflatten(0, (-1, self.headdim)) if self.config.D_has_hdim else self.D
        return SsdInputs(x_bthp, dt_bth, rates, b_btgn, c_btgn, skip), (z0, x0, z_bti), window

    def step_infinite(self, x: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """Return the stationary output for a token that repeats forever, in closed form.

        The window holds copies of the token, and `h = dt x ⊗ B / (1 - exp(dt A))`. No cache goes in or comes out.
        """
        self._check_input(f"{type(self).__name__}.step_infinite", x, "b d")
        c: Mamba2Config = self.config
        z0, x0, z_bi, xbc_bv, dt_bh = self._split(apply_linear(self.in_proj, x))
        x_bhp, b_bgn, c_bgn = self._heads(self.conv1d.stationary(xbc_bv))
        dt_bh = self._dt(dt_bh.unsqueeze(1), None).squeeze(1)
        acc_dtype = dt_bh.dtype
        weight_bh = stationary_weight(dt_bh, -torch.exp(self.A_log.to(acc_dtype)))
        read_bh = (b_bgn.to(acc_dtype) * c_bgn.to(acc_dtype)).sum(-1).repeat_interleave(
            c.nheads // c.ngroups, dim=1
        ) * weight_bh
        skip = self.D.to(acc_dtype).view(c.nheads, -1)
        y_bhp = x_bhp.to(acc_dtype) * (read_bh.unsqueeze(-1) + skip)
        gates = tuple(v.unsqueeze(1) for v in (z0, x0, z_bi))
        return self.output(y_bhp.to(x_bhp.dtype).unsqueeze(1), gates).squeeze(1)

    def output(self, y_bthp: Tensor, gates: tuple[Tensor, ...]) -> Tensor:
        """Apply what follows the scan: gate, norm and projection to (b, t, d)."""
        z0, x0, z_bti = gates
        y_bti = y_bthp.flatten(2)
        y_bti = self.norm(y_bti, z_bti) if self.config.rmsnorm else y_bti * F.silu(z_bti)
        if self.mlp_width:
            y_bti = torch.cat([F.silu(z0) * x0, y_bti], dim=-1)
        return apply_linear(self.out_proj, y_bti)

    def describe_core(self, builder: StepBuilder, projected: int) -> int:
        """Convolution, states, norm and gate."""
        builder.check_unmodified(self, Mamba2)
        c: Mamba2Config = self.config
        z0 = projected
        x0 = z0 + self.mlp_width
        z = x0 + self.mlp_width
        xbc = z + c.ssm_width
        act = builder.conv(xbc, builder.submodule(self, "conv1d", CausalConv), c.conv_dim, c.d_conv)
        y = builder.slot(c.d_inner)
        ssm_y = y + self.mlp_width
        builder.phase(
            "mamba2",
            heads=c.nheads,
            head_width=c.headdim,
            groups=c.ngroups,
            state=c.d_state,
            skip_per_channel=c.D_has_hdim,
            dt_min=c.dt_limit[0],
            dt_max=c.dt_limit[1],
            dt=xbc + c.conv_dim,
            act=act,
            to=ssm_y,
            cache_state=builder.cache_tensor(c.nheads, c.headdim, c.d_state, dtype=builder.acc_dtype),
            dt_bias=builder.parameter(self, "dt_bias", c.nheads),
            a_log=builder.parameter(self, "A_log", c.nheads),
            skip=builder.parameter(self, "D", c.ssm_width if c.D_has_hdim else c.nheads),
        )
        if self.mlp_width:
            builder.gate(x0, z0, self.mlp_width, to=y)
        if c.rmsnorm:
            builder.norm(ssm_y, builder.submodule(self, "norm", GatedRMSNorm), c.ssm_width, z=z, to=ssm_y)
        else:
            builder.gate(ssm_y, z, c.ssm_width, to=ssm_y)
        return y

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Split the output of `in_proj` into z0, x0 of the MLP channels, z, xBC, dt."""
        c = self.config
        return projected.split([self.mlp_width, self.mlp_width, c.ssm_width, c.conv_dim, c.nheads], dim=-1)

    def _heads(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split (..., v) into x (..., h, p), B (..., g, n), C (..., g, n)."""
        c = self.config
        shape = (c.ngroups, c.d_state)
        x, b, cc = xbc.split([c.ssm_width, math.prod(shape), math.prod(shape)], dim=-1)
        return x.unflatten(-1, (c.nheads, c.headdim)), b.unflatten(-1, shape), cc.unflatten(-1, shape)

    def _dt(self, dt: Tensor, lengths: Tensor | None) -> Tensor:
        return step_sizes(dt, self.dt_bias, dt_limit=self.config.dt_limit, lengths=lengths)
