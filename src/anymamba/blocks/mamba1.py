"""Mamba-1: config, cache and block (Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces").

    x, z = in_proj(u)        x = silu(conv(x))        d, B, C = x_proj(x)        Δ = softplus(dt_proj(d))
    h_t[i, n] = exp(Δ_t[i] A[i, n]) h_{t-1}[i, n] + Δ_t[i] x_t[i] B_t[n]        y_t = h_t C_t + D x_t
    out = out_proj(y silu(z))

Falcon-Mamba and Jamba norm d, B and C after x_proj (`inner_norms`).

| letter | b | t | d | i | n | w |
|---|---|---|---|---|---|---|
| | batch | time | d_model | channels | state | conv width |

`prefill` from any cache, `step` unrolled from it, and any split of the sequence are the same function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anymamba.blocks.base import Block
from anymamba.blocks.block_config import BlockConfig, make_config
from anymamba.blocks.layers import CausalConv, ProjectionPart, RMSNorm, initial_dt_bias
from anymamba.core.cache_io import SavableTree
from anymamba.core.context_parallel import SequencePart
from anymamba.core.dtypes import state_dtype
from anymamba.core.layout import is_padding, last_sequence_time
from anymamba.core.linear import apply_linear, linear
from anymamba.ops.conv import exchange_conv_window
from anymamba.ops.discretization import stationary_weight
from anymamba.ops.norms_and_gates import rms_norm
from anymamba.scan import SsdPath, selective_scan
from anymamba.scan.chunking import carry_state

if TYPE_CHECKING:
    from anymamba.kernels.step_description import StepBuilder


@dataclass(frozen=True, kw_only=True)
class Mamba1Config(BlockConfig):
    """Sizes and options of a Mamba-1 block, named as in the official implementation."""

    LAST_POSITIONAL_FIELD: ClassVar[str] = "bias"

    d_model: int = field(kw_only=False)  # D, width of the residual stream
    d_state: int = 16  # N, states of a channel
    d_conv: int = 4  # W, width of the convolution; 1 is a per-token scale
    expand: int | float = 2  # E / D
    dt_rank: int | Literal["auto"] = "auto"  # rank of the projection to step sizes; "auto": D / 16, rounded up
    dt_min: int | float = 0.001  # initial dt log-uniform in (dt_min, dt_max), at least dt_init_floor
    dt_max: int | float = 0.1
    dt_init: Literal["random", "constant"] = "random"  # dt_proj's weight: uniform in ±dt_scale/√dt_rank, or that
    dt_scale: int | float = 1.0
    dt_init_floor: int | float = 1e-4
    conv_bias: bool = True
    bias: bool = False  # of in_proj and out_proj
    inner_norms: Literal["none", "plain", "weighted"] = "none"  # of d, B, C: Falcon-Mamba plain, Jamba weighted
    inner_norm_eps: int | float = 1e-6

    def __post_init__(self) -> None:
        """Reject combinations that cannot work."""
        self.check_common_fields()
        rank = self.dt_rank
        if rank != "auto" and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
            raise ValueError(f'Mamba1Config: dt_rank must be "auto" or an integer, at least 1, got {rank!r}')
        if isinstance(self.dt_scale, bool) or not isinstance(self.dt_scale, int | float) or self.dt_scale <= 0:
            raise ValueError(f"Mamba1Config: dt_scale must be a positive number, got {self.dt_scale!r}")
        if self.inner_norm_eps < 0:
            raise ValueError(f"Mamba1Config: inner_norm_eps must not be negative, got {self.inner_norm_eps}")

    @property
    def dt_width(self) -> int:
        """Return `dt_rank` as a number."""
        return math.ceil(self.d_model / 16) if self.dt_rank == "auto" else self.dt_rank


class _Mamba1CacheFields(NamedTuple):
    conv: Float[Tensor, "b i w"]
    ssm: Float[Tensor, "b i n"]


class Mamba1Cache(_Mamba1CacheFields, SavableTree):
    """The cache of a Mamba-1 block: everything that it carries from one token to the next.

    Attributes:
        conv: Last `d_conv` inputs of the convolution, newest last, (b, i, w), in the activations' dtype.
        ssm: State, (b, i, n), float32 or wider.
    """

    __slots__ = ()
    FP32_FIELDS: ClassVar[frozenset[str]] = frozenset({"ssm"})


class SelectiveInputs(NamedTuple):
    """The tensors of `anymamba.selective_scan`, in its order."""

    x: Float[Tensor, "b t i"]
    dt: Float[Tensor, "b t i"]
    A: Float[Tensor, "i n"]
    B: Float[Tensor, "b t n"]
    C: Float[Tensor, "b t n"]
    D: Float[Tensor, " i"]
    z: Float[Tensor, "b t i"]


class DtProjection(nn.Linear):
    """A projection to step sizes before their softplus, with its bias added in float32 or wider.

    The bias is most of the sum, and in bfloat16 it would have two digits.
    """

    def forward(self, x: Float[Tensor, "*batch r"]) -> Float[Tensor, "*batch i"]:
        """Project (..., dt_rank) to (..., i), float32 or wider."""
        y = linear(x, self.weight)
        acc_dtype = state_dtype(y.dtype)
        return y.to(acc_dtype) if self.bias is None else y.to(acc_dtype) + self.bias.to(acc_dtype)


class Mamba1(Block):
    """The Mamba-1 block. Parameter names, shapes and initialization are the official ones.

    Args:
        config: A `Mamba1Config`, or d_model, with the other fields of `Mamba1Config` as keywords.
        positional: Fields after d_model, in the order of the official block.
        device: Device of the parameters.
        dtype: Dtype of the parameters (A_log and D are float32 or wider, as officially).
    """

    CONFIG = Mamba1Config
    CACHE = Mamba1Cache
    MIRRORED_FIELDS = ("d_model", "d_state", "d_conv", "expand", "d_inner")

    def __init__(
        self,
        config: Mamba1Config | int | None = None,
        *positional: Any,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        """Create and initialize the parameters."""
        super().__init__(make_config(Mamba1Config, config, fields, positional))
        c: Mamba1Config = self.config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dt_rank = c.dt_width  # a number, where the config may hold "auto"
        self.in_proj = nn.Linear(c.d_model, 2 * c.d_inner, bias=c.bias, **factory)
        self.conv1d = CausalConv(c.d_inner, c.d_conv, bias=c.conv_bias, **factory)
        self.x_proj = nn.Linear(c.d_inner, c.dt_width + 2 * c.d_state, bias=False, **factory)
        self.dt_proj = DtProjection(c.dt_width, c.d_inner, **factory)
        bound = c.dt_scale / math.sqrt(c.dt_width)
        if c.dt_init == "constant":
            nn.init.constant_(self.dt_proj.weight, bound)
        else:
            nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        with torch.no_grad():
            self.dt_proj.bias.copy_(initial_dt_bias(c.d_inner, c.dt_min, c.dt_max, c.dt_init_floor, **factory))
        fp32_factory: dict[str, Any] = {"device": device, "dtype": state_dtype(dtype or torch.get_default_dtype())}
        self.A_log = nn.Parameter(torch.arange(1, c.d_state + 1, **fp32_factory).log().repeat(c.d_inner, 1))
        self.D = nn.Parameter(torch.ones(c.d_inner, **fp32_factory))
        if c.inner_norms == "weighted":
            self.dt_layernorm = RMSNorm(c.dt_width, eps=c.inner_norm_eps, **factory)
            self.b_layernorm = RMSNorm(c.d_state, eps=c.inner_norm_eps, **factory)
            self.c_layernorm = RMSNorm(c.d_state, eps=c.inner_norm_eps, **factory)
        self.out_proj = nn.Linear(c.d_inner, c.d_model, bias=c.bias, **factory)
        self.dt_proj.bias._no_reinit = True  # type: ignore[attr-defined]  # for initializers that set biases to zero
        for parameter in (self.dt_proj.bias, self.A_log, self.D):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def reference_tensor(self) -> Tensor:
        """Return a parameter that has the dtype and device of the activations."""
        return self.conv1d.weight

    def projection_parts(self) -> dict[str, tuple[ProjectionPart, ...]]:
        """Return the parts of `in_proj` and `x_proj`."""
        c = self.config
        steps = ProjectionPart("dt", c.dt_width, is_matrix=False)
        return {
            "in_proj": (ProjectionPart("x", c.d_inner), ProjectionPart("z", c.d_inner)),
            "x_proj": (steps, ProjectionPart("B", c.d_state), ProjectionPart("C", c.d_state)),
        }

    def cache_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a window and of a state for each channel."""
        return {"conv": (self.d_inner, self.config.d_conv), "ssm": (self.d_inner, self.d_state)}

    def mix(
        self,
        x: Tensor,
        cache: Mamba1Cache,
        *,
        path: SsdPath,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        context: SequencePart | None = None,
    ) -> tuple[Tensor, Mamba1Cache]:
        """Compute the formulas at the top of this file."""
        inputs, window = self.scan_inputs(x, cache, lengths=lengths, cu_seqlens=cu_seqlens, context=context)
        ssm = cache.ssm
        if context is not None:
            ssm = self._exchange_initial_state(inputs, ssm, path, cu_seqlens, context)
        y_bti, ssm = selective_scan(*inputs, initial_state=ssm, path=path, cu_seqlens=cu_seqlens)
        return apply_linear(self.out_proj, y_bti), Mamba1Cache(window, ssm)

    def _exchange_initial_state(
        self, inputs: SelectiveInputs, initial: Tensor, path: SsdPath, cu_seqlens: Tensor | None, context: SequencePart
    ) -> Tensor:
        """Return the states that the scan starts from, (z, i, n), with the previous rank's where one continues.

        The state at the end of the part takes a second scan: every state of a channel has its own decay, so it is not
        a matrix product as in Mamba-2. One scan would suffice if every rank waited for the previous rank's scan.
        """
        tail = last_sequence_time(cu_seqlens)
        x, dt, b, c = (part[:, tail] for part in (inputs.x, inputs.dt, inputs.B, inputs.C))
        local_state = initial[-1:]
        if context.continues_to_next:
            _, local_state = selective_scan(x, dt, inputs.A, b, c, path=path)
        local = (F.softplus(dt).sum(1).unsqueeze(-1) * inputs.A, local_state)
        (exchanged,) = context.exchange_boundary_state((initial,), cu_seqlens, local, carry_state)
        return exchanged

    def scan_inputs(
        self,
        x: Tensor,
        cache: Mamba1Cache,
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        context: SequencePart | None = None,
    ) -> tuple[SelectiveInputs, Tensor]:
        """Return the inputs of the scan and the new window; arguments are those of `mix`."""
        x_bti, z_bti = apply_linear(self.in_proj, x).chunk(2, dim=-1)
        start = cache.conv if context is None else exchange_conv_window(x_bti, cache.conv, cu_seqlens, context)
        x_bti, window = self.conv1d(x_bti, start, lengths=lengths, cu_seqlens=cu_seqlens)
        dt_bti, b_btn, c_btn = self._project_selection(x_bti)
        if lengths is not None:
            dt_bti = dt_bti.masked_fill(is_padding(lengths, x.shape[1]).unsqueeze(-1), -math.inf)
        rates = -torch.exp(self.A_log.to(cache.ssm.dtype))
        return SelectiveInputs(x_bti, dt_bti, rates, b_btn, c_btn, self.D, z_bti), window

    def step_infinite(self, x: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """Return the stationary output for a token that repeats forever, in closed form.

        The window holds copies of the token, and `h = Δ x B / (1 - exp(Δ A))`. No cache goes in or comes out.
        """
        self._check_input(f"{type(self).__name__}.step_infinite", x, "b d")
        x_bi, z_bi = apply_linear(self.in_proj, x).chunk(2, dim=-1)
        x_bi = self.conv1d.stationary(x_bi)
        dt_bi, b_bn, c_bn = self._project_selection(x_bi)
        acc_dtype = dt_bi.dtype
        weight_bin = stationary_weight(F.softplus(dt_bi).unsqueeze(-1), -torch.exp(self.A_log.to(acc_dtype)))
        read_bi = torch.einsum("bin,bn,bn->bi", weight_bin, b_bn.to(acc_dtype), c_bn.to(acc_dtype))
        y_bi = x_bi.to(acc_dtype) * (read_bi + self.D.to(acc_dtype))
        return apply_linear(self.out_proj, (y_bi * F.silu(z_bi.to(acc_dtype))).to(x_bi.dtype))

    def describe_core(self, builder: StepBuilder, projected: int) -> int:
        """Convolution, inner projections, states and gate."""
        builder.check_unmodified(self, Mamba1)
        c: Mamba1Config = self.config
        x = builder.conv(projected, builder.submodule(self, "conv1d", CausalConv), c.d_inner, c.d_conv)
        selected = builder.linear(x, self, "x_proj", c.d_inner, c.dt_width + 2 * c.d_state)
        if c.inner_norms != "none":
            part = selected
            for name, width in self._inner_widths().items():
                norm = builder.submodule(self, name, RMSNorm) if c.inner_norms == "weighted" else None
                builder.norm(part, norm, width, to=part, eps=c.inner_norm_eps if norm is None else None)
                part += width
        y = builder.slot(c.d_inner)
        builder.phase(
            "mamba1",
            channels=c.d_inner,
            state=c.d_state,
            x=x,
            dt=builder.linear(selected, self, "dt_proj", c.dt_width, c.d_inner, kind=DtProjection),
            z=projected + c.d_inner,
            b=selected + c.dt_width,
            c=selected + c.dt_width + c.d_state,
            to=y,
            cache_state=builder.cache_tensor(c.d_inner, c.d_state, dtype=builder.acc_dtype),
            a_log=builder.parameter(self, "A_log", c.d_inner, c.d_state),
            skip=builder.parameter(self, "D", c.d_inner),
        )
        return y

    def _project_selection(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project (..., i) to dt before its softplus (..., i) in the dtype of the state, B (..., n), C (..., n)."""
        c, widths = self.config, self._inner_widths()
        parts = apply_linear(self.x_proj, x).split(list(widths.values()), dim=-1)
        if c.inner_norms == "weighted":
            parts = [self.get_submodule(name)(part) for name, part in zip(widths, parts, strict=True)]
        elif c.inner_norms == "plain":
            parts = [rms_norm(part, part.new_ones(part.shape[-1]), eps=c.inner_norm_eps) for part in parts]
        low, b_btn, c_btn = parts
        return self.dt_proj(low).to(state_dtype(x.dtype)), b_btn, c_btn

    def _inner_widths(self) -> dict[str, int]:
        """Return the widths of d, B and C by the names of their norms."""
        c = self.config
        return {"dt_layernorm": c.dt_width, "b_layernorm": c.d_state, "c_layernorm": c.d_state}
