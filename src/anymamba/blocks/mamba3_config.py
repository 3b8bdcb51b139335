"""Mamba-3: config, cache, and the inputs of its scan."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from anymamba.blocks.block_config import BlockConfig
from anymamba.core.cache_io import SavableTree
from anymamba.ops.rotation import RotationKind


@dataclass(frozen=True, kw_only=True)
class Mamba3Config(BlockConfig):
    """Sizes and options of a Mamba-3 block, named as in the official implementation."""

    # Options of the official block that choose its kernels, or that it takes and does not use.
    IGNORED: ClassVar[frozenset[str]] = frozenset({"fuse_pregate_headwise_norm", "dropout", "n_layer"})
    LAST_POSITIONAL_FIELD: ClassVar[str] = "mimo_rank"

    d_model: int = field(kw_only=False)  # D, width of the residual stream
    d_state: int = 128  # N, state size of a head
    expand: int | float = 2  # E / D
    headdim: int = 64  # P, width of a head
    ngroups: int = 1  # G, groups of heads that share B and C
    rope_fraction: int | float = 0.5  # fraction of the state that rotates, from 0 to 1
    dt_min: int | float = 0.001  # initial dt log-uniform in (dt_min, dt_max), at least dt_init_floor
    dt_max: int | float = 0.1
    dt_init_floor: int | float = 1e-4
    A_floor: int | float = 1e-4  # smallest decay rate
    is_outproj_norm: bool = False  # norm per head before the gate
    is_mimo: bool = False  # several inputs and outputs per head, with their own weights and pairing
    mimo_rank: int = 4  # R, of MIMO
    bias: bool = False  # of in_proj and out_proj; official blocks have none
    chunk_size: int | None = None  # L, for paths that carry no chunk length; None: SsdPath.optimal_chunk_len
    a_activation: Literal["heavy_tail", "softplus"] = "heavy_tail"  # official since June 2026 | before
    rotation: Literal["complex", "quaternion", "fixed"] = "complex"  # fixed: the same for every token, as RoPE
    rotation_range: int | float = 1.0  # largest angle per unit of dt, in half circles; 1 is official
    dt_limit: tuple[int | float, int | float] = (0.0, math.inf)  # dt is clamped to it, in every mode
    learnable_init_states: bool = False  # a parameter is the state of an empty cache

    @classmethod
    def check_given_fields(cls, fields: dict[str, Any]) -> None:
        """Warn about a rank that is not used, too. Official configs give both fields and cause no warning."""
        super().check_given_fields(fields)
        rank = fields.get("mimo_rank", 1)
        if isinstance(rank, int) and rank > 1 and "is_mimo" not in fields:
            warnings.warn(
                f"Mamba3Config: mimo_rank = {rank} is ignored without is_mimo=True: the block is SISO", stacklevel=3
            )

    def __post_init__(self) -> None:
        """Reject combinations that cannot work."""
        self.check_common_fields()
        self.check_heads(self.d_inner)
        if not 0 <= self.rope_fraction <= 1:
            raise ValueError(f"Mamba3Config: rope_fraction must be between 0 and 1, got {self.rope_fraction}")
        unit = 4 if self.rotation == "quaternion" else 2
        if self.rope_fraction > 0 and self.d_state % unit:
            raise ValueError(
                f"Mamba3Config: d_state must be a multiple of {unit} for {self.rotation} rotation, got {self.d_state}"
            )
        if self.rope_fraction > 0 and int(self.d_state * self.rope_fraction) < unit:
            raise ValueError(
                f"Mamba3Config: rope_fraction · d_state must be 0 or at least {unit}, the channels that rotate "
                f"together, got {self.rope_fraction} · {self.d_state}"
            )
        if self.A_floor < 0:
            raise ValueError(f"Mamba3Config: A_floor must not be negative, got {self.A_floor}")

    @property
    def nheads(self) -> int:
        """Return the number of heads H."""
        return self.d_inner // self.headdim

    @property
    def rank(self) -> int:
        """Return the rank R: `mimo_rank` for MIMO, else 1."""
        return self.mimo_rank if self.is_mimo else 1

    @property
    def rotation_kind(self) -> RotationKind:
        """Return which channels rotate together, and how (`anymamba.ops.rotation`)."""
        if self.rotation == "quaternion":
            return "quaternion"
        return "halves" if self.is_mimo else "interleaved"

    @property
    def num_rotations(self) -> int:
        """Return the number of pairs of channels, or blocks of four, that rotate in each head."""
        return int(self.d_state * self.rope_fraction) // (4 if self.rotation == "quaternion" else 2)

    @property
    def rotation_channels(self) -> int:
        """Return the channels of the projection that set angular rates: shared by heads, or per head and block."""
        if self.rotation == "fixed":
            return 0
        return self.nheads * self.num_rotations * 3 if self.rotation == "quaternion" else self.num_rotations


class _Mamba3CacheFields(NamedTuple):
    ssm: Float[Tensor, "b h p n"]
    k: Float[Tensor, "b r h n"]
    v: Float[Tensor, "b h p"]
    rotation: Float[Tensor, "b h *angle"]


class Mamba3Cache(_Mamba3CacheFields, SavableTree):
    """The cache of a Mamba-3 block: everything that it carries from one token to the next.

    Attributes:
        ssm: State h, (b, h, p, n), float32 or wider.
        k: Last key, after norm, bias and rotation, (b, r, h, n).
        v: Last x, before `mimo_x`, (b, h, p).
        rotation: Running rotation, angles (b, h, s) or unit quaternions (b, h, j, 4), float32 or wider.
    """

    __slots__ = ()
    FP32_FIELDS: ClassVar[frozenset[str]] = frozenset({"ssm", "rotation"})


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
